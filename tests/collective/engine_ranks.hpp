// Runs ranks in threads, over engines of the tests.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "ferry/ferry.hpp"
#include "harness/thread_engine.hpp"
#include "runtime/support.hpp"

namespace ferry::test {

using EngineOfRank = std::function<EngineFunctions(int rank)>;

// Runs `body` as every rank, on simulated hosts of these labels if there are any. Returns what each rank
// threw; empty: nothing.
inline std::vector<std::string> run_ranks(int ranks, const EngineOfRank& engine,
                                          const std::function<void(const Rank&)>& body,
                                          const std::vector<int>& hosts = {}) {
  const TestBootstrap meeting(ranks);
  std::vector<std::string> errors(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Bootstrap bootstrap = meeting.bootstrap(rank);
        if (!hosts.empty()) bootstrap.host_id = std::to_string(hosts[rank]);
        Group::custom(bootstrap, engine(rank)).run(body);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline std::vector<std::string> run_ranks(const ThreadEngine& engine, int ranks,
                                          const std::function<void(const Rank&)>& body) {
  return run_ranks(ranks, [&](int rank) { return engine.functions(rank); }, body);
}

inline void expect_none(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

}  // namespace ferry::test
