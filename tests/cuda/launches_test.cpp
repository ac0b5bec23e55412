// How calls share devices: limits of SMs, streams, lanes, ranks on a card, other work beside them.
#include "cuda/device_test.hpp"
#include "cuda/sm_occupier.hpp"

namespace ferry::contract {
namespace {

using CudaLaunches = OnDevices;

void play_steps(DeviceRun& play, int sets, int calls, cudaStream_t stream) {
  for (int number = 0; number < calls; ++number) {
    play.use(number % sets, stream);
    play.poison(stream);
    play.dispatch(stream);
    play.combine(stream);
    play.compare(number % sets, stream);
  }
}

// Compared with the reference each time, so the bytes are the same for every limit.
TEST_F(CudaLaunches, LimitsOfSmsGiveTheSameBytes) {
  for (const int ranks : {1, 2, 4}) {
    Case c = device_case(static_cast<std::uint64_t>(ranks), ranks);
    c.config.hidden = 1024;
    c.config.max_tokens = 200;
    run(ranks, c, [&](Rank rank) {
      ferry::Exchange exchange(rank, c.config);
      DeviceRun play(exchange, c);
      keep_steps(play, c, 3);
      const OwnStream stream;
      for (const int limit : {1, 4, 8, 16, 24, 0}) {
        play.dispatch_options().sm_limit = play.combine_options().sm_limit = limit;
        try {
          play_steps(play, 3, 3, stream.get());
        } catch (const Mismatch& mismatch) {
          throw Mismatch(str("sm_limit = ", limit, ": ", mismatch.what()));
        }
      }
    });
  }
}

// Kernels that `enqueue` puts on the stream, by their blocks; nothing else may be put there.
template <class Enqueue>
std::vector<unsigned> blocks_of_kernels(const OwnStream& stream, Enqueue enqueue) {
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

// Of every operation; a limit holds for the blocks of its launch.
TEST_F(CudaLaunches, OneKernelOfAtMostSoManyBlocks) {
  const Case c = device_case(3, 2);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun play(exchange, c);
    keep_steps(play, c, 1);
    const OwnStream stream;
    play_steps(play, 1, 1, stream.get());
    int sms = 0, device = 0;
    require_success(cudaGetDevice(&device), "cudaGetDevice");
    require_success(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "SMs");
    rank.barrier();
    for (const int limit : {1, 4, 8, 16, 24, 0}) {
      play.dispatch_options().sm_limit = play.combine_options().sm_limit = limit;
      const auto most = static_cast<unsigned>(limit > 0 ? limit : sms);
      for (const std::vector<unsigned>& blocks :
           {blocks_of_kernels(stream, [&] { play.dispatch(stream.get()); }),
            blocks_of_kernels(stream, [&] { play.combine(stream.get()); }),
            blocks_of_kernels(stream, [&] { exchange.metadata(play.count(), c.lane, stream); })}) {
        require_equal(blocks.size(), std::size_t{1}, "kernels of a call");
        require(blocks[0] >= 1 && blocks[0] <= most, blocks[0], " blocks with a limit of ", limit);
      }
    }
    rank.barrier();
  });
}

// d0, d1, c0, c1 on a stream each, put there in another order on odd ranks, and never waited for in between.
TEST_F(CudaLaunches, TwoLanesOnTwoStreams) {
  constexpr int kSteps = 4, kCalls = 200;
  Case c = device_case(1, 4);
  c.config.lanes = 2;
  Case other = c;
  other.lane = 1;
  other.seed = seed_of(2);
  run(c.ranks, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, c.config);
    DeviceRun play0(exchange, c), play1(exchange, other);
    keep_steps(play0, c, kSteps);
    keep_steps(play1, other, kSteps);
    DeviceRun* const plays[] = {&play0, &play1};
    for (DeviceRun* play : plays) play->dispatch_options().sm_limit = play->combine_options().sm_limit = 8;
    const OwnStream streams[2];
    const int first = rank.index() % 2;
    for (int number = 0; number < kCalls; ++number) {
      const bool looks = number % 20 == 19;
      for (const int lane : {first, 1 - first}) {
        plays[lane]->use(number % kSteps, streams[lane].get());
        if (looks) plays[lane]->poison(streams[lane].get());
        plays[lane]->dispatch(streams[lane].get());
      }
      for (const int lane : {1 - first, first}) plays[lane]->combine(streams[lane].get());
      if (!looks) continue;
      for (const int lane : {0, 1}) plays[lane]->compare(number % kSteps, streams[lane].get());
    }
  });
}

TEST_F(CudaLaunches, OneToEightRanksOnOneCard) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const Case c = device_case(static_cast<std::uint64_t>(ranks), ranks);
    run(ranks, c, [&](Rank rank) {
      require_success(cudaSetDevice(0), "cudaSetDevice");
      ferry::Exchange exchange(rank, c.config);
      DeviceRun play(exchange, c);
      keep_steps(play, c, 3);
      const OwnStream stream;
      play_steps(play, 3, 12, stream.get());
    });
  }
}

// Something else computes on all of the card, or on most of it, while calls run: they get their turn, also
// those that would take more of the card than is free.
TEST_F(CudaLaunches, OtherKernelsOnTheSameCard) {
  for (const auto& [left_free, limit] : {std::pair{0, 4}, {8, 4}, {0, 0}, {8, 0}}) {
    const Case c = device_case(static_cast<std::uint64_t>(left_free), 2);
    run(c.ranks, c, [&, limit = limit, left_free = left_free](Rank rank) {
      ferry::Exchange exchange(rank, c.config);
      DeviceRun play(exchange, c);
      keep_steps(play, c, 3);
      play.dispatch_options().sm_limit = play.combine_options().sm_limit = limit;
      const OwnStream stream, busy;
      for (int repeat = 0; repeat < 3; ++repeat) {
        occupy(busy.get(), left_free, std::chrono::milliseconds(100));
        play_steps(play, 3, 3, stream.get());
      }
      busy.synchronize();
    });
  }
}

}  // namespace
}  // namespace ferry::contract
