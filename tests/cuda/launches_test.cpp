// Sharing of devices: SM limits, streams, lanes, several ranks per device, kernels of other programs.
#include "cuda/device_test.hpp"
#include "cuda/other_work.hpp"

namespace ferry::contract {
namespace {

using CudaLaunches = DeviceTest;

void run_calls(DeviceRun& device_run, int sets, int calls, cudaStream_t stream) {
  for (int number = 0; number < calls; ++number) {
    device_run.run_and_compare(number % sets, stream);
  }
}

// Every call is compared with the oracle, so the bytes are the same for every limit.
TEST_F(CudaLaunches, SmLimitsDoNotChangeBytes) {
  for (const int ranks : {1, 2, 4}) {
    TestCase c = device_case(static_cast<std::uint64_t>(ranks), ranks);
    c.config.hidden = 1024;
    c.config.max_tokens = 200;
    run(ranks, c, [&](Rank rank) {
      ferry::Exchange exchange(rank, c.config);
      DeviceRun device_run(exchange, c);
      add_steps(device_run, c, 3);
      const TestStream stream;
      for (const int limit : {1, 4, 8, 16, 24, 0}) {
        device_run.dispatch_options().call.sm_limit = device_run.combine_options().call.sm_limit = limit;
        try {
          run_calls(device_run, 3, 3, stream.get());
        } catch (const Mismatch& mismatch) {
          throw Mismatch(str("sm_limit = ", limit, ": ", mismatch.what()));
        }
      }
    });
  }
}

// The number of blocks of each kernel that `enqueue` launches on the stream. It must launch nothing else.
template <class Enqueue>
std::vector<unsigned> blocks_of_kernels(const TestStream& stream, Enqueue enqueue) {
  cudaGraph_t graph = nullptr;
  require_success(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal),
                  "cudaStreamBeginCapture");
  enqueue();
  require_success(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
  std::size_t count = 0;
  require_success(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(count);
  require_success(cudaGraphGetNodes(graph, nodes.data(), &count), "cudaGraphGetNodes");
  std::vector<unsigned> blocks;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    require_success(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
    require(type == cudaGraphNodeTypeKernel, "a call launches kernels and nothing else, not a node of type ",
            static_cast<int>(type));
    cudaKernelNodeParams parameters{};
    require_success(cudaGraphKernelNodeGetParams(node, &parameters), "cudaGraphKernelNodeGetParams");
    blocks.push_back(parameters.gridDim.x * parameters.gridDim.y * parameters.gridDim.z);
  }
  require_success(cudaGraphDestroy(graph), "cudaGraphDestroy");
  return blocks;
}

// Every operation is one kernel, and sm_limit bounds its blocks.
TEST_F(CudaLaunches, OneKernelPerCallWithinTheSmLimit) {
  const TestCase c = device_case(3, 2);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun device_run(exchange, c);
    add_steps(device_run, c, 1);
    const TestStream stream;
    device_run.run_and_compare(0, stream.get());
    int sms = 0, device = 0;
    require_success(cudaGetDevice(&device), "cudaGetDevice");
    require_success(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "SMs");
    rank.barrier();
    for (const int limit : {1, 4, 8, 16, 24, 0}) {
      device_run.dispatch_options().call.sm_limit = device_run.combine_options().call.sm_limit = limit;
      const auto max_blocks = static_cast<unsigned>(limit > 0 ? limit : sms);
      for (const std::vector<unsigned>& blocks :
           {blocks_of_kernels(stream, [&] { device_run.dispatch(stream.get()); }),
            blocks_of_kernels(stream, [&] { device_run.combine(stream.get()); }),
            blocks_of_kernels(stream, [&] {
              exchange.metadata(device_run.count(), {.lane = c.lane, .stream = stream});
            })}) {
        require_equal(blocks.size(), std::size_t{1}, "kernels of a call");
        require(blocks[0] >= 1 && blocks[0] <= max_blocks, blocks[0], " blocks with a limit of ", limit);
      }
    }
    rank.barrier();
  });
}

// Shared experts and replicated input take launches beside it, of few enough blocks too.
TEST_F(CudaLaunches, SharedExpertsAndReplicatedInputStayWithinTheSmLimit) {
  for (const bool replicated : {false, true}) {
    TestCase c = device_case(4, 2);
    c.config.shared_experts = 1;
    if (replicated) c.config.input = Input::replicated;
    c.shared_outputs = replicated;
    run(c.ranks, c, [&](Rank rank) {
      ferry::Exchange exchange(rank, c.config);
      DeviceRun device_run(exchange, c);
      add_steps(device_run, c, 1);
      const TestStream stream;
      device_run.run_and_compare(0, stream.get());
      rank.barrier();
      device_run.dispatch_options().call.sm_limit = device_run.combine_options().call.sm_limit = 4;
      const std::vector<unsigned> dispatch =
                                      blocks_of_kernels(stream, [&] { device_run.dispatch(stream.get()); }),
                                  combine =
                                      blocks_of_kernels(stream, [&] { device_run.combine(stream.get()); });
      require_equal(dispatch.size(), std::size_t{replicated ? 3u : 2u}, "kernels of a dispatch");
      require_equal(combine.size(), std::size_t{replicated ? 2u : 1u}, "kernels of a combine");
      for (const std::vector<unsigned>& kernels : {dispatch, combine}) {
        for (const unsigned blocks : kernels)
          require(blocks >= 1 && blocks <= 4, blocks, " blocks with a limit of 4");
      }
      rank.barrier();
    });
  }
}

// Two lanes, each on its own stream, enqueued in the opposite order on odd ranks and without waiting in
// between.
TEST_F(CudaLaunches, TwoLanesOnTwoStreams) {
  constexpr int kSteps = 4, kCalls = 200;
  TestCase c = device_case(1, 4);
  c.config.lanes = 2;
  TestCase other = c;
  other.lane = 1;
  other.seed = seed_of(2);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun run0(exchange, c), run1(exchange, other);
    add_steps(run0, c, kSteps);
    add_steps(run1, other, kSteps);
    DeviceRun* const runs[] = {&run0, &run1};
    for (DeviceRun* each : runs)
      each->dispatch_options().call.sm_limit = each->combine_options().call.sm_limit = 8;
    const TestStream streams[2];
    const int first = rank.index() % 2;
    for (int number = 0; number < kCalls; ++number) {
      const bool checked = number % 20 == 19;
      for (const int lane : {first, 1 - first}) {
        runs[lane]->load(number % kSteps, streams[lane].get());
        if (checked) runs[lane]->poison_outputs(streams[lane].get());
        runs[lane]->dispatch(streams[lane].get());
      }
      for (const int lane : {1 - first, first}) runs[lane]->combine(streams[lane].get());
      if (!checked) continue;
      for (const int lane : {0, 1}) runs[lane]->compare(number % kSteps, streams[lane].get());
    }
  });
}

TEST_F(CudaLaunches, OneToEightRanksOnOneDevice) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const TestCase c = device_case(static_cast<std::uint64_t>(ranks), ranks);
    run(ranks, c, [&](Rank rank) {
      require_success(cudaSetDevice(0), "cudaSetDevice");
      ferry::Exchange exchange(rank, c.config);
      DeviceRun device_run(exchange, c);
      add_steps(device_run, c, 3);
      const TestStream stream;
      run_calls(device_run, 3, 12, stream.get());
    });
  }
}

// Another kernel occupies all SMs of the device, or most of them, while calls run. The calls complete, even
// those that need more SMs than are free.
TEST_F(CudaLaunches, OtherKernelsOnTheSameDevice) {
  for (const auto& [left_free, limit] : {std::pair{0, 4}, {8, 4}, {0, 0}, {8, 0}}) {
    const TestCase c = device_case(static_cast<std::uint64_t>(left_free), 2);
    run(c.ranks, c, [&, limit = limit, left_free = left_free](Rank rank) {
      ferry::Exchange exchange(rank, c.config);
      DeviceRun device_run(exchange, c);
      add_steps(device_run, c, 3);
      device_run.dispatch_options().call.sm_limit = device_run.combine_options().call.sm_limit = limit;
      const TestStream stream, busy;
      for (int repeat = 0; repeat < 3; ++repeat) {
        occupy_sms(busy.get(), left_free, std::chrono::milliseconds(100));
        run_calls(device_run, 3, 3, stream.get());
      }
      busy.synchronize();
    });
  }
}

}  // namespace
}  // namespace ferry::contract
