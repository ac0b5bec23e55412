// A captured program holds what the calls made by hand hold: the evaluator takes no time in a graph.
#include <functional>
#include <vector>

#include "cuda/device_test.hpp"
#include "cuda/program_run.hpp"
#include "program/on_host.hpp"

namespace ferry::contract {
namespace {

using CudaProgramGraph = DeviceTest;

// Number of nodes of each type in the graph of the work that `enqueue` enqueues on the stream.
std::vector<int> nodes_of(cudaStream_t stream, const std::function<void()>& enqueue) {
  cudaGraph_t graph = nullptr;
  require_success(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  enqueue();
  require_success(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  std::size_t count = 0;
  require_success(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(count);
  require_success(cudaGraphGetNodes(graph, nodes.data(), &count), "cudaGraphGetNodes");
  std::vector<int> of_type(32);
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    require_success(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
    ++of_type.at(static_cast<std::size_t>(type));
  }
  cudaGraphDestroy(graph);
  return of_type;
}

TEST_F(CudaProgramGraph, HoldsTheNodesOfTheCallsByHand) {
  constexpr std::int64_t kMostTokens = 9;
  const TestCase c = device_case(1, 1);
  run(1, c, [&](Rank rank) {
    const Config config{.experts = 3,
                        .top_k = 2,
                        .hidden = kHidden,
                        .max_tokens = kMostTokens,
                        .backend = BackendKind::cuda,
                        .format = Format::fp32(),
                        .combine_type = DType::fp32};
    ferry::Exchange exchange(rank, config);
    Evaluator layer(parse_program(kLayer), exchange,
                    {{"experts", [](ProgramInputs inputs, ProgramOutputs outputs) {
                        outputs[0]->data = inputs[0]->received.data;
                      }}});
    const RankInputs inputs(config, c.seed, 0, kMostTokens);
    PinnedInputs pinned(inputs);
    std::vector<ProgramValue> values = pinned.values();
    values.pop_back();
    const DeviceBytes y(kMostTokens * 4 * kHidden);
    const TestStream stream;
    const std::vector<int> by_program = nodes_of(stream.get(), [&] { layer.run(values, stream); });
    const std::vector<int> by_hand = nodes_of(stream.get(), [&] {
      const DispatchResult rows =
          exchange.dispatch(Tokens::rows(values[0].data, inputs.tokens, DType::fp32),
                            static_cast<const std::int32_t*>(values[1].data),
                            static_cast<const float*>(values[2].data), {.call = {.stream = stream}});
      exchange.combine({rows.data, DType::fp32}, rows.plan, {y.data(), DType::fp32},
                       {.call = {.stream = stream}, .row_weights = rows.weight});
    });
    require(by_program == by_hand, "the graph of the program has other nodes");
    require(by_hand[static_cast<std::size_t>(cudaGraphNodeTypeKernel)] >= 2, "no kernels were captured");
  });
}

}  // namespace
}  // namespace ferry::contract
