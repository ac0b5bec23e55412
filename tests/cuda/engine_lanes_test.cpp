// Lanes of the backend `collective` on device memory, each on a stream of its own: ranks send and receive
// them in other orders.
#include <memory>
#include <vector>

#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

using CudaEngineLanes = DeviceTest;

constexpr int kLanes = 3, kSteps = 2, kCalls = 20;

// A lane's calls and their stream.
struct Lane {
  TestCase c;
  DeviceRun calls;
  TestStream stream;

  Lane(ferry::Exchange& exchange, const TestCase& of_lane) : c(of_lane), calls(exchange, c) {
    add_steps(calls, c, kSteps);
  }
};

// Every rank begins with another lane when it sends, and again when it receives.
void call_lanes(const Rank& rank, const TestCase& c) {
  ferry::Exchange exchange(rank, c.config);
  std::vector<std::unique_ptr<Lane>> lanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    TestCase mine = c;
    mine.lane = lane;
    mine.seed = seed_of(static_cast<std::uint64_t>(100 + lane));
    lanes.push_back(std::make_unique<Lane>(exchange, mine));
  }
  const auto in_order = [&](int first, auto call) {
    for (int i = 0; i < kLanes; ++i) {
      Lane& lane = *lanes[static_cast<std::size_t>((first + i) % kLanes)];
      call(lane.calls, lane.stream.get());
    }
  };
  for (int number = 0; number < kCalls; ++number) {
    const int set = number % kSteps, send_first = number + rank.index(),
              receive_first = number + 2 * rank.index();
    in_order(send_first, [&](DeviceRun& calls, cudaStream_t stream) {
      calls.load(set, stream);
      calls.poison_outputs(stream);
      calls.dispatch_send(stream);
    });
    in_order(receive_first, [](DeviceRun& calls, cudaStream_t stream) { calls.dispatch_receive(stream); });
    in_order(receive_first, [](DeviceRun& calls, cudaStream_t stream) { calls.combine_send(stream); });
    in_order(send_first, [](DeviceRun& calls, cudaStream_t stream) { calls.combine_receive(stream); });
    in_order(0, [&](DeviceRun& calls, cudaStream_t stream) { calls.compare(set, stream); });
  }
}

TEST_F(CudaEngineLanes, OnStreamsOfTheirOwnAreReceivedInAnyOrder) {
  for (const contract::Setup& setup : device_collective_setups()) {
    TestCase c = device_case(9, 3);
    setup.choose_backend(c.config);
    c.config.lanes = kLanes;
    c.split_phases = true;
    run_ranks(setup, c.ranks, describe(c), [&](Rank rank) { call_lanes(rank, c); });
  }
}

}  // namespace
}  // namespace ferry::contract
