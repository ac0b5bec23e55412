// Plans with damaged tables: every call by them ends, stores nothing outside, and leaves the exchange usable.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "harness/harness.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::contract {
namespace {

constexpr int kDamagedRank = 1;

// Tables of a plan's storage that hold int32 entries: how many, and the least value that is too large for
// one.
struct Table {
  const char* name;
  std::int32_t* PlanView::* entries;
  std::int64_t count;
  std::int64_t limit;
};

std::vector<Table> tables_of(const PlanShape& shape, std::int64_t rows) {
  const std::int64_t ranks = shape.ranks, tokens = shape.max_tokens, slots = tokens * shape.top_k;
  return {{"counts", &PlanView::counts, ranks * shape.experts, slots + 1},
          {"tokens_between", &PlanView::tokens_between, ranks * ranks, tokens + 1},
          {"route_expert", &PlanView::route_expert, slots, shape.experts},
          {"route_rank", &PlanView::route_rank, slots, ranks},
          {"route_row", &PlanView::route_row, slots, rows},
          {"token_ranks", &PlanView::token_ranks, tokens * shape.most_ranks(), ranks},
          {"sent_tokens", &PlanView::sent_tokens, ranks * tokens, tokens},
          {"came_token", &PlanView::came_token, ranks * tokens, tokens},
          {"came_position", &PlanView::came_position, ranks * tokens, shape.most_ranks()},
          {"came_rows", &PlanView::came_rows, ranks * slots, rows}};
}

// Runs a call by a damaged plan. True: some rank reports the damage.
template <class Call>
bool damage_is_reported(Exchange& exchange, const std::string& what, Call call) {
  bool reported = false;
  try {
    call();
    exchange.check();
  } catch (const BadSourceError& error) {
    reported = true;
    require(error.bad.count > 0 && error.bad.index >= 0, what, ": an empty report");
  }
  std::vector<char> all(exchange.rank().size());
  exchange.rank().all_gather(&reported, all.data(), 1);
  return std::find(all.begin(), all.end(), 1) != all.end();
}

// Every operation by a plan that is damaged on some rank: it ends and keeps to its memory. `must_show`: a
// combine whose result is wrong has been reported.
void require_survived(Exchange& exchange, const Case& c, const Step& step, const oracle::Outcome& outcome,
                      const Plan& bad, const std::string& what, bool must_show) {
  CombineRun combine(exchange, c, step, outcome, bad, nullptr);
  const bool reported = damage_is_reported(exchange, "combine, " + what, [&] { combine.call(); });
  combine.require_guards();
  if (must_show && !reported) {
    try {
      combine.compare();
    } catch (const Mismatch& mismatch) {
      require(false, "combine, ", what, ": no rank reports, and ", mismatch.what());
    }
  }
  DispatchRun dispatch(exchange, c, step);
  damage_is_reported(exchange, "dispatch, " + what, [&] { dispatch.call(bad); });
  dispatch.require_guards();
  if (c.config.layout == Layout::rank_major) return;
  Buffer values(static_cast<std::int64_t>(step.positions.routes[exchange.rank().index()].size()) * 4);
  Buffer rows(static_cast<std::int64_t>(step.positions.ranks[exchange.rank().index()].rows.size()) * 4);
  damage_is_reported(exchange, "route_values, " + what,
                     [&] { exchange.route_values(values.as<float>(), bad, rows.as<float>()); });
  rows.require_guards("route_values, " + what);
}

std::int64_t most_rows(const Step& step) {
  std::int64_t most = 0;
  for (const oracle::RankRows& each : step.positions.ranks) {
    most = std::max(most, static_cast<std::int64_t>(each.rows.size()));
  }
  return most;
}

// One for each layout, and for each way of combining it.
std::vector<Case> cases_of_damage(const Case& small) {
  std::vector<Case> cases;
  for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
    for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
      if (layout == Layout::rank_major && reduction == Reduction::exact) continue;
      Case c = small;
      c.ranks = 3;
      c.config.experts = 6;
      c.config.layout = layout;
      c.full = true;
      c.reduction = c.config.reduction = reduction;
      c.weights_from = WeightsFrom::nowhere;
      c.values = layout != Layout::rank_major;
      // A device's lonely block sends and receives one after the other: it must not wait for what peers say
      // only when they have received.
      c.sm_limit = cases.size() % 2 == 0 ? 1 : 0;
      cases.push_back(c);
    }
  }
  return cases;
}

TEST_P(Contract, DamagedPlansAreSurvivedAndReported) {
  for (const Case& c : cases_of_damage(small_case(1))) {
    const Step step = make_step(c);
    const oracle::Outcome outcome = make_outcome(c, step);
    run(c.ranks, describe(c), [&](Rank rank) {
      Exchange exchange(rank, c.config);
      const Plan good = play_step(exchange, c, step, outcome);
      const PlanShape shape = static_cast<const PlanHeader*>(good.storage())->shape;
      for (const Table& table : tables_of(shape, most_rows(step))) {
        for (const std::int32_t garbage :
             {-2, 0x7FFFFFFF, -0x7FFFFFFF - 1, static_cast<std::int32_t>(table.limit)}) {
          for (const bool all : {false, true}) {
            const Plan bad = good.copy();
            std::int32_t* entries = view_plan(bad.storage(), shape).*table.entries;
            if (rank.index() == kDamagedRank)
              std::fill_n(all ? entries : entries + table.count / 2, all ? table.count : 1, garbage);
            require_survived(exchange, c, step, outcome, bad,
                             str(table.name, all ? " all " : " one ", garbage), true);
          }
        }
      }
      play_step(exchange, c, step, outcome);  // as usable as before
    });
  }
}

// Entries that could be right cannot be told from right ones: destinations swapped, rows given twice, other
// counts. The result is wrong then, and nothing else.
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

TEST_P(Contract, WrongEntriesWithinTheirRangeAreSurvived) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "two ranks may write sums to one place, which the thread sanitizer calls a race";
#endif
  constexpr int kRounds = 12;
  for (const Case& c : cases_of_damage(small_case(2))) {
    const Step step = make_step(c);
    const oracle::Outcome outcome = make_outcome(c, step);
    run(c.ranks, describe(c), [&](Rank rank) {
      Exchange exchange(rank, c.config);
      const Plan good = play_step(exchange, c, step, outcome);
      const PlanShape shape = static_cast<const PlanHeader*>(good.storage())->shape;
      Random random = Random::of({c.seed, static_cast<std::uint64_t>(rank.index())});
      for (const Table& table : tables_of(shape, most_rows(step))) {
        for (int round = 0; round < kRounds; ++round) {
          const Plan bad = good.copy();
          const bool everywhere = round % 2 == 1;
          if (everywhere || rank.index() == kDamagedRank)
            misplace(random, table, view_plan(bad.storage(), shape).*table.entries);
          require_survived(exchange, c, step, outcome, bad, str(table.name, ", round ", round), false);
        }
      }
      play_step(exchange, c, step, outcome);
    });
  }
}

// A plan that promises more messages than come makes a rank read what an earlier call of another format left
// in the staging: there a head may look right and its ids be none.
TEST_P(Contract, IdsInStagingOfAnotherFormatAreLookedAt) {
  constexpr std::int32_t kWord = 5;  // a token, and no expert
  Case c = small_case(3);
  c.ranks = 2;
  c.config.experts = 4;
  c.config.layout = Layout::rank_major;
  c.config.format = Format::fp32();
  c.weights_from = WeightsFrom::nowhere;
  c.full = true;
  ASSERT_GT(c.config.max_tokens, kWord);
  ASSERT_GE(kWord, c.config.experts);
  Case few = c;
  few.config.format = Format::bf16();
  few.tokens = {1, 1};
  c.type = DType::fp32;
  std::vector<std::vector<std::int64_t>> all_to_all(2, std::vector<std::int64_t>{0, 2});
  const Step kept = step_of_ids(few, all_to_all);
  run(c.ranks, describe(c), [&](Rank rank) {
    Exchange exchange(rank, c.config);
    DispatchRun first(exchange, few, kept);
    first.run();
    const Plan bad = first.received().plan.copy();
    const PlanShape shape = static_cast<const PlanHeader*>(bad.storage())->shape;
    const PlanView view = view_plan(bad.storage(), shape);
    if (rank.index() == kDamagedRank) {  // the other one sends what it did
      std::fill_n(view.tokens_between, 4, c.config.max_tokens);
      std::fill_n(view.came_rows, 2 * std::int64_t{c.config.max_tokens} * c.config.top_k, 0);
    }

    const std::int64_t words = std::int64_t{c.config.max_tokens} * c.config.hidden;
    const Buffer tokens = Buffer::of(std::vector<std::int32_t>(static_cast<std::size_t>(words), kWord));
    Buffer ids(std::int64_t{c.config.max_tokens} * c.config.top_k * 4);
    for (int token = 0; token < c.config.max_tokens; ++token) {
      ids.as<std::int32_t>()[2 * token] = 0;
      ids.as<std::int32_t>()[2 * token + 1] = 2;
    }
    for (int parity = 0; parity < 2; ++parity) {
      exchange.dispatch(Tokens::rows(tokens.data(), c.config.max_tokens, DType::fp32),
                        Ids(ids.as<std::int32_t>()));
    }
    Case replayed = few;
    replayed.weighted = false;
    DispatchRun replay(exchange, replayed, kept);
    const std::string what = "stale staging";
    damage_is_reported(exchange, what, [&] { replay.call(bad); });
    replay.require_guards();
    const DispatchResult& rows = exchange.last_dispatch_result();
    for (int i = 0; i < c.config.top_k; ++i) {  // of row 0, which every message went to
      require(rows.local_ids[i] >= -1 && rows.local_ids[i] < 2, what, ": local id ", rows.local_ids[i]);
    }
    exchange.check();
  });
}

}  // namespace
}  // namespace ferry::contract
