#include "harness/harness.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>

#include "backends/cpu/chunk_schedule.hpp"
#include "harness/device.hpp"
#include "harness/program_ranks.hpp"
#include "oracle/combine.hpp"
#include "oracle/expected.hpp"
#include "seed.hpp"

namespace ferry::contract {

std::string name_of(const Setup& setup) {
  switch (setup.ranks) {
    case RanksAre::threads:
      return str(to_string(setup.backend), ", threads");
    case RanksAre::processes:
      return str(to_string(setup.backend), ", processes");
    case RanksAre::persistent_processes:
      return str(to_string(setup.backend), ", lasting processes");
  }
  return "unknown";
}

std::vector<Setup> device_setups(RanksAre ranks) {
  if (!device::built()) return {};
  return {{BackendKind::cuda, ranks}};
}

std::string why_not(const Setup& setup) {
  if (setup.backend != BackendKind::cuda) return {};
  const bool forks = setup.ranks != RanksAre::threads && !program_ranks().is_rank();
  if (forks && device::started()) return "this process has started the driver and cannot fork ranks";
  return device::why_not();
}

std::uint64_t seed_of(std::uint64_t number) {
  return Random::of({test::seed(), number}).next();
}

// What is played decides, so that it is the same when a case is played alone: chunks of one row or of a few,
// and calls that are one chunk.
std::int64_t draw_chunk_budget(const std::string& what) {
  Random random = Random::of({std::hash<std::string>()(what)});
  return random.pick({std::int64_t{1}, std::int64_t{1} << random.between(10, 18), std::int64_t{8} << 20});
}

namespace {

Group make_group(const Setup& setup, int ranks) {
  return setup.ranks == RanksAre::processes ? Group::processes(ranks) : Group::threads(ranks);
}

}  // namespace

void run_ranks(const Setup& setup, int ranks, const std::string& what,
               const std::function<void(Rank)>& body) {
  cpu::chunk_budget = draw_chunk_budget(what);
  const auto play_as = [&](Rank rank) {
    try {
      std::optional<device::Work> work;
      if (setup.backend == BackendKind::cuda) work.emplace(rank.topology().local_rank_of(rank.index()));
      body(rank);
    } catch (const Mismatch& mismatch) {
      throw Mismatch(str("rank ", rank.index(), ": ", mismatch.what()));
    }
  };
  try {
    if (setup.ranks == RanksAre::persistent_processes) {
      program_ranks().run(ranks, play_as);
    } else {
      make_group(setup, ranks).run(play_as);
    }
  } catch (const std::exception& error) {
    ADD_FAILURE() << name_of(setup) << ", FERRY_SEED=" << test::seed()
                  << ", FERRY_TEST_MEMORY=" << device::memory_name() << ", chunks of " << cpu::chunk_budget
                  << " bytes\n"
                  << what << "\n"
                  << error.what();
    // The others are no longer where this rank is.
    if (program_ranks().is_rank()) program_ranks().end_test(true);
  }
}

Plan play_step(Exchange& exchange, const Case& c, const Step& step, const oracle::Outcome& outcome) {
  DispatchRun dispatch(exchange, c, step);
  dispatch.run();
  CombineRun(exchange, c, step, outcome, dispatch.received().plan, dispatch.received().weight).run();
  return dispatch.received().plan.copy();
}

void play_route_values(Exchange& exchange, const Case& c, const Step& step, const Plan& plan) {
  const int rank = exchange.rank().index();
  std::vector<std::vector<float>> values;
  for (int source = 0; source < c.ranks; ++source) {
    Random random = Random::of({c.seed, 99, static_cast<std::uint64_t>(source)});
    values.push_back(random_floats(random, step.positions.tokens(source) * c.config.top_k));
  }
  Buffer mine(static_cast<std::int64_t>(values[rank].size()) * 4);
  std::copy(values[rank].begin(), values[rank].end(), mine.as<float>());
  const std::vector<oracle::RowInfo>& rows = step.positions.ranks[rank].rows;
  Buffer got(static_cast<std::int64_t>(rows.size()) * 4);
  exchange.route_values(mine.as<float>(), plan, got.as<float>(), c.lane);
  got.require_guards("row values");
  const std::vector<float> expected = oracle::values_at_rows(step.positions, values, rank);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (rows[row].state == oracle::RowState::untouched) continue;
    require_equal(got.as<float>()[row], expected[row], "row value ", row);
  }
}

bool play(const Setup& setup, const Case& c, const Step& step) {
  const oracle::Outcome outcome = make_outcome(c, step);
  const bool failed_before = testing::Test::HasFailure();
  run_ranks(setup, c.ranks, describe(c), [&](Rank rank) {
    Exchange exchange(rank, c.config);
    play_step(exchange, c, step, outcome);
  });
  return failed_before || !testing::Test::HasFailure();
}

bool play(const Setup& setup, Case c) {
  c.config.backend = setup.backend;
  return play(setup, c, make_step(c));
}

namespace {

void require_traffic(const Exchange& exchange, const Case& c, const std::vector<const Step*>& played) {
  const int rank = exchange.rank().index();
  std::int64_t sent = 0, returned = 0;
  for (const Step* step : played) {
    sent += oracle::dispatch_messages(step->positions, rank);
    returned += oracle::combine_messages(step->positions, rank, c.reduction);
  }
  require_equal(exchange.wire_counts().dispatch_messages, sent, "messages of dispatches");
  require_equal(exchange.wire_counts().combine_messages, returned, "messages of combines");
}

void require_load(const Exchange& exchange, const Case& c, const std::vector<const Step*>& played) {
  std::vector<std::int64_t> experts(c.config.experts), ranks(c.ranks);
  for (const Step* step : played) {
    for (std::size_t i = 0; i < step->positions.counts.size(); ++i) {
      const int expert = static_cast<int>(i) % c.config.experts;
      experts[expert] += step->positions.counts[i];
      ranks[step->global.config.placement.place(expert).rank] += step->positions.counts[i];
    }
  }
  const LoadCounts load = exchange.load();
  require_equal(load.dispatches, static_cast<std::int64_t>(played.size()), "dispatches counted");
  require_equal_lists<std::int64_t>(load.experts.data(), experts, "routes to expert");
  require_equal_lists<std::int64_t>(load.ranks.data(), ranks, "routes to rank");
}

// What play_sequences() plays of a case.
struct Sequence {
  Case c;
  Step first, second, again;
  oracle::Outcome outcomes[3];

  explicit Sequence(const Case& of)
      : c(of),
        first(make_step(c, 0)),
        second(make_step(c, 1)),
        again(with_values(c, first, 2)),
        outcomes{make_outcome(c, first), make_outcome(c, second), make_outcome(c, again)} {}

  void run(Rank rank) const {
    Exchange exchange(rank, c.config);
    const Plan kept = play_step(exchange, c, first, outcomes[0]);
    play_step(exchange, c, second, outcomes[1]);
    DispatchRun replay(exchange, c, again);
    replay.run_by(kept);
    CombineRun(exchange, c, again, outcomes[2], kept, replay.received().weight).run();
    if (c.config.layout != Layout::rank_major) play_route_values(exchange, c, first, kept);
    require_traffic(exchange, c, {&first, &second, &again});
    require_load(exchange, c, {&first, &second});
  }
};

}  // namespace

bool play_sequences(const Setup& setup, const std::vector<Case>& cases) {
  std::vector<Sequence> sequences;
  for (Case c : cases) {
    c.config.backend = setup.backend;
    sequences.emplace_back(c);
  }
  const bool failed_before = testing::Test::HasFailure();
  const std::string what = cases.size() == 1 ? describe(sequences[0].c) : str(cases.size(), " cases");
  run_ranks(setup, cases[0].ranks, what, [&](Rank rank) {
    for (const Sequence& sequence : sequences) {
      try {
        sequence.run(rank);
      } catch (const std::exception& error) {
        throw Mismatch(str(error.what(), " in ", describe(sequence.c)));
      }
    }
  });
  return failed_before || !testing::Test::HasFailure();
}

void Contract::SetUp() {
  if (const std::string reason = why_not(GetParam()); !reason.empty()) GTEST_SKIP() << reason;
}

void Contract::TearDown() {
  if (GetParam().ranks != RanksAre::persistent_processes) return;
  if (const std::string failed = program_ranks().end_test(HasFailure()); !failed.empty())
    ADD_FAILURE() << "ended badly:" << failed;
}

void Contract::play_added() {
  struct Prepared {
    Case c;
    Step step;
    oracle::Outcome outcome;
  };
  std::map<int, std::vector<Prepared>> by_ranks;
  for (const Case& c : added_) {
    const Step step = make_step(c);
    by_ranks[c.ranks].push_back({c, step, make_outcome(c, step)});
  }
  for (const auto& [ranks, group] : by_ranks) {
    const std::vector<Prepared>& prepared = group;
    run(ranks, str(prepared.size(), " cases"), [&](Rank rank) {
      for (const Prepared& each : prepared) {
        try {
          Exchange exchange(rank, each.c.config);
          play_step(exchange, each.c, each.step, each.outcome);
        } catch (const Mismatch& mismatch) {
          throw Mismatch(str(mismatch.what(), " in ", describe(each.c)));
        }
      }
    });
  }
  added_.clear();
}

Case Contract::small_case(std::uint64_t number) const {
  Case c;
  c.seed = seed_of(number);
  c.config.backend = GetParam().backend;
  return c;
}

}  // namespace ferry::contract
