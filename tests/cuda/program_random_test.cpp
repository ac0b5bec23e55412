// Random programs on device memory make the bits of host memory, which are those of eager calls
// (contract/programs_test.cpp). And a captured program holds what the calls made by hand hold.
#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include "cuda/device_test.hpp"
#include "ferry/evaluator.hpp"
#include "harness/random.hpp"
#include "program/eager_run.hpp"
#include "program/random_program.hpp"

namespace ferry::contract {
namespace {

using CudaRandomProgram = DeviceTest;

constexpr int kLanes = 3;
constexpr std::int64_t kMostTokens = 9;

Config random_config(Random& random, int ranks, BackendKind backend) {
  Config config{.experts = ranks * random.between(1, 3),
                .top_k = random.between(1, 3),
                .hidden = kHidden,
                .max_tokens = kMostTokens,
                .backend = backend,
                .format = Format::fp32(),
                .combine_type = DType::fp32};
  config.layout = random.pick({Layout::expert_major, Layout::expert_major, Layout::expert_padded});
  config.reduction = random.pick({Reduction::partial, Reduction::exact});
  config.repeats = true;  // nothing is dropped
  config.alignment = random.pick({1, 4});
  config.shared_experts = random.pick({0, 0, 2});
  config.lanes = kLanes;
  return config;
}

// Runs a function for host memory on values in device memory: waits for the step's stream, and copies.
class OnHost {
 public:
  OnHost(ProgramFunction function, const Config& config) : function_(std::move(function)), config_(config) {}

  void operator()(ProgramInputs inputs, ProgramOutputs outputs, Stream stream) const {
    const auto handle = static_cast<cudaStream_t>(stream.handle);
    require_success(cudaStreamSynchronize(handle), "cudaStreamSynchronize");
    Copies copies;
    std::vector<ProgramValue> taken, given;
    for (const ProgramValue* const input : inputs) taken.push_back(copies.of(*input, config_));
    for (const ProgramValue* const output : outputs) given.push_back(copies.room_for(*output, config_));
    std::vector<const ProgramValue*> from;
    std::vector<ProgramValue*> to;
    for (const ProgramValue& value : taken) from.push_back(&value);
    for (ProgramValue& value : given) to.push_back(&value);
    function_(from, to);
    for (std::size_t i = 0; i < given.size(); ++i) {
      outputs[i]->device_count = nullptr;  // the count is a number
      outputs[i]->count = given[i].count;
      const std::int64_t bytes = given[i].rows * row_bytes(given[i], config_);
      if (bytes > 0)
        require_success(cudaMemcpyAsync(outputs[i]->data, given[i].data, static_cast<std::size_t>(bytes),
                                        cudaMemcpyHostToDevice, handle),
                        "cudaMemcpyAsync");
    }
    require_success(cudaStreamSynchronize(handle), "cudaStreamSynchronize");
  }

  static std::int64_t row_bytes(const ProgramValue& value, const Config& config) {
    if (value.kind == ValueKind::tokens || value.kind == ValueKind::outputs) return 4 * kHidden;
    return value.kind == ValueKind::ids || value.kind == ValueKind::weights ? 4 * config.top_k : 0;
  }

 private:
  // The values in host memory, until the function has ended.
  class Copies {
   public:
    ProgramValue of(const ProgramValue& value, const Config& config) {
      ProgramValue copy = value;
      if (value.kind == ValueKind::received) {
        DispatchResult& rows = copy.received;
        const bool padded = config.layout == Layout::expert_padded;
        rows.data = copied(rows.data, rows.capacity * (padded ? rows.groups : 1) * 4 * kHidden);
        rows.counts = static_cast<std::int32_t*>(copied(rows.counts, 4 * rows.groups));
        rows.row_offsets = static_cast<std::int32_t*>(copied(rows.row_offsets, 4 * (rows.groups + 1)));
        rows.group_expert = static_cast<std::int32_t*>(copied(rows.group_expert, 4 * rows.groups));
      } else {
        copy.data = copied(value.data, value.rows * row_bytes(value, config));
      }
      return copy;
    }
    ProgramValue room_for(const ProgramValue& value, const Config& config) {
      ProgramValue made = value;
      made.data =
          bytes_.emplace_back(static_cast<std::size_t>(value.rows * row_bytes(value, config) + 1)).data();
      return made;
    }

   private:
    void* copied(const void* device, std::int64_t bytes) {
      std::vector<std::byte>& copy = bytes_.emplace_back(static_cast<std::size_t>(bytes) + 1);
      if (bytes > 0) device::copy(copy.data(), device, bytes);
      return copy.data();
    }
    std::deque<std::vector<std::byte>> bytes_;
  };

  ProgramFunction function_;
  Config config_;
};

// A rank's inputs in device memory.
struct InputsOnDevice {
  DeviceBytes x{kMostTokens * 4 * kHidden}, ids{kMostTokens * 4 * 3}, weights{kMostTokens * 4 * 3};

  template <class T>
  static void load(const DeviceBytes& to, const std::vector<T>& from, const TestStream& stream) {
    if (from.empty()) return;
    require_success(
        cudaMemcpyAsync(to.data(), from.data(), from.size() * 4, cudaMemcpyHostToDevice, stream.get()),
        "cudaMemcpyAsync");
  }
  std::vector<ProgramValue> values(const RankInputs& inputs, const TestStream& stream) const {
    load(x, inputs.x, stream);
    load(ids, inputs.ids, stream);
    load(weights, inputs.weights, stream);
    stream.synchronize();
    return {ProgramValue::tokens(x.data(), inputs.tokens, DType::fp32),
            ProgramValue::ids(ids.as<std::int32_t>(), inputs.tokens),
            ProgramValue::weights(weights.as<float>(), inputs.tokens), ProgramValue::number(inputs.top_k)};
  }
};

void require_same(const ProgramValue& found, const ProgramValue& expected, const Config& config,
                  const std::string& name) {
  if (expected.kind == ValueKind::metadata) {
    StepMetadata metadata;
    device::copy(&metadata, found.device_metadata, sizeof metadata);
    require_equal(metadata.sum, expected.metadata.sum, name, ": sum");
    require_equal(metadata.prefix, expected.metadata.prefix, name, ": prefix");
    require_equal(metadata.maximum, expected.metadata.maximum, name, ": maximum");
    return;
  }
  // Of rows of all ranks the host knows only for how many there is room.
  require(found.rows >= expected.rows, name, " has ", found.rows, " rows, not ", expected.rows);
  const std::int64_t bytes = expected.rows * OnHost::row_bytes(expected, config);
  std::vector<std::byte> rows(static_cast<std::size_t>(bytes));
  if (bytes > 0) device::copy(rows.data(), found.data, bytes);
  require_equal_bytes(rows, {static_cast<const std::byte*>(expected.data), rows.size()}, 4, name);
}

TEST_F(CudaRandomProgram, MakesTheBitsOfHostMemory) {
  for (const int ranks : {1, 2, 3}) {
    for (std::uint64_t number = 0; number < 6; ++number) {
      const TestCase c = device_case(100 * static_cast<std::uint64_t>(ranks) + number, ranks);
      Random random(c.seed);
      const Config config = random_config(random, ranks, BackendKind::cuda);
      const Program program = ProgramMaker(random, config.reduction).draw(random.between(6, 12));
      run(ranks, c, [&](Rank rank) {
        Config of_host = config;
        of_host.backend = BackendKind::cpu;
        ferry::Exchange host_exchange(rank, of_host), exchange(rank, config);
        ProgramFunctions functions;
        for (const auto& [name, function] : kFunctions) functions[name] = OnHost(function, config);
        Evaluator on_host(program, host_exchange, kFunctions), on_device(program, exchange, functions);
        const InputsOnDevice on_device_inputs;
        const TestStream stream;
        rank.barrier();
        for (std::uint64_t again = 0; again < 2; ++again) {
          const RankInputs inputs(config, c.seed + again, rank.index(), kMostTokens);
          const auto expected = on_host.run(inputs.values());
          const auto found = on_device.run(on_device_inputs.values(inputs, stream), stream);
          stream.synchronize();
          for (int lane = 0; lane < kLanes; ++lane) exchange.synchronize(lane, stream);
          for (std::size_t i = 0; i < expected.size(); ++i)
            require_same(*found[i], *expected[i], config, program.outputs[i] + " of\n" + to_string(program));
        }
      });
    }
  }
}

// Of each type of node: how many there are.
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

// So the evaluator takes no time in a graph.
TEST_F(CudaRandomProgram, AGraphHoldsTheNodesOfTheCallsByHand) {
  const TestCase c = device_case(1, 1);
  run(1, c, [&](Rank rank) {
    Random random(c.seed);
    Config config = random_config(random, 1, BackendKind::cuda);
    config.layout = Layout::expert_major;
    ferry::Exchange exchange(rank, config);
    Evaluator layer(parse_program(R"(
      program layer
      input x: tokens
      input ids: ids
      input weights: weights
      rows = dispatch(x, ids, weights)
      out: outputs = call experts(rows)
      y = combine(out, rows, rows)
      output y
    )"),
                    exchange, {{"experts", [](ProgramInputs inputs, ProgramOutputs outputs) {
                                  outputs[0]->data = inputs[0]->received.data;
                                }}});
    const RankInputs inputs(config, c.seed, 0, kMostTokens);
    const InputsOnDevice on_device;
    const TestStream stream;
    std::vector<ProgramValue> values = on_device.values(inputs, stream);
    values.pop_back();
    const DeviceBytes y(kMostTokens * 4 * kHidden);
    const std::vector<int> by_program = nodes_of(stream.get(), [&] { layer.run(values, stream); });
    const std::vector<int> by_hand = nodes_of(stream.get(), [&] {
      const DispatchResult rows =
          exchange.dispatch(Tokens::rows(on_device.x.data(), inputs.tokens, DType::fp32),
                            on_device.ids.as<std::int32_t>(), on_device.weights.as<float>(), {stream.get()});
      exchange.combine({rows.data, DType::fp32}, rows.plan, {y.data(), DType::fp32},
                       {.row_weights = rows.weight}, {stream.get()});
    });
    require(by_program == by_hand, "the graph of the program has other nodes");
    require(by_hand[static_cast<std::size_t>(cudaGraphNodeTypeKernel)] >= 2, "no kernels were captured");
  });
}

}  // namespace
}  // namespace ferry::contract
