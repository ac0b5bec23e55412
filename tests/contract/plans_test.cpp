// Plans as values: kept ones, damaged ones, those of others.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "contract/harness.hpp"
#include "layout/plan_layout.hpp"

namespace ferry::contract {
namespace {

TEST_P(Contract, APlanServesManyCalls) {
  for (const int ranks : kRankCounts) {
    for (const Layout layout : {Layout::expert_major, Layout::expert_padded, Layout::rank_major}) {
      Case c = small_case(ranks);
      c.ranks = ranks;
      c.config.top_k = 3;
      c.config.layout = layout;
      c.config.format = Format::fp32();
      c.type = DType::fp32;
      if (layout == Layout::rank_major) c.weights_from = WeightsFrom::nowhere;
      Case forward = c;  // fp8 there, bf16 back
      forward.config.format = Format::fp8_e4m3();
      forward.type = DType::bf16;
      Case backward = forward;
      backward.config.format = Format::bf16();
      const Step routed = make_step(forward);
      const Step again = with_values(backward, routed, 5), other = make_step(forward, 6);
      const reference::Outcome outcomes[] = {make_outcome(c, routed), make_outcome(c, again),
                                             make_outcome(c, other)};
      run(ranks, describe(c), [&](Rank rank) {
        Exchange exchange(rank, c.config);
        const Plan plan = play_step(exchange, forward, routed, outcomes[0]);
        play_step(exchange, forward, other, outcomes[2]);  // the lane's own plan is another one now
        for (int repeat = 0; repeat < 3; ++repeat) {
          DispatchPlay replay(exchange, backward, again);
          replay.run_by(plan);
          CombinePlay(exchange, backward, again, outcomes[1], plan, replay.arrivals().weight).run();
        }
      });
    }
  }
}

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

// Runs one call by a damaged plan: it ends, keeps to its memory, and what came out is right unless some rank
// reports.
template <class Call, class Compare>
void require_damage_is_survived(Exchange& exchange, const std::string& what, Call call, Compare compare) {
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
  if (std::find(all.begin(), all.end(), 1) != all.end()) return;
  try {
    compare();
  } catch (const Mismatch& mismatch) {
    require(false, what, ": no rank reports, and ", mismatch.what());
  }
}

TEST_P(Contract, DamagedPlansAreSurvivedAndReported) {
  for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
    Case c = small_case(1);
    c.ranks = 3;
    c.config.experts = 6;
    c.full = true;
    c.caller_memory = true;
    c.reduction = c.config.reduction = reduction;
    c.weights_from = WeightsFrom::nowhere;
    c.values = true;
    const Step step = make_step(c);
    const reference::Outcome outcome = make_outcome(c, step);
    std::int64_t most_rows = 0;
    for (const reference::RankPlaces& each : step.places.ranks) {
      most_rows = std::max(most_rows, static_cast<std::int64_t>(each.rows.size()));
    }
    run(c.ranks, describe(c), [&](Rank rank) {
      Exchange exchange(rank, c.config);
      const Plan good = play_step(exchange, c, step, outcome);
      const PlanShape shape = static_cast<const PlanHeader*>(good.storage())->shape;
      for (const Table& table : tables_of(shape, most_rows)) {
        for (const std::int32_t garbage :
             {-2, 0x7FFFFFFF, -0x7FFFFFFF - 1, static_cast<std::int32_t>(table.limit)}) {
          for (const bool all : {false, true}) {
            const Plan bad = good.copy();
            std::int32_t* entries = view_plan(bad.storage(), shape).*table.entries;
            if (rank.index() == 1)
              std::fill_n(all ? entries : entries + table.count / 2, all ? table.count : 1, garbage);
            const std::string what = str(table.name, all ? " all " : " one ", garbage);
            CombinePlay combine(exchange, c, step, outcome, bad, nullptr);
            require_damage_is_survived(
                exchange, "combine, " + what, [&] { combine.call(); }, [&] { combine.compare(); });
            DispatchPlay dispatch(exchange, c, step);
            require_damage_is_survived(exchange, "dispatch, " + what, [&] { dispatch.call(bad); }, [] {});
            rank.barrier();
          }
        }
      }
      play_step(exchange, c, step, outcome);  // as usable as before
    });
  }
}

TEST_P(Contract, PlansOfAnotherExchangeAreRefused) {
  Case c = small_case(1), other = small_case(2);
  other.config.experts = c.config.experts + 1;
  const Step step = make_step(c), other_step = make_step(other);
  const reference::Outcome outcome = make_outcome(c, step), other_outcome = make_outcome(other, other_step);
  run(c.ranks, describe(c), [&](Rank rank) {
    Exchange exchange(rank, c.config), second(rank, other.config);
    const Plan own = play_step(exchange, c, step, outcome),
               foreign = play_step(second, other, other_step, other_outcome);
    const Plan damaged = own.copy();
    static_cast<PlanHeader*>(damaged.storage())->total += 1000;
    for (const Plan& plan : {foreign, damaged, Plan()}) {
      bool refused = false;
      try {
        CombinePlay combine(exchange, c, step, outcome, plan, nullptr);
        combine.call();
      } catch (const UsageError&) {
        refused = true;
      }
      require(refused, "a plan that is not this exchange's went through");
    }
    play_step(exchange, c, step, outcome);
  });
}

}  // namespace
}  // namespace ferry::contract
