// Ranks of one process that give streams of one GPU to the same call, of which one waits for the other.
#include <atomic>
#include <chrono>

#include "cuda/device_test.hpp"

namespace ferry::contract {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kDeadline = 10;  // seconds; a refusal takes a fraction of one

class CudaStreams : public DeviceTest {
 protected:
  static TestCase stream_case(std::uint64_t number, int ranks) {
    TestCase c = device_case(number, ranks);
    c.config.deadline = kDeadline;
    c.full = true;
    return c;
  }
};

bool has_remedy(const std::string& message) {
  return message.find("create a non-blocking stream for each rank") != std::string::npos;
}

// Each rank dispatches on its stream of `stream_of(rank)` after `earlier` calls on a stream of its own. One
// rank's kernel is launched, the other ranks are refused, and the first then gets the refusal of one of them.
// Afterwards all work on streams of their own.
void expect_refused(const TestCase& c, int earlier, const std::function<cudaStream_t(int rank)>& stream_of) {
  std::atomic<int> refused_at_the_call = 0, refused_by_a_peer = 0;
  run_ranks({BackendKind::cuda, RankKind::threads}, c.ranks, describe(c), [&](Rank rank) {
    require_success(cudaSetDevice(0), "cudaSetDevice");
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    add_steps(device_run, c, 1);
    const TestStream own;
    for (int call = 0; call < earlier; ++call) device_run.run_and_compare(0, own.get());
    device_run.load(0, own.get());
    own.synchronize();
    rank.barrier();
    const Clock::time_point started = Clock::now();
    const std::string at_the_call = usage_error([&] { device_run.dispatch(stream_of(rank.index())); });
    if (!at_the_call.empty()) {
      require(has_remedy(at_the_call), at_the_call);
      ++refused_at_the_call;
    } else {
      const std::string later =
          usage_error([&] { exchange.synchronize({.lane = c.lane, .stream = {stream_of(rank.index())}}); });
      require(has_remedy(later) && later.find("refused dispatch") != std::string::npos,
              "the peer's error: ", later);
      ++refused_by_a_peer;
    }
    require(std::chrono::duration<double>(Clock::now() - started).count() < kDeadline / 4, "took too long");
    rank.barrier();
    device_run.run_and_compare(0, own.get());
    exchange.check(c.lane);
  });
  EXPECT_EQ(refused_at_the_call, c.ranks - 1);
  EXPECT_EQ(refused_by_a_peer, 1);
}

TEST_F(CudaStreams, RanksOnTheDefaultStreamAreRefused) {
  for (const int ranks : {2, 3}) {
    for (const int earlier : {0, 2})
      expect_refused(stream_case(static_cast<std::uint64_t>(ranks), ranks), earlier,
                     [](int) { return nullptr; });
  }
}

TEST_F(CudaStreams, RanksOnOneStreamAreRefused) {
  require_success(cudaSetDevice(0), "cudaSetDevice");
  const TestStream shared;
  expect_refused(stream_case(5, 2), 1, [&](int) { return shared.get(); });
}

// The default stream waits for blocking streams, and they wait for it.
TEST_F(CudaStreams, TheDefaultStreamBesideABlockingStreamIsRefused) {
  require_success(cudaSetDevice(0), "cudaSetDevice");
  cudaStream_t blocking = nullptr;
  require_success(cudaStreamCreate(&blocking), "cudaStreamCreate");
  expect_refused(stream_case(6, 2), 0, [&](int rank) { return rank == 0 ? nullptr : blocking; });
  require_success(cudaStreamDestroy(blocking), "cudaStreamDestroy");
}

// Streams that do not wait for one another: the default stream on one rank, each thread's own, and blocking
// ones.
TEST_F(CudaStreams, OtherStreamsWork) {
  const TestCase c = stream_case(7, 2);
  run(c.ranks, c, [&](Rank rank) {
    require_success(cudaSetDevice(0), "cudaSetDevice");
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    add_steps(device_run, c, 1);
    const TestStream own;
    cudaStream_t blocking = nullptr;
    require_success(cudaStreamCreate(&blocking), "cudaStreamCreate");
    for (const cudaStream_t stream :
         {rank.index() == 0 ? nullptr : own.get(), cudaStreamPerThread, blocking}) {
      // Copies to and from pageable memory use the default stream, on which a rank's kernel may be waiting
      // for the other rank: they are done while no call runs.
      device_run.load(0, own.get());
      device_run.poison_outputs(own.get());
      own.synchronize();
      rank.barrier();
      device_run.dispatch(stream);
      device_run.combine(stream);
      require_success(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
      rank.barrier();
      device_run.compare(0, own.get());
    }
    require_success(cudaStreamDestroy(blocking), "cudaStreamDestroy");
  });
}

// A captured call runs on the stream of its graph's launch: ranks may capture on any stream.
TEST_F(CudaStreams, CapturedCallsMayShareAStream) {
  const TestCase c = stream_case(8, 2);
  require_success(cudaSetDevice(0), "cudaSetDevice");
  const TestStream shared;
  run(c.ranks, c, [&](Rank rank) {
    require_success(cudaSetDevice(0), "cudaSetDevice");
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    add_steps(device_run, c, 1);
    const TestStream own;
    rank.barrier();
    const Graph graph(shared.get(), [&] {
      device_run.dispatch(shared.get());
      device_run.combine(shared.get());
    });
    rank.barrier();
    for (int number = 0; number < 3; ++number) {
      device_run.load(0, own.get());
      device_run.poison_outputs(own.get());
      graph.launch(own.get());
      device_run.compare(0, own.get());
    }
  });
}

}  // namespace
}  // namespace ferry::contract
