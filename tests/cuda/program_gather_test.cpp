// Programs that gather rows on device memory: the bytes of host memory, and capture.
#include <string>
#include <vector>

#include "cuda/device_test.hpp"
#include "cuda/other_work.hpp"
#include "cuda/program_run.hpp"

namespace ferry::contract {
namespace {

using CudaProgram = DeviceTest;

// Tokens of all ranks: each rank passes them on, and the ranks' values are added.
constexpr const char* kGathered = R"(
  program gathered
  input x: tokens
  all = all_gather_v(x)
  part: tokens = call pass_on(all)
  y = reduce_scatter_v(part, x)
  output y
)";

void same_tokens(ProgramInputs inputs, ProgramOutputs outputs) {
  outputs[0]->data = inputs[0]->data;
}

// Copies as many rows as there is room for: the host does not know how many there are.
void copy_tokens_late(ProgramInputs inputs, ProgramOutputs outputs, Stream stream) {
  require_equal(inputs[0]->rows % kMost, 0, "rows that a function gets");
  device::delay(stream, 500);
  require_success(cudaMemcpyAsync(outputs[0]->data, inputs[0]->data,
                                  static_cast<std::size_t>(inputs[0]->rows) * kRowBytes,
                                  cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream.handle)),
                  "cudaMemcpyAsync");
}

std::vector<ProgramRun> expected_gathers(const Rank& rank, std::uint64_t seed, int runs) {
  const Config config = program_config(rank.size(), 1, BackendKind::cpu);
  ferry::Exchange exchange(rank, config);
  Evaluator layer(parse_program(kGathered), exchange, {{"pass_on", same_tokens}});
  std::vector<ProgramRun> made;
  for (int number = 0; number < runs; ++number) {
    made.emplace_back(seed + static_cast<std::uint64_t>(number), config, rank.index(),
                      (5 * number + 7 * rank.index()) % (kMost + 1));
    ProgramRun& run = made.back();
    const std::vector<ProgramValue> given = {run.values(run.x.data(), run.ids.data(), run.weights.data())[0]};
    const auto* const bytes = static_cast<const std::byte*>(layer.run(given)[0]->data);
    run.result.assign(bytes, bytes + static_cast<std::size_t>(run.tokens) * kRowBytes);
  }
  return made;
}

TEST_F(CudaProgram, GathersMakeTheBytesOfHostMemory) {
  for (const int ranks : {1, 2, 4}) {
    for (const int batches : {1, 2}) {
      const TestCase c = device_case(static_cast<std::uint64_t>(ranks), ranks);
      run(ranks, c, [&](Rank rank) {
        const std::vector<ProgramRun> runs = expected_gathers(rank, c.seed, 6);
        ferry::Exchange exchange(rank, program_config(ranks, batches, BackendKind::cuda));
        Evaluator layer(overlap(parse_program(kGathered), batches), exchange,
                        {{"pass_on", copy_tokens_late}});
        const ProgramInputsOnDevice inputs;
        const TestStream stream;
        for (std::size_t i = 0; i < runs.size(); ++i) {
          inputs.load(runs[i], stream.get());
          const std::vector<ProgramValue> given = {inputs.values(runs[i])[0]};
          const ProgramValue& y = *layer.run(given, stream)[0];
          stream.synchronize();
          for (int lane = 0; lane < batches; ++lane) exchange.synchronize({.lane = lane, .stream = stream});
          require_result(y, runs[i], str("gathers, ", batches, " micro-batches, run ", i));
        }
      });
    }
  }
}

TEST_F(CudaProgram, GathersAreCaptured) {
  const TestCase c = device_case(2, 2);
  run(2, c, [&](Rank rank) {
    constexpr std::size_t kSet = 3;  // replays have the number of rows of the capture
    std::vector<ProgramRun> runs = expected_gathers(rank, c.seed, kSet + 1);
    ferry::Exchange exchange(rank, program_config(2, 2, BackendKind::cuda));
    Evaluator layer(overlap(parse_program(kGathered), 2), exchange, {{"pass_on", copy_tokens_late}});
    const ProgramInputsOnDevice inputs;
    const TestStream stream;
    const std::vector<ProgramValue> given = {inputs.values(runs[kSet])[0]};
    inputs.load(runs[kSet], stream.get());
    const ProgramValue* y = nullptr;
    rank.barrier();
    const Graph graph(stream.get(), [&] { y = layer.run(given, stream)[0]; });
    rank.barrier();
    for (int number = 0; number < 20; ++number) {
      graph.launch(stream.get());
      stream.synchronize();
      require_result(*y, runs[kSet], str("replay ", number));
    }
    for (int lane = 0; lane < 2; ++lane) exchange.check(lane);
  });
}

}  // namespace
}  // namespace ferry::contract
