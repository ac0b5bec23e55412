// Split calls: the caller's work between the phases runs while peers send, and a receive phase may be on
// another stream that only an event orders.
#include <atomic>
#include <chrono>
#include <optional>

#include "cuda/device_test.hpp"
#include "cuda/other_work.hpp"

namespace ferry::contract {
namespace {

using CudaPhases = DeviceTest;

class Event {
 public:
  Event() { require_success(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) const {
    require_success(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  void order_before(cudaStream_t stream) const {
    require_success(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
  }
  double milliseconds_since(const Event& earlier) const {
    require_success(cudaEventSynchronize(event_), "cudaEventSynchronize");
    float milliseconds = 0;
    require_success(cudaEventElapsedTime(&milliseconds, earlier.event_, event_), "cudaEventElapsedTime");
    return milliseconds;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

TestCase split_case(std::uint64_t number, Reduction reduction) {
  TestCase c;
  c.seed = seed_of(number);
  c.ranks = 2;
  c.config.backend = BackendKind::cuda;
  c.config.experts = 9;
  c.config.top_k = 4;
  c.config.hidden = 1024;
  c.config.max_tokens = 300;
  c.reduction = c.config.reduction = reduction;
  c.split_phases = true;
  return c;
}

// Rank 0's work between the phases ends only when the host lets it: after rank 1, which waits until that work
// has started, has sent everything. If the send phase of rank 0 waited for rank 1, or rank 1's needed the
// receive phase of rank 0, the work would never end. `send` and `receive` enqueue a phase.
template <class Send, class Receive>
void overlap(const Rank& rank, HeldKernel& work, const TestStream& stream, Send send, Receive receive) {
  if (rank.index() == 0) {
    const Event before, sent, worked, received;
    before.record(stream.get());
    send();
    sent.record(stream.get());
    work.launch(stream.get());
    worked.record(stream.get());
    receive();
    received.record(stream.get());
    require(work.wait_until_it_runs(std::chrono::seconds(10)),
            "the work does not start before a peer has sent");
    const auto started = std::chrono::steady_clock::now();
    rank.barrier();  // rank 1 sends from now on
    rank.barrier();  // rank 1 has sent
    require(work.runs(), "the work ended too early");
    const std::chrono::duration<double, std::milli> held = std::chrono::steady_clock::now() - started;
    work.release();
    // Timestamps of the device: the work took at least as long as rank 1 took to send.
    require(worked.milliseconds_since(sent) >= held.count(), "the work ended before the peer had sent");
    require(received.milliseconds_since(before) >= worked.milliseconds_since(before),
            "timestamps out of order");
  } else {
    rank.barrier();
    send();
    stream.synchronize();  // all rows and flags are stored, while the work of rank 0 runs
    rank.barrier();
    receive();
  }
}

TEST_F(CudaPhases, WorkBetweenThePhasesRunsWhileAPeerSends) {
  for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
    const TestCase c = split_case(1, reduction);
    std::atomic<int> overlaps{0};  // counted, because a rank's body could return early
    run(c.ranks, c, [&](Rank rank) {
      ferry::Exchange exchange(rank, c.config);
      DeviceRun device_run(exchange, c);
      add_steps(device_run, c, 3);
      HeldKernel work;
      const TestStream stream;
      for (int set = 0; set < 3; ++set) {
        device_run.load(set, stream.get());
        device_run.poison_outputs(stream.get());
        stream.synchronize();
        overlap(
            rank, work, stream, [&] { device_run.dispatch_send(stream.get()); },
            [&] { device_run.dispatch_receive(stream.get()); });
        stream.synchronize();
        overlap(
            rank, work, stream, [&] { device_run.combine_send(stream.get()); },
            [&] { device_run.combine_receive(stream.get()); });
        device_run.compare(set, stream.get());
        if (rank.index() == 0) overlaps += 2;
      }
    });
    EXPECT_EQ(overlaps, 6);
  }
}

// The send phase's stream is delayed at random, so a receive phase that ran before it would find no call.
TEST_F(CudaPhases, AnEventOrdersAReceivePhaseOnAnotherStream) {
  constexpr int kInputSets = 3, kCalls = 60;
  for (const Reduction reduction : {Reduction::partial, Reduction::exact}) {
    const TestCase c = split_case(2, reduction);
    run(c.ranks, c, [&](Rank rank) {
      ferry::Exchange exchange(rank, c.config);
      DeviceRun device_run(exchange, c);
      add_steps(device_run, c, kInputSets);
      device_run.prepare_comparisons();
      // A receive phase waits in its queue of the device: no other rank's stream may share it
      // (make_streams()).
      std::optional<TestStream> streams[2];
      for (int turn = 0; turn < rank.size(); ++turn) {
        for (int i = 0; i < 2 && turn == rank.index(); ++i) {
          device::delay(streams[i].emplace(), 1);
          streams[i]->synchronize();
        }
        rank.barrier();
      }
      const TestStream &sending = *streams[0], &receiving = *streams[1];
      const Event sent, received, combine_sent, done;
      Random random(seed_of(static_cast<std::uint64_t>(rank.index())));
      const auto delay = [&](const TestStream& stream) {
        if (random.chance(0.5)) device::delay(stream, random.between(0, 300));
      };
      // Before any kernel awaits a peer: on a GPU that ranks share, copies to new memory would wait for it.
      rank.barrier();
      for (int number = 0; number < kCalls; ++number) {
        const int set = number % kInputSets;
        device_run.load(set, sending.get());
        device_run.poison_outputs(sending.get());
        delay(sending);
        device_run.dispatch_send(sending.get());
        sent.record(sending.get());
        sent.order_before(receiving.get());
        device_run.dispatch_receive(receiving.get());
        received.record(receiving.get());
        received.order_before(sending.get());
        delay(sending);
        device_run.combine_send(sending.get());
        combine_sent.record(sending.get());
        combine_sent.order_before(receiving.get());
        delay(receiving);
        device_run.combine_receive(receiving.get());
        device_run.compare_on_device(set, number, receiving.get());
        done.record(receiving.get());
        done.order_before(sending.get());
        // A rank that has filled the driver's queue would keep another one, on the same GPU, from adding to
        // its own.
        if (number % 10 == 9) sending.synchronize();
      }
      device_run.require_no_difference(receiving.get());
      exchange.check(c.lane);
    });
  }
}

}  // namespace
}  // namespace ferry::contract
