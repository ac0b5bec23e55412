#include "contract/harness.hpp"

#include <cstdlib>
#include <iostream>
#include <random>

namespace ferry::contract {

std::string name_of(const Setup& setup) {
  return str(setup.backend == BackendKind::cpu ? "Cpu" : "Reference",
             setup.processes ? "Processes" : "Threads");
}

std::uint64_t base_seed() {
  static const std::uint64_t seed = [] {
    const char* given = std::getenv("FERRY_SEED");
    const std::uint64_t value = given != nullptr ? std::strtoull(given, nullptr, 0) : std::random_device{}();
    std::cout << "FERRY_SEED=" << value << std::endl;
    return value;
  }();
  return seed;
}

std::uint64_t seed_of(std::uint64_t number) {
  return Random::of({base_seed(), number}).next();
}

Group make_group(const Setup& setup, int ranks) {
  return setup.processes ? Group::processes(ranks) : Group::threads(ranks);
}

void run_ranks(const Setup& setup, int ranks, const std::string& what,
               const std::function<void(Rank)>& body) {
  try {
    make_group(setup, ranks).run([&](Rank rank) {
      try {
        body(rank);
      } catch (const Mismatch& mismatch) {
        throw Mismatch(str("rank ", rank.index(), ": ", mismatch.what()));
      }
    });
  } catch (const std::exception& error) {
    ADD_FAILURE() << name_of(setup) << ", FERRY_SEED=" << base_seed() << "\n" << what << "\n" << error.what();
  }
}

void play_step(Exchange& exchange, const Case& c, const Step& step, const reference::Outcome& outcome) {
  DispatchPlay dispatch(exchange, c, step);
  dispatch.run();
  CombinePlay(exchange, c, step, outcome, dispatch.arrivals().plan, dispatch.arrivals().weight).run();
}

bool play(const Setup& setup, Case c) {
  c.config.backend = setup.backend;
  const Step step = make_step(c);
  const reference::Outcome outcome = make_outcome(c, step);
  const bool failed_before = testing::Test::HasFailure();
  run_ranks(setup, c.ranks, describe(c), [&](Rank rank) {
    Exchange exchange(rank, c.config);
    play_step(exchange, c, step, outcome);
  });
  return failed_before || !testing::Test::HasFailure();
}

Case Contract::small_case(std::uint64_t number) const {
  Case c;
  c.seed = seed_of(number);
  c.config.backend = GetParam().backend;
  return c;
}

}  // namespace ferry::contract
