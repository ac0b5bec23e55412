// Calls by plans with damaged tables: they return, write nothing outside the memory they were given, and
// leave the exchange usable.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "harness/harness.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::contract {
namespace {

constexpr int kDamagedRank = 1;

// A table of a plan's storage: its number of int32 entries, and the smallest value that is too large for an
// entry.
struct Table {
  const char* name;
  std::int32_t* PlanView::* entries;
  std::int64_t count;
  std::int64_t limit;
};

std::vector<Table> tables_of(const PlanShape& shape, std::int64_t rows) {
  const std::int64_t ranks = shape.ranks, tokens = shape.max_tokens, slots = tokens * shape.top_k;
  std::vector<Table> tables{
      {"counts", &PlanView::counts, ranks * shape.experts, slots + 1},
      {"tokens_between", &PlanView::tokens_between, ranks * ranks, tokens + 1},
      {"route_expert", &PlanView::route_expert, slots, shape.experts},
      {"route_rank", &PlanView::route_rank, slots, ranks},
      {"route_row", &PlanView::route_row, slots, rows},
      {"token_ranks", &PlanView::token_ranks, tokens * shape.most_ranks(), ranks},
      {"sent_tokens", &PlanView::sent_tokens, ranks * tokens, tokens},
      {"received_token", &PlanView::received_token, ranks * tokens, tokens},
      {"received_position", &PlanView::received_position, ranks * tokens, shape.most_ranks()},
      {"received_rows_of_message", &PlanView::received_rows_of_message, ranks * slots, rows}};
  if (shape.shared_experts > 0) tables.push_back({"rank_tokens", &PlanView::rank_tokens, ranks, tokens + 1});
  return tables;
}

// Runs a call by a damaged plan. Returns whether any rank reports the damage. Collective.
template <class Call>
bool damage_is_reported(SyncExchange& exchange, const std::string& what, Call call) {
  bool reported = false;
  try {
    call();
    exchange.check();
  } catch (const BadSourceError& error) {
    reported = true;
    require(error.bad.count > 0 && error.bad.index >= 0, what, ": the report is empty");
  }
  std::vector<char> all(exchange.rank().size());
  exchange.rank().all_gather(&reported, all.data(), 1);
  return std::find(all.begin(), all.end(), 1) != all.end();
}

// Runs every operation by a plan that is damaged on some rank, and requires that it returns and stays within
// its memory. `wrong_must_be_reported`: a wrong result of combine must be reported.
void require_contained(SyncExchange& exchange, const TestCase& c, const StepInputs& step,
                       const oracle::ExpertOutputs& expert_outputs, const Plan& bad, const std::string& what,
                       bool wrong_must_be_reported) {
  CombineRun combine(exchange, c, step, expert_outputs, bad, nullptr);
  const bool reported = damage_is_reported(exchange, "combine, " + what, [&] { combine.call(); });
  combine.require_guards();
  if (wrong_must_be_reported && !reported) {
    try {
      combine.compare();
    } catch (const Mismatch& mismatch) {
      require(false, "combine, ", what, ": no rank reports the damage, and ", mismatch.what());
    }
  }
  DispatchRun dispatch(exchange, c, step);
  damage_is_reported(exchange, "dispatch, " + what, [&] { dispatch.call(bad); });
  dispatch.require_guards();
  if (c.config.layout == Layout::rank_major) return;
  GuardedBuffer values(static_cast<std::int64_t>(step.positions.routes[exchange.rank().index()].size()) * 4);
  GuardedBuffer rows(static_cast<std::int64_t>(step.positions.ranks[exchange.rank().index()].rows.size()) *
                     4);
  damage_is_reported(exchange, "route_values, " + what,
                     [&] { exchange.route_values(values.as<float>(), bad, rows.as<float>()); });
  rows.require_guards("route_values, " + what);
  damage_is_reported(exchange, "return_values, " + what,
                     [&] { exchange.return_values(rows.as<float>(), bad, values.as<float>()); });
  values.require_guards("return_values, " + what);
}

std::int64_t max_rows(const StepInputs& step) {
  std::int64_t rows = 0;
  for (const oracle::RankRows& each : step.positions.ranks) {
    rows = std::max(rows, static_cast<std::int64_t>(each.rows.size()));
  }
  return rows;
}

// One case for each layout and each way to combine it; those of expert_major have shared experts. On host
// memory two more, with tiles of scales, of rows that are encoded where they arrive.
std::vector<TestCase> cases_of_damage(const TestCase& small) {
  std::vector<TestCase> cases;
  for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
    for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
      if (layout == Layout::rank_major && reduction == Reduction::exact) continue;
      TestCase c = small;
      c.ranks = 3;
      c.config.experts = 6;
      c.config.layout = layout;
      if (layout == Layout::expert_major) c.config.shared_experts = 1;
      c.full = true;
      c.reduction = c.config.reduction = reduction;
      c.weights_from = WeightsFrom::none;
      c.row_values = layout != Layout::rank_major;
      // With sm_limit = 1, a device's only block sends and then receives: sending must not wait for anything
      // that peers write only once they have received.
      c.sm_limit = cases.size() % 2 == 0 ? 1 : 0;
      cases.push_back(c);
      if (layout == Layout::rank_major || reduction == Reduction::exact) continue;
      c.config.format = Format::nvfp4({.tiles = true});
      c.input_scales = true;
      cases.push_back(c);
    }
  }
  return cases;
}

TEST_P(Contract, DamagedPlansAreReported) {
  for (const TestCase& c : cases_of_damage(small_case(1))) {
    const StepInputs step = make_inputs(c);
    const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, exchange_config(c));
      const Plan good = dispatch_and_combine(exchange, c, step, expert_outputs);
      const PlanShape shape = static_cast<const PlanHeader*>(good.storage())->shape;
      for (const Table& table : tables_of(shape, max_rows(step))) {
        for (const std::int32_t value :
             {-2, 0x7FFFFFFF, -0x7FFFFFFF - 1, static_cast<std::int32_t>(table.limit)}) {
          for (const bool all : {false, true}) {
            const Plan bad = good.copy();
            std::int32_t* entries = view_plan(bad.storage(), shape).*table.entries;
            if (rank.index() == kDamagedRank)
              std::fill_n(all ? entries : entries + table.count / 2, all ? table.count : 1, value);
            require_contained(exchange, c, step, expert_outputs, bad,
                              str(table.name, all ? " all " : " one ", value), true);
          }
        }
      }
      dispatch_and_combine(exchange, c, step, expert_outputs);  // the exchange is still usable
    });
  }
}

// A header whose checksum is right and whose numbers are not: a plan's bytes are the caller's.
TEST_P(Contract, PlanHeadersOutOfRangeAreRefused) {
  for (const TestCase& c : cases_of_damage(small_case(4))) {
    const StepInputs step = make_inputs(c);
    const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, exchange_config(c));
      const Plan good = dispatch_and_combine(exchange, c, step, expert_outputs);
      const std::function<void(PlanHeader&)> damages[] = {
          [](PlanHeader& header) { header.total = -1; },
          [](PlanHeader& header) { header.total = std::int64_t{1} << 40; },
          [](PlanHeader& header) { header.tokens = -1; },
          [&](PlanHeader& header) { header.tokens = c.config.max_tokens + 1; }};
      for (const auto& damage : damages) {
        const Plan bad = good.copy();
        auto& header = *static_cast<PlanHeader*>(bad.storage());
        if (rank.index() == kDamagedRank) {
          damage(header);
          header.check = header_check(header);
        }
        const std::string what = str(header.tokens, " tokens, ", header.total, " rows");
        CombineRun combine(exchange, c, step, expert_outputs, bad, nullptr);
        require(!usage_error([&] { combine.call(); }).empty(), "combine accepted a plan of ", what);
        combine.require_guards();
        DispatchRun dispatch(exchange, c, step);
        require(!usage_error([&] { dispatch.call(bad); }).empty(), "dispatch accepted a plan of ", what);
        dispatch.require_guards();
      }
      dispatch_and_combine(exchange, c, step, expert_outputs);
    });
  }
}

// Changes some entries to other values within their range: swapped destinations, rows used twice, other
// counts. No check can detect these, so the result may be wrong, but nothing else may be.
void misplace(Random& random, const Table& table, std::int32_t* entries) {
  const int changes = random.between(1, 8);
  for (int i = 0; i < changes; ++i) {
    const int one = random.below(table.count), other = random.below(table.count);
    switch (random.below(3)) {
      case 0:
        std::swap(entries[one], entries[other]);
        break;
      case 1:
        entries[one] = entries[other];
        break;
      default:
        entries[one] = random.below(table.limit + 1) - 1;
    }
  }
}

TEST_P(Contract, WrongPlanEntriesStayWithinMemory) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP()
      << "two ranks may write sums to the same address, which the thread sanitizer reports as a race";
#endif
  constexpr int kRounds = 12;
  for (const TestCase& c : cases_of_damage(small_case(2))) {
    const StepInputs step = make_inputs(c);
    const oracle::ExpertOutputs expert_outputs = make_expert_outputs(c, step);
    run(c.ranks, describe(c), [&](Rank rank) {
      SyncExchange exchange(rank, exchange_config(c));
      const Plan good = dispatch_and_combine(exchange, c, step, expert_outputs);
      const PlanShape shape = static_cast<const PlanHeader*>(good.storage())->shape;
      Random random = Random::of({c.seed, static_cast<std::uint64_t>(rank.index())});
      for (const Table& table : tables_of(shape, max_rows(step))) {
        for (int round = 0; round < kRounds; ++round) {
          const Plan bad = good.copy();
          const bool everywhere = round % 2 == 1;
          if (everywhere || rank.index() == kDamagedRank)
            misplace(random, table, view_plan(bad.storage(), shape).*table.entries);
          require_contained(exchange, c, step, expert_outputs, bad, str(table.name, ", round ", round),
                            false);
        }
      }
      dispatch_and_combine(exchange, c, step, expert_outputs);
    });
  }
}

// A plan that announces more messages than are sent makes a rank read what an earlier call of another format
// left in the staging buffer. There the header of a message may look valid while its expert ids are not.
TEST_P(Contract, StaleStagingIdsAreValidated) {
  constexpr std::int32_t kWord = 5;  // a valid token index, but not an expert
  TestCase c = small_case(3);
  c.ranks = 2;
  c.config.experts = 4;
  c.config.layout = Layout::rank_major;
  c.config.format = Format::fp32();
  c.weights_from = WeightsFrom::none;
  c.full = true;
  ASSERT_GT(c.config.max_tokens, kWord);
  ASSERT_GE(kWord, c.config.experts);
  TestCase few = c;
  few.config.format = Format::bf16();
  few.tokens = {1, 1};
  c.type = DType::fp32;
  std::vector<std::vector<std::int64_t>> all_to_all(2, std::vector<std::int64_t>{0, 2});
  const StepInputs kept = inputs_from_ids(few, all_to_all);
  run(c.ranks, describe(c), [&](Rank rank) {
    SyncExchange exchange(rank, c.config);
    DispatchRun first(exchange, few, kept);
    first.run();
    const Plan bad = first.received().plan.copy();
    const PlanShape shape = static_cast<const PlanHeader*>(bad.storage())->shape;
    const PlanView view = view_plan(bad.storage(), shape);
    if (rank.index() == kDamagedRank) {  // the other rank sends what it sent before
      std::fill_n(view.tokens_between, 4, c.config.max_tokens);
      std::fill_n(view.received_rows_of_message, 2 * std::int64_t{c.config.max_tokens} * c.config.top_k, 0);
    }

    const std::int64_t words = std::int64_t{c.config.max_tokens} * c.config.hidden;
    const GuardedBuffer tokens =
        GuardedBuffer::of(std::vector<std::int32_t>(static_cast<std::size_t>(words), kWord));
    GuardedBuffer ids(std::int64_t{c.config.max_tokens} * c.config.top_k * 4);
    for (int token = 0; token < c.config.max_tokens; ++token) {
      ids.as<std::int32_t>()[2 * token] = 0;
      ids.as<std::int32_t>()[2 * token + 1] = 2;
    }
    for (int parity = 0; parity < 2; ++parity) {
      exchange.dispatch(Tokens::rows(tokens.data(), c.config.max_tokens, DType::fp32),
                        Ids(ids.as<std::int32_t>()));
    }
    TestCase replayed = few;
    replayed.weighted = false;
    DispatchRun replay(exchange, replayed, kept);
    const std::string what = "stale staging";
    damage_is_reported(exchange, what, [&] { replay.call(bad); });
    replay.require_guards();
    const DispatchResult& rows = exchange.last_dispatch_result();
    for (int i = 0; i < c.config.top_k; ++i) {  // of row 0, to which the plan sends every message
      require(rows.local_ids[i] >= -1 && rows.local_ids[i] < 2, what, ": local id ", rows.local_ids[i]);
    }
    exchange.check();
  });
}

}  // namespace
}  // namespace ferry::contract
