// Lanes on streams of their own, which the ranks send and receive in other orders: over an engine on device
// memory, and in two hops, where a receive phase waits for those of the other ranks.
#include <memory>
#include <vector>

#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

using CudaLanes = DeviceTest;

constexpr int kLanes = 3, kStepsOfLane = 2, kCallsOfLane = 20;
constexpr int kSms = 8;  // of a launch: those of all lanes and ranks run at the same time on a GPU

// A lane's calls and their stream.
struct Lane {
  TestCase c;
  DeviceRun calls;
  TestStream stream;

  Lane(ferry::Exchange& exchange, const TestCase& of_lane) : c(of_lane), calls(exchange, c) {
    add_steps(calls, c, kStepsOfLane);
  }
};

// Every rank begins with another lane when it sends, and again when it receives.
void call_lanes(const Rank& rank, const TestCase& c) {
  ferry::Exchange exchange(rank, c.config);
  std::vector<std::unique_ptr<Lane>> lanes;
  // The streams get different queues of the device. Memory is allocated, and each stream used once, while no
  // rank's kernel waits for this one.
  for (int turn = 0; turn < rank.size(); ++turn) {
    for (int lane = 0; lane < kLanes && turn == rank.index(); ++lane) {
      TestCase mine = c;
      mine.lane = lane;
      mine.seed = seed_of(static_cast<std::uint64_t>(100 + lane));
      lanes.push_back(std::make_unique<Lane>(exchange, mine));
      lanes.back()->calls.load(0, lanes.back()->stream.get());
      lanes.back()->stream.synchronize();
    }
    rank.barrier();
  }
  const auto in_order = [&](int first, auto call) {
    for (int i = 0; i < kLanes; ++i) {
      Lane& lane = *lanes[static_cast<std::size_t>((first + i) % kLanes)];
      call(lane.calls, lane.stream.get());
    }
  };
  for (int number = 0; number < kCallsOfLane; ++number) {
    const int set = number % kStepsOfLane, send_first = number + rank.index(),
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

TEST_F(CudaLanes, OnStreamsOfTheirOwnAreReceivedInAnyOrder) {
  std::vector<contract::Setup> setups = device_collective_setups();
  for (const contract::Setup& setup : relayed_device_setups()) setups.push_back(setup);
  for (const contract::Setup& setup : setups) {
    TestCase c = device_case(9, 3);
    setup.choose_backend(c.config);
    c.config.lanes = kLanes;
    c.split_phases = true;
    c.sm_limit = kSms;
    run_ranks(setup, c.ranks, describe(c), [&](Rank rank) { call_lanes(rank, c); });
  }
}

}  // namespace
}  // namespace ferry::contract
