// Calls over an engine in which a rank cannot finish its messages, as when a kernel has failed: the call ends
// on every rank at once, on other hosts too, and the next one works.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "backends/collective/engine_call.hpp"
#include "backends/collective/message_hops.hpp"
#include "base/errors.hpp"
#include "collective/engine_ranks.hpp"
#include "group/rank_state.hpp"
#include "seed.hpp"

namespace ferry::test {
namespace {

using collective::EngineCall;
using collective::MessageHops;

constexpr double kDeadline = 30, kSoon = 2;

struct Ranks {
  std::vector<int> hosts;  // of each rank
  bool ordered, relays;
};

// How calls are made, and where a rank fails.
struct Form {
  bool split, goes_on;   // goes_on: a second exchange follows, in which the rank fails
  bool between = false;  // the rank fails between the two instead, and refuses the call
};

// A lane of one rank, in whose calls every rank sends each other one a number, or two.
class Caller {
 public:
  Caller(const Rank& rank, const Ranks& ranks) : rank_(rank) {
    Engine& engine = *rank.state().engine();
    auto messages = std::make_unique<MessageHops>(
        rank.topology(), rank.index(), collective::HopOptions{.relays = ranks.relays, .window = 0},
        std::make_unique<collective::HostHopMemory>(std::array<std::int64_t, 4>{1024, 1024, 1024, 1024}));
    messages_ = messages.get();
    call_ = std::make_unique<EngineCall>(
        rank,
        collective::LaneConnection{.communicator = std::move(engine.communicators(1).front()),
                                   .lane = 0,
                                   .summary_bytes = 8,
                                   .deadline = kDeadline,
                                   .ordered = ranks.ordered ? engine.transfer_thread() : nullptr},
        std::move(messages));
  }

  // `failure`: throws what keeps this rank from finishing its messages; null: nothing does.
  void call(const Form& form, const std::function<void()>& failure) {
    const auto number = static_cast<std::int64_t>(1000 * call_->begin(Operation::metadata, {}, form.goes_on));
    if (form.goes_on) {
      exchange(form.split, number, nullptr);
      or_refuse<std::exception>(
          [&](const std::exception&) {
            call_->refuse(Operation::metadata, ErrorRecord::of(std::current_exception()));
          },
          [&] {
            if (form.between && failure) failure();
          });
      call_->go_on();
    }
    exchange(form.split, number + (form.goes_on ? 100 : 0), form.between ? nullptr : failure);
  }

 private:
  void exchange(bool split, std::int64_t number, const std::function<void()>& failure) {
    call_->post(split, [=, this](const EngineCall::Check&) {
      const std::vector<std::int64_t> bytes(static_cast<std::size_t>(rank_.size()), sizeof number);
      messages_->reserve(
          {.direction = cpu::Direction::to_experts, .message_bytes = sizeof number, .bytes = bytes});
      if (failure) failure();
      for (int peer = 0; peer < rank_.size(); ++peer) {
        const std::int64_t sent = number + 10 * rank_.index() + peer;
        std::memcpy(messages_->outgoing(peer), &sent, sizeof sent);
      }
    });
    call_->wait();
    for (int peer = 0; peer < rank_.size(); ++peer) {
      if (peer == rank_.index()) continue;
      std::int64_t received = 0;
      FERRY_CHECK(messages_->incoming_bytes(peer) == sizeof received, "bytes of a message");
      std::memcpy(&received, messages_->incoming(peer), sizeof received);
      FERRY_CHECK(received == number + 10 * peer + rank_.index(), std::to_string(received));
    }
  }

  const Rank rank_;
  MessageHops* messages_;
  std::unique_ptr<EngineCall> call_;
};

// The class of what `call` throws, and its text.
std::string outcome_of(const std::function<void()>& call) {
  try {
    call();
    return "none";
  } catch (const SystemError& error) {
    return std::string("SystemError: ") + error.what();
  } catch (const Error& error) {
    return std::string("another error: ") + error.what();
  } catch (const std::exception& error) {
    return std::string("not of Ferry: ") + error.what();
  }
}

void fail_to_prepare(const Ranks& ranks, const Form& form, int failing) {
  const int size = static_cast<int>(ranks.hosts.size());
  const ThreadEngine engine(size, ranks.ordered);
  const auto body = [&](const Rank& rank) {
    Caller caller(rank, ranks);
    const bool fails = rank.index() == failing;
    const auto expect = [&](const std::function<void()>& failure, const std::string& own,
                            const std::string& of_peers) {
      const Stopwatch watch;
      const std::string outcome = outcome_of([&] { caller.call(form, fails ? failure : nullptr); });
      FERRY_CHECK(outcome == (fails ? own : of_peers), outcome);
      FERRY_CHECK(watch.seconds() < kSoon, std::to_string(watch.seconds()) + " s");
      caller.call(form, nullptr);
    };
    const std::string refused = "rank " + std::to_string(failing) + " refused metadata ";
    caller.call(form, nullptr);
    expect([] { throw SystemError("cannot wait for a kernel", 5); }, "SystemError: cannot wait for a kernel",
           "SystemError: " + refused + "2: cannot wait for a kernel");
    expect([] { throw std::bad_alloc(); }, "not of Ferry: std::bad_alloc",
           "SystemError: " + refused + "4: std::bad_alloc");
  };
  expect_none(run_ranks(size, [&](int rank) { return engine.functions(rank); }, body, ranks.hosts));
}

TEST(Preparation, AFailureEndsTheCallOnEveryRankAtOnce) {
  Random random(seed());
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0}, {0, 1, 0, 1, 1}, {0, 1, 2}}) {
    for (const bool ordered : {false, true}) {
      for (const bool relays : {false, true}) {
        if (relays && hosts[1] == hosts[0]) continue;
        for (const bool split : {false, true}) {
          for (const Form& form : {Form{split, false}, {split, true}, {split, true, true}})
            fail_to_prepare({hosts, ordered, relays}, form, below(random, static_cast<int>(hosts.size())));
        }
      }
    }
  }
}

}  // namespace
}  // namespace ferry::test
