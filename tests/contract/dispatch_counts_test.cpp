// dispatch_counts(), and dispatches into memory of as many rows as it tells.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "harness/harness.hpp"
#include "harness/random.hpp"
#include "layout/plan_layout.hpp"
#include "plan/shapes.hpp"

namespace ferry::contract {
namespace {

// Number, among the replicas of all experts, of the one on a rank.
int replica_at(const Placement& placement, int rank, int expert) {
  int replica = 0;
  for (int e = 0; e < expert; ++e) replica += static_cast<int>(placement.replicas_of(e).size());
  while (placement.locations()[replica].rank != rank) ++replica;
  return replica;
}

void compare_counts(const DispatchCounts& counts, const TestCase& c, const StepInputs& step, int rank) {
  require_equal(counts.total, std::int64_t{step.positions.ranks[rank].row_offsets.back()}, "total");
  const Placement placement = oracle::placement_of(c.config, c.ranks);
  const std::vector<int>& experts = placement.experts_of(rank);
  require_equal(static_cast<int>(counts.routes.size()), oracle::expert_groups(c.config, placement, rank),
                "experts");
  for (std::size_t e = 0; e < counts.routes.size(); ++e) {
    std::int32_t routes = 0;
    for (int source = 0; source < c.ranks && e < experts.size(); ++source)
      routes += step.positions
                    .counts[source * placement.total_replicas() + replica_at(placement, rank, experts[e])];
    require_equal(counts.routes[e], routes, "routes of local expert ", e);
  }
  require_equal(static_cast<int>(counts.tokens.size()), c.ranks, "ranks");
  for (int source = 0; source < c.ranks; ++source)
    require_equal(std::int64_t{counts.tokens[source]}, step.positions.tokens(source), "tokens of rank ",
                  source);
}

TEST_P(Contract, DispatchCountsTellWhatADispatchDelivers) {
  std::uint64_t number = 0;
  for (const Layout layout : {Layout::rank_major, Layout::expert_major, Layout::expert_padded}) {
    for (const int ranks : kGroupSizes) {
      TestCase c = small_case(++number);
      c.ranks = ranks;
      c.config.layout = layout;
      c.config.experts = number % 2 == 0 ? 32 : 3 + static_cast<int>(number);
      c.config.top_k = 3;
      c.config.max_tokens = number % 3 == 0 ? 1500 : 20;
      c.config.hidden = 8;
      c.config.repeats = true;
      if (layout != Layout::rank_major) c.config.alignment = 4;
      if (number % 4 == 0) c.config.capacity = 8;
      if (number % 2 == 0) c.config.local_slots = 34;
      c.ids = number % 2 == 0 ? IdType::int64 : IdType::int32;
      c.masked = 0.2;
      c.bad_ids = 0.1;
      c.duplicates = true;
      const PreparedStep first = prepare(c), second = prepare(c, 1);
      run(ranks, describe(c), [&](Rank rank) {
        SyncExchange exchange(rank, c.config);
        for (const PreparedStep* prepared : {&first, &second, &first}) {
          DispatchRun dispatch(exchange, c, prepared->step);
          const DispatchCounts counts =
              exchange.dispatch_counts(dispatch.ids(), prepared->step.positions.tokens(rank.index()));
          compare_counts(counts, c, prepared->step, rank.index());
          dispatch.run();
        }
      });
    }
  }
}

TEST_P(Contract, DispatchCountsEndWithAnErrorOnAllRanks) {
  TestCase c = small_case(3);
  c.ranks = 3;
  c.full = true;
  const PreparedStep prepared = prepare(c);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    DispatchRun inputs(exchange, c, prepared.step);
    const std::int64_t tokens = c.config.max_tokens;
    const bool odd = rank.index() == 1;
    require_refused("9 tokens on rank 1, max_tokens is 8",
                    [&] { exchange.dispatch_counts(inputs.ids(), odd ? tokens + 1 : tokens); });
    require_refused("dispatch_counts", [&] {
      if (odd) {
        inputs.call();
      } else {
        exchange.dispatch_counts(inputs.ids(), tokens);
      }
    });
    compare_counts(exchange.dispatch_counts(inputs.ids(), tokens), c, prepared.step, rank.index());
    DispatchRun(exchange, c, prepared.step).run();
  });
}

// Memory of `rows` rows for one dispatch.
struct Memory {
  GuardedBuffer values, weight, local_ids, plan;

  Memory(const TestCase& c, std::int64_t rows, std::int64_t slots)
      : values(rows * c.config.hidden * 2),
        weight(4 * rows * slots),
        local_ids(4 * rows * slots),
        plan(plan_bytes(c.config, c.ranks)) {}

  ReceiveBuffers buffers(std::int64_t rows, bool rank_major, bool allow_truncation) {
    return {.parts = {values.data()},
            .weight = weight.as<float>(),
            .local_ids = rank_major ? local_ids.as<std::int32_t>() : nullptr,
            .plan = plan.data(),
            .rows = rows,
            .allow_truncation = allow_truncation};
  }
};

// Every rank has memory for fewer rows than arrive, for as many, for more, or does not say; some allow that
// rows are left out. With a capacity that is exceeded, too.
TEST_P(Contract, MoreRowsThanTheCallersMemoryAreAnErrorOnAllRanks) {
  std::uint64_t number = 0;
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    for (const int ranks : kGroupSizes) {
      for (const bool has_capacity : {false, true}) {
        TestCase c = small_case(++number);
        Random random = Random::of({number, 47});
        c.ranks = ranks;
        c.config.layout = layout;
        c.config.hidden = 8;
        c.config.max_tokens = number % 3 == 0 ? 300 : 20;
        if (layout == Layout::expert_major) c.config.alignment = 4;
        if (has_capacity) c.config.capacity = number % 3 == 0 ? 200 : 16;
        c.full = number % 2 == 0;
        c.masked = 0.2;
        const bool rank_major = layout == Layout::rank_major;
        const std::int64_t slots = rank_major ? c.config.top_k : 1;
        const PreparedStep prepared = prepare(c);
        const oracle::RowPositions& positions = prepared.step.positions;
        for (int form = 0; form < 4; ++form) {
          std::vector<std::int64_t> rows, limits;
          std::vector<bool> truncates;
          for (const oracle::RankRows& of : positions.ranks) {
            const std::int64_t total = of.row_offsets.back();
            rows.push_back(form == 0 ? total : std::max<std::int64_t>(total + random.between(-10, 2), 1));
            if (form > 1 && random.chance(0.3)) rows.back() = 0;
            truncates.push_back(form > 1 && random.chance(0.3));
            const bool limited = rows.back() > 0 && rows.back() < of.capacity && !truncates.back();
            limits.push_back(limited ? rows.back() : -1);
          }
          oracle::RowPositions expected = positions;
          expected.overflow = oracle::find_overflow(positions, limits);
          run(ranks, describe(c), [&](Rank rank) {
            const auto r = static_cast<std::size_t>(rank.index());
            SyncExchange exchange(rank, c.config);
            DispatchRun inputs(exchange, c, prepared.step);
            const std::int64_t held = rows[r] > 0 ? rows[r] : positions.ranks[r].capacity;
            Memory memory(c, held, slots);
            DispatchOptions options = inputs.options();
            options.memory = memory.buffers(rows[r], rank_major, truncates[r]);
            if (form == 3) {
              exchange.dispatch_send(inputs.tokens(), inputs.ids(), inputs.weights(), options);
              exchange.dispatch_receive();
            } else {
              exchange.dispatch(inputs.tokens(), inputs.ids(), inputs.weights(), options);
            }
            memory.values.require_guards("values");
            require_diagnostics(exchange, 0, expected);
            // The exchange stays usable.
            DispatchRun(exchange, c, prepared.step).run();
          });
        }
      }
    }
  }
}

TEST_P(Contract, AnErrorOfTheCallersMemoryNamesTheRowsThatArrive) {
  TestCase c = small_case(1);
  c.config.check_calls = true;
  c.config.experts = 2;
  c.config.top_k = 1;
  const StepInputs step = inputs_from_ids(c, {{1, 1, 1}, {1, 0, 1}});  // 5 rows for expert 1, on rank 1
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    DispatchRun inputs(exchange, c, step);
    DispatchOptions options = inputs.options();
    options.memory.rows = 3;
    for (const bool truncates : {false, true}) {
      options.memory.allow_truncation = truncates;
      std::string text;
      try {
        exchange.dispatch(inputs.tokens(), inputs.ids(), inputs.weights(), options);
      } catch (const OverflowError& error) {
        text = error.what();
      }
      require_equal(text,
                    std::string(truncates ? ""
                                          : "dispatch: memory.rows = 3 on rank 1, which is sent 5 rows; not "
                                            "stored on all ranks together: 2; pass memory for the rows that "
                                            "dispatch_counts() tells, or allow_truncation"),
                    "message");
      require_equal(*exchange.last_dispatch_result().total, rank.index() == 0 ? 1 : 5, "total");
    }
  });
}

TEST_P(Contract, RowsPastTheCallersMemoryAreNotStored) {
  for (const Layout layout : {Layout::rank_major, Layout::expert_major}) {
    TestCase c = small_case(7);
    c.ranks = 3;
    c.config.layout = layout;
    c.config.hidden = 64;
    c.config.max_tokens = 300;
    c.config.own_receive_buffers = false;
    if (layout == Layout::expert_major) c.config.alignment = 8;
    c.full = true;
    const bool rank_major = layout == Layout::rank_major;
    const std::int64_t slots = rank_major ? c.config.top_k : 1;
    const PreparedStep prepared = prepare(c);
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, c.config);
      DispatchRun whole(exchange, c, prepared.step);
      whole.run();
      const std::int64_t total = prepared.step.positions.ranks[rank.index()].row_offsets.back();
      // The next dispatch overwrites what `whole` has received.
      const std::vector<float> weights(whole.received().weight, whole.received().weight + total * slots);
      for (const std::int64_t rows : {total, total - 17, std::int64_t{1}, total + 5}) {
        Memory memory(c, rows, slots);
        DispatchRun inputs(exchange, c, prepared.step);
        DispatchOptions options = inputs.options();
        options.memory = memory.buffers(rows, rank_major, true);
        const DispatchResult received =
            exchange.dispatch(inputs.tokens(), inputs.ids(), inputs.weights(), options);
        exchange.check();
        require_equal(std::int64_t{*received.total}, total, "total");
        const std::int64_t stored = std::min(rows, total);
        for (std::int64_t row = 0; row < stored; ++row) {
          const bool padding = received.source[row].rank < 0;
          const std::int64_t bytes = c.config.hidden * 2;
          require(padding || std::equal(memory.values.data() + row * bytes,
                                        memory.values.data() + (row + 1) * bytes, whole.row(0, row)),
                  "row ", row, " differs");
          for (std::int64_t slot = row * slots; slot < (row + 1) * slots; ++slot)
            require_equal(memory.weight.as<float>()[slot], weights[slot], "weight ", slot);
        }
        memory.values.require_guards("values");
        memory.weight.require_guards("weights");
        memory.local_ids.require_guards("local ids");
        // No message of this rank has a row that is not there.
        const PlanView plan =
            view_plan(const_cast<void*>(received.plan.storage()), plan_shape(exchange.config()));
        for (int source = 0; source < c.ranks; ++source) {
          const std::int64_t messages = plan.tokens_between[source * c.ranks + rank.index()];
          for (std::int64_t i = 0; i < messages * c.config.top_k; ++i) {
            const std::int32_t row =
                plan.received_rows_of_message[source * std::int64_t{c.config.max_tokens} * c.config.top_k +
                                              i];
            require(row < rows, "row ", row, " of ", rows);
          }
        }
        // Nor has a route of its own tokens; those to other ranks keep the row that they would have there.
        const std::vector<oracle::RouteTarget>& routes = prepared.step.positions.routes[rank.index()];
        for (std::size_t i = 0; i < routes.size(); ++i) {
          const bool has_row = routes[i].destination != rank.index() || routes[i].row < rows;
          require_equal(plan.route_row[i], static_cast<std::int32_t>(has_row ? routes[i].row : -1), "route ",
                        i);
        }
      }
    });
  }
}

// The plan's total includes the rows that were not stored: by it, the padding among them is written too.
TEST_P(Contract, ADispatchByThePlanOfFewerRowsTakesMemoryForItsTotal) {
  TestCase c = small_case(9);
  c.ranks = 3;
  c.config.hidden = 64;
  c.config.max_tokens = 300;
  c.config.own_receive_buffers = false;
  c.config.alignment = 8;
  c.config.zero_padding = true;
  c.full = true;
  c.weights_from = WeightsFrom::none;
  const PreparedStep prepared = prepare(c);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    const oracle::RankRows& of = prepared.step.positions.ranks[rank.index()];
    const std::int64_t total = of.row_offsets.back(), rows = total - 17, bytes = c.config.hidden * 2;
    DispatchRun whole(exchange, c, prepared.step);
    whole.run();
    Memory fewer(c, rows, 1), by_plan(c, total, 1);
    DispatchRun inputs(exchange, c, prepared.step);
    inputs.options().memory = {
        .parts = {fewer.values.data()}, .plan = fewer.plan.data(), .rows = rows, .allow_truncation = true};
    const Plan plan = inputs.call().plan;
    fewer.values.require_guards("values");
    inputs.options().memory = {.parts = {by_plan.values.data()}};
    inputs.call(plan);
    exchange.check();
    by_plan.values.require_guards("values by the plan");
    const std::vector<std::byte> untouched(static_cast<std::size_t>(bytes), kPoison);
    for (std::int64_t row = 0; row < total; ++row) {
      const bool is_stored = row < rows || whole.received().source[row].rank < 0;
      require(std::equal(by_plan.values.data() + row * bytes, by_plan.values.data() + (row + 1) * bytes,
                         is_stored ? whole.row(0, row) : untouched.data()),
              "row ", row, " of ", rows, " and ", total, " differs");
    }
  });
}

// Every rank stores 20 rows fewer than it is sent. Behind them lies the result, NaN, which a combine must not
// read, also that of an exchange which has not received the rows.
TEST_P(Contract, CombineLeavesOutRowsThatWereNotStored) {
  if (GetParam().on_device()) GTEST_SKIP() << "not known of device memory";
  constexpr int kFewer = 20;
  TestCase c = small_case(8);
  c.ranks = 3;
  c.config.hidden = 64;
  c.config.max_tokens = 300;
  c.config.own_receive_buffers = false;
  c.config.reduction = Reduction::exact;
  c.config.format = Format::fp32();
  c.config.combine_type = c.type = DType::fp32;
  c.full = true;
  const StepInputs step = make_inputs(c);
  const auto total = [&](int rank) { return step.positions.ranks[rank].row_offsets.back(); };
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config), other(rank, c.config);
    DispatchRun inputs(exchange, c, step);
    const std::int64_t rows = total(rank.index()) - kFewer, tokens = inputs.tokens().count;
    GuardedBuffer values((rows + tokens) * 256), plan(plan_bytes(c.config, c.ranks));
    std::byte* const result = values.data() + rows * 256;
    const DispatchResult received = exchange.dispatch(
        inputs.tokens(), inputs.ids(), nullptr,
        {.memory = {.parts = {values.data()}, .plan = plan.data(), .rows = rows, .allow_truncation = true}});
    for (const auto& [by, reduction] : {std::pair{&other, Reduction::exact},
                                        {&other, Reduction::partial},
                                        {&exchange, Reduction::exact},
                                        {&exchange, Reduction::partial}}) {
      std::fill_n(result, tokens * 256, kNan);
      by->combine({.data = values.data(), .type = DType::fp32}, received.plan,
                  {.data = result, .type = DType::fp32}, {.reduction = reduction});
      for (std::int64_t i = 0; i < tokens * 64; ++i) {
        int stored = 0;
        for (int slot = 0; slot < c.config.top_k; ++slot) {
          const std::int64_t token = i / 64;
          const std::int32_t to = received.plan.destination(token, slot),
                             row = received.plan.row(token, slot);
          stored += row >= 0 && row < total(to) - kFewer;
        }
        const float value = static_cast<const float*>(inputs.tokens().parts[0])[i];
        require_equal(reinterpret_cast<const float*>(result)[i], static_cast<float>(stored) * value, "value ",
                      i);
      }
    }
  });
}

}  // namespace
}  // namespace ferry::contract
