// A channel in symmetric memory of its own, and calls on it that check every call summary.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/text.hpp"
#include "group/channel.hpp"
#include "memory/symmetric_memory.hpp"
#include "runtime/support.hpp"

namespace ferry::test {

inline constexpr std::int64_t kSummaryBytes = 520;
inline constexpr int kSummaryWords = kSummaryBytes / 8;

struct TestLane {
  TestLane(const Rank& as, double deadline)
      : rank(as),
        memory(rank, 128 + Channel::bytes(rank.size(), kSummaryBytes)),
        channel(rank, memory.sections(128), kSummaryBytes, deadline) {}

  std::uint64_t word(std::uint64_t call, int from, int to, int index) const {
    return ((call * 31 + static_cast<std::uint64_t>(from)) * 31 + static_cast<std::uint64_t>(to)) * 1009 +
           static_cast<std::uint64_t>(index);
  }

  void write_summary(int peer) {
    auto* words = reinterpret_cast<std::uint64_t*>(channel.summary_to(peer));
    for (int i = 0; i < kSummaryWords; ++i) words[i] = word(channel.call(), rank.index(), peer, i);
  }

  // `pause` runs halfway, so that a peer that overwrites the summary too early is detected.
  template <class Pause>
  void check_summary(int peer, Pause pause) {
    const auto* words = reinterpret_cast<const std::uint64_t*>(channel.summary_from(peer));
    for (int i = 0; i < kSummaryWords; ++i) {
      if (i == kSummaryWords / 2) pause();
      FERRY_CHECK(
          words[i] == word(channel.call(), peer, rank.index(), i),
          str("call ", channel.call(), ": summary of rank ", peer, " on rank ", rank.index(), ", word ", i));
    }
  }

  template <class Act>
  void for_peers(Act act) {
    for (int peer = 0; peer < rank.size(); ++peer) {
      if (peer != rank.index()) act(peer);
    }
  }

  void send(Operation operation, std::span<const ComparedOption> options) {
    channel.begin(operation, options);
    for_peers([&](int peer) { write_summary(peer); });
    for_peers([&](int peer) { channel.post(peer); });
  }

  template <class Pause>
  void receive(Pause pause) {
    for_peers([&](int peer) {
      channel.wait(peer);
      check_summary(peer, pause);
    });
  }

  void exchange(Operation operation = Operation::dispatch, std::span<const ComparedOption> options = {}) {
    send(operation, options);
    receive([] {});
  }

  Rank rank;
  SymmetricMemory memory;
  Channel channel;
};

// Runs `act` and returns the error of type `Expected` that it throws. Throws if it throws nothing or another
// error.
template <class Expected>
Expected expect_thrown(const std::function<void()>& act) {
  try {
    act();
  } catch (const Expected& error) {
    return error;
  } catch (const std::exception& error) {
    throw std::runtime_error(str("an error of another type was thrown: ", error.what()));
  }
  throw std::runtime_error("nothing was thrown");
}

inline void require_text(const std::exception& error, const std::string& text) {
  FERRY_CHECK(std::string(error.what()).find(text) != std::string::npos,
              str("'", error.what(), "' lacks '", text, "'"));
}

}  // namespace ferry::test
