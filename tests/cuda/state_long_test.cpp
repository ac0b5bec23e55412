// After 100,000 calls an exchange holds what it held after its first.
#include <filesystem>

#include "cuda/fixture.hpp"

namespace ferry::contract {
namespace {

using CudaState = OnDevices;

struct Held {
  std::int64_t device_bytes = 0, descriptors = 0, threads = 0;
};

std::int64_t entries(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

Held held_now() {
  return {device::bytes_held(), entries("/proc/self/fd"), entries("/proc/self/task")};
}

TEST_F(CudaState, NothingGrowsOver100000Calls) {
  constexpr int kSets = 4, kCalls = 50000;  // of dispatch and of combine
  Case c = device_case(1, 2);
  c.config.max_tokens = 8;
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DevicePlay play(exchange, c);
    keep_steps(play, c, kSets);
    const OwnStream stream;
    Held before;
    for (int number = 0; number < kCalls; ++number) {
      const bool looks = number % 1000 == 999;
      play.use(number % kSets, stream.get());
      if (looks) play.poison(stream.get());
      play.dispatch(stream.get());
      play.combine(stream.get());
      if (looks) play.compare(number % kSets, stream.get());
      if (number == 1999) before = held_now();
    }
    const Held after = held_now();
    require_equal(after.device_bytes, before.device_bytes, "device memory");
    require_equal(after.descriptors, before.descriptors, "file descriptors");
    require_equal(after.threads, before.threads, "threads");
    require_equal(exchange.load().dispatches, std::int64_t{kCalls}, "dispatches counted");
    exchange.check(c.lane);
  });
}

TEST_F(CudaState, ExchangesGiveBackWhatTheyTook) {
  Case c = device_case(2, 2);
  c.config.max_tokens = 2000;
  c.config.hidden = 2048;
  run(c.ranks, c, [&](Rank rank) {
    const Step step = make_step(c);
    Held before;
    for (int number = 0; number < 50; ++number) {
      {
        ferry::Exchange exchange(rank, c.config);
        DevicePlay play(exchange, c);
        play.keep(step, make_outcome(c, step));
        const OwnStream stream;
        play.use(0, stream.get());
        play.poison(stream.get());
        play.dispatch(stream.get());
        play.combine(stream.get());
        play.compare(0, stream.get());
      }
      rank.barrier();
      if (number == 4) before = held_now();
      rank.barrier();
    }
    const Held after = held_now();
    require_equal(after.device_bytes, before.device_bytes, "device memory");
    require_equal(after.descriptors, before.descriptors, "file descriptors");
    require_equal(after.threads, before.threads, "threads");
  });
}

}  // namespace
}  // namespace ferry::contract
