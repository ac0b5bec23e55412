// After 100,000 calls, or as many as FERRY_CALLS says, an exchange holds what it held after its first.
#include <filesystem>

#include "backends/cuda/host/lane.hpp"
#include "cuda/device_test.hpp"
#include "exchange/configuration.hpp"

namespace ferry::contract {
namespace {

using CudaState = OnDevices;

struct Held {
  std::int64_t device_bytes = 0, descriptors = 0, threads = 0;
};

std::int64_t entries(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

// One rank at a time: to look opens a descriptor, which another that looks would count.
Held held_now(Rank& rank) {
  Held held;
  for (int turn = 0; turn < rank.size(); ++turn) {
    if (turn == rank.index())
      held = {device::bytes_held(), entries("/proc/self/fd"), entries("/proc/self/task")};
    rank.barrier();
  }
  return held;
}

TEST_F(CudaState, NothingGrowsOver100000Calls) {
  constexpr int kSets = 4;
  const int pairs = from_environment("FERRY_CALLS", 100000) / 2;  // of dispatch and combine
  Case c = device_case(1, 2);
  c.config.max_tokens = 8;
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun play(exchange, c);
    keep_steps(play, c, kSets);
    const OwnStream stream;
    Held before;
    for (int number = 0; number < pairs; ++number) {
      const bool looks = number % 1000 == 999;
      play.use(number % kSets, stream.get());
      if (looks) play.poison(stream.get());
      play.dispatch(stream.get());
      play.combine(stream.get());
      if (looks) play.compare(number % kSets, stream.get());
      if (number == 1999) before = held_now(rank);
    }
    const Held after = held_now(rank);
    require_equal(after.device_bytes, before.device_bytes, "device memory");
    require_equal(after.descriptors, before.descriptors, "file descriptors");
    require_equal(after.threads, before.threads, "threads");
    require_equal(exchange.load().dispatches, std::int64_t{pairs}, "dispatches counted");
    exchange.check(c.lane);
  });
}

// A lane as the backend makes it, whose memory can be read.
class BareLane {
 public:
  BareLane(const Rank& rank, const Case& c)
      : shared_(rank, complete_config(c.config, c.ranks)),
        lane_(shared_, 0),
        plan_(plan_bytes(shared_.config, c.ranks)) {
    rank.barrier();  // nobody's kernel writes where nothing is yet
  }

  void call(const DispatchCall& dispatch, const CombineCall& combine, const OwnStream& stream) {
    DispatchCall with_plan = dispatch;
    with_plan.memory.plan = plan_.data();
    const DispatchResult received = lane_.dispatch(with_plan, cuda::Phase::fused, stream);
    CombineCall of_plan = combine;
    of_plan.plan = received.plan;
    of_plan.row_weights = received.weight;
    lane_.combine(of_plan, cuda::Phase::fused, stream);
  }

  // Of 8 bytes each.
  std::vector<std::uint64_t> words() const {
    std::vector<std::uint64_t> words(static_cast<std::size_t>(lane_.memory().bytes() / 8));
    device::copy(words.data(), lane_.memory().data(), static_cast<std::int64_t>(words.size()) * 8);
    return words;
  }

 private:
  const cuda::ExchangeState shared_;
  cuda::Lane lane_;
  DeviceBytes plan_;
};

// The same, a call's number, or a sum that every pair of calls adds the same to.
bool is_as_it_was(std::uint64_t early, std::uint64_t late, std::uint64_t early_pairs,
                  std::uint64_t late_pairs) {
  const bool number = late - early == 2 * (late_pairs - early_pairs) && early <= 2 * early_pairs;
  const bool sum = early % early_pairs == 0 && early / early_pairs * late_pairs == late;
  return early == late || number || sum;
}

// Every call is the same, back to back, so all that may differ are numbers of calls and sums over them.
TEST_F(CudaState, OnlyNumbersOfCallsAndTotalsChangeOver100000Calls) {
  constexpr std::uint64_t kEarly = 1000, kLate = 51000;  // pairs of calls
  Case c = device_case(3, 2);
  c.full = true;
  run(c.ranks, c, [&](Rank rank) {
    const Step step = make_step(c);
    const oracle::RankInputs& mine = step.global.ranks[static_cast<std::size_t>(rank.index())];
    const DeviceBytes tokens(mine.parts[0]), weights(bytes_of_values(mine.weights)),
        ids(bytes_of_values(mine.ids)),
        outputs(make_outcome(c, step).ranks[static_cast<std::size_t>(rank.index())].rows),
        result(c.config.max_tokens * c.config.hidden * 2);
    DispatchCall dispatch;
    dispatch.tokens = Tokens::rows(tokens.data(), mine.tokens);
    dispatch.ids = Ids(ids.as<std::int64_t>());
    dispatch.weights = weights.as<float>();
    CombineCall combine;
    combine.outputs = {outputs.data()};
    combine.result = {result.data()};
    const OwnStream stream;
    std::vector<std::uint64_t> early;
    BareLane lane(rank, c);
    for (std::uint64_t number = 1; number <= kLate; ++number) {
      lane.call(dispatch, combine, stream);
      // A full stream would block inside the driver, where ranks of a card might wait for one another.
      if (number % 100 == 0) stream.synchronize();
      if (number == kEarly) early = lane.words();
    }
    const std::vector<std::uint64_t> late = lane.words();
    rank.barrier();  // nobody's memory goes while kernels of others may write to it
    for (std::size_t word = 0; word < late.size(); ++word) {
      require(is_as_it_was(early[word], late[word], kEarly, kLate), "word ", word, " of ", late.size(),
              " was ", early[word], " after ", 2 * kEarly, " calls and is ", late[word], " after ",
              2 * kLate);
    }
  });
}

TEST_F(CudaState, ExchangesGiveBackWhatTheyTook) {
  Case c = device_case(2, 2);
  c.config.max_tokens = 2000;
  c.config.hidden = 2048;
  run(c.ranks, c, [&](Rank rank) {
    const Step step = make_step(c);
    const oracle::Outcome outcome = make_outcome(c, step);
    Held before;
    for (int number = 0; number < 50; ++number) {
      {
        ferry::Exchange exchange(rank, c.config);
        DeviceRun play(exchange, c);
        play.keep(step, outcome);
        const OwnStream stream;
        play.use(0, stream.get());
        play.poison(stream.get());
        play.dispatch(stream.get());
        play.combine(stream.get());
        play.compare(0, stream.get());
      }
      rank.barrier();
      if (number == 4) before = held_now(rank);
    }
    const Held after = held_now(rank);
    require_equal(after.device_bytes, before.device_bytes, "device memory");
    require_equal(after.descriptors, before.descriptors, "file descriptors");
    require_equal(after.threads, before.threads, "threads");
  });
}

}  // namespace
}  // namespace ferry::contract
