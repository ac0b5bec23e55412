// Programs on device memory: the bytes of host memory, streams, capture, errors.
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/device_test.hpp"
#include "cuda/other_work.hpp"
#include "cuda/program_run.hpp"
#include "ferry/evaluator.hpp"

namespace ferry::contract {
namespace {

using CudaProgram = DeviceTest;

// Passes the received rows on.
void same_rows(ProgramInputs inputs, ProgramOutputs outputs) {
  outputs[0]->data = inputs[0]->received.data;
}

// Copies the received rows to the evaluator's memory, on the step's stream and after a delay: a step
// that does not wait for that stream reads older bytes.
void copy_rows_late(ProgramInputs inputs, ProgramOutputs outputs, Stream stream) {
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  device::delay(stream, 2000);
  require_success(cudaMemcpyAsync(outputs[0]->data, inputs[0]->received.data,
                                  static_cast<std::size_t>(inputs[0]->received.capacity) * kRowBytes,
                                  cudaMemcpyDeviceToDevice, handle),
                  "cudaMemcpyAsync");
}

// `runs` runs of a rank with what they make on host memory.
std::vector<ProgramRun> expected_runs(const Rank& rank, std::uint64_t seed, int runs,
                                      bool same_count = false) {
  const Config config = program_config(rank.size(), 1, BackendKind::cpu);
  ferry::Exchange exchange(rank, config);
  Evaluator layer(parse_program(kLayer), exchange, {{"experts", same_rows}});
  std::vector<ProgramRun> made;
  for (int number = 0; number < runs; ++number) {
    const auto count = same_count
                           ? kMost - 3 * (rank.index() % 2)
                           : (7 * number + 5 * rank.index() + static_cast<int>(seed % 11)) % (kMost + 1);
    made.emplace_back(seed + static_cast<std::uint64_t>(number), config, rank.index(), count);
    made.back().run_on_host(layer);
  }
  return made;
}

TEST_F(CudaProgram, MakesTheBytesOfHostMemory) {
  for (const int ranks : {1, 2, 4}) {
    for (const int batches : {1, 2, 3}) {
      const TestCase c = device_case(static_cast<std::uint64_t>(ranks), ranks);
      run(ranks, c, [&](Rank rank) {
        std::vector<ProgramRun> runs = expected_runs(rank, c.seed, 4);
        ferry::Exchange exchange(rank, program_config(ranks, batches, BackendKind::cuda));
        Evaluator layer(overlap(parse_program(kLayer), batches), exchange, {{"experts", copy_rows_late}});
        const ProgramInputsOnDevice inputs;
        const TestStream stream;
        for (std::size_t i = 0; i < runs.size(); ++i) {
          inputs.load(runs[i], stream.get());
          const ProgramValue& y = *layer.run(inputs.values(runs[i]), stream)[0];
          stream.synchronize();
          for (int lane = 0; lane < batches; ++lane) exchange.synchronize({.lane = lane, .stream = stream});
          require_result(y, runs[i], str(batches, " micro-batches, run ", i));
        }
      });
    }
  }
}

// Values that one stream makes and another takes.
TEST_F(CudaProgram, StreamsWaitForOneAnother) {
  const TestCase c = device_case(5, 2);
  run(2, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, program_config(2, 2, BackendKind::cuda));
    Evaluator program(
        parse_program(R"(
      program streams
      input x: tokens
      a: tokens = call late_copy(x) stream=1
      b: tokens = call late_copy(a) stream=2
      c: tokens = call late_copy(b)
      d: tokens = call late_copy(a) stream=3
      y = join(c, d)
      output y
      output d
    )"),
        exchange, {{"late_copy", [](ProgramInputs inputs, ProgramOutputs outputs, Stream stream) {
                      device::delay(stream, 3000);
                      require_success(
                          cudaMemcpyAsync(outputs[0]->data, inputs[0]->data,
                                          static_cast<std::size_t>(inputs[0]->rows) * kRowBytes,
                                          cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream.handle)),
                          "cudaMemcpyAsync");
                    }}});
    const ProgramInputsOnDevice inputs;
    const TestStream stream;
    for (std::uint64_t number = 0; number < 3; ++number) {
      ProgramRun given(c.seed + number, exchange.config(), rank.index(), kMost - 1);
      inputs.load(given, stream.get());
      const std::vector<ProgramValue> values = {inputs.values(given)[0]};
      const ProgramValue& y = *program.run(values, stream)[0];
      stream.synchronize();  // the caller's stream has waited for all others
      given.result = given.x;
      given.result.insert(given.result.end(), given.x.begin(), given.x.end());
      given.tokens *= 2;
      require_result(y, given, str("run ", number));
    }
  });
}

// Every replay reads the inputs that lie in memory then. FERRY_REPLAYS=10000 is scripts/gpu's.
TEST_F(CudaProgram, IsCapturedWhole) {
  for (const int ranks : {1, 2}) {
    const TestCase c = device_case(static_cast<std::uint64_t>(ranks), ranks);
    run(ranks, c, [&](Rank rank) {
      constexpr int kSets = 4;
      const std::vector<ProgramRun> runs = expected_runs(rank, c.seed, kSets, true);
      ferry::Exchange exchange(rank, program_config(ranks, 2, BackendKind::cuda));
      Evaluator layer(overlap(parse_program(kLayer), 2), exchange, {{"experts", same_rows}});
      const ProgramInputsOnDevice inputs;
      const TestStream stream;
      const ProgramValue* y = nullptr;
      inputs.load(runs[0], stream.get());
      rank.barrier();  // no rank may allocate while another captures
      const Graph graph(stream.get(), [&] { y = layer.run(inputs.values(runs[0]), stream)[0]; });
      rank.barrier();
      const int replays = number_from_environment("FERRY_REPLAYS", 1000);
      for (int number = 0; number < replays; ++number) {
        const auto set = static_cast<std::size_t>(number % kSets);
        const bool checked = number < kSets || number % 97 == 0 || number + 1 == replays;
        if (checked) inputs.load(runs[set], stream.get());
        graph.launch(stream.get());
        if (!checked) continue;
        stream.synchronize();
        require_result(*y, runs[set], str("replay ", number));
      }
      for (int lane = 0; lane < 2; ++lane) exchange.check(lane);
    });
  }
}

// Micro-batches share the limit of a step, and the lanes of an exchange share the device.
TEST_F(CudaProgram, LimitsOfMicroBatchesFitTheDevice) {
  const TestCase c = device_case(3, 1);
  run(1, c, [&](Rank rank) {
    const std::vector<ProgramRun> runs = expected_runs(rank, c.seed, 1, true);
    ferry::Exchange exchange(rank, program_config(1, 2, BackendKind::cuda));
    int processors = 0;
    require_success(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0),
                    "cudaDeviceGetAttribute");
    Program whole = parse_program(kLayer);
    for (ProgramStep& step : whole.steps)
      if (step.kind != StepKind::call) step.sm_limit = processors;
    Evaluator split(overlap(whole, 2), exchange, {{"experts", same_rows}}),
        layer(whole, exchange, {{"experts", same_rows}});
    const ProgramInputsOnDevice inputs;
    const TestStream stream;
    inputs.load(runs[0], stream.get());
    const std::string found = usage_error([&] { layer.run(inputs.values(runs[0]), stream); });
    require(found.starts_with(str("program layer, step rows (dispatch): sm_limit = ", processors,
                                  ": each of 2 lanes may use at most ", processors / 2, " ")),
            found);
    stream.synchronize();
    for (int lane = 0; lane < 2; ++lane)  // what the refusals have left
      usage_error([&] { exchange.synchronize({.lane = lane, .stream = stream}); });
    const ProgramValue& y = *split.run(inputs.values(runs[0]), stream)[0];
    for (int lane = 0; lane < 2; ++lane) exchange.synchronize({.lane = lane, .stream = stream});
    require_result(y, runs[0], "in micro-batches");
  });
}

TEST_F(CudaProgram, NamesTheStepThatPreventsCapture) {
  const TestCase c = device_case(1, 1);
  run(1, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, program_config(1, 1, BackendKind::cuda));
    const std::string text = std::string(kLayer).replace(std::string(kLayer).find("output y"), 8,
                                                         "ready = wait(y)\n  output ready");
    Evaluator layer(parse_program(text), exchange, {{"experts", same_rows}});
    const ProgramRun given(c.seed, exchange.config(), rank.index(), 5);
    const ProgramInputsOnDevice inputs;
    const TestStream stream;
    inputs.load(given, stream.get());
    std::string found;
    const Graph graph(stream.get(), [&] {
      try {
        layer.run(inputs.values(given), stream);
      } catch (const UnsupportedError& error) {
        found = error.what();
      }
    });
    require(found.starts_with("program layer, step ready (wait): cannot be captured into a CUDA graph"),
            found);
    graph.launch(stream.get());  // empty: nothing had been enqueued
    layer.run(inputs.values(given), stream);
    stream.synchronize();
  });
}

TEST_F(CudaProgram, CountsAndMetadataLieInDeviceMemory) {
  const TestCase c = device_case(3, 3);
  run(3, c, [&](Rank rank) {
    ferry::Exchange exchange(rank, program_config(3, 1, BackendKind::cuda));
    Evaluator program(parse_program(R"(
      program counts
      input n: count
      m: count = call same(n)
      given = metadata(n)
      made = metadata(m)
      output given
      output made
    )"),
                      exchange,
                      {{"same", [](ProgramInputs inputs, ProgramOutputs outputs, Stream stream) {
                          require_success(cudaMemcpyAsync(outputs[0]->device_count, inputs[0]->device_count,
                                                          4, cudaMemcpyDeviceToDevice,
                                                          static_cast<cudaStream_t>(stream.handle)),
                                          "cudaMemcpyAsync");
                        }}});
    const TestStream stream;
    const std::int32_t count = 10 + rank.index();
    const DeviceBytes on_device(std::vector<std::byte>(reinterpret_cast<const std::byte*>(&count),
                                                       reinterpret_cast<const std::byte*>(&count + 1)));
    const std::vector<ProgramValue> inputs = {ProgramValue::device_number(on_device.as<std::int32_t>())};
    const auto outputs = program.run(inputs, stream);
    stream.synchronize();
    for (const ProgramValue* const found : outputs) {
      StepMetadata metadata;
      device::copy(&metadata, found->device_metadata, sizeof metadata);
      require_equal(metadata.sum, 33, "sum");
      require_equal(metadata.prefix, rank.index() == 0 ? 0 : rank.index() == 1 ? 10 : 21, "prefix");
      require_equal(metadata.maximum, 12, "maximum");
    }
  });
}

TEST_F(CudaProgram, AFunctionThatFailsEndsTheRunOnAllRanks) {
  const TestCase c = device_case(6, 3);
  run(3, c, [&](Rank rank) {
    const std::vector<ProgramRun> runs = expected_runs(rank, c.seed, 1);
    ferry::Exchange exchange(rank, program_config(3, 2, BackendKind::cuda));
    bool fails = false;
    Evaluator layer(overlap(parse_program(kLayer), 2), exchange,
                    {{"experts", [&](ProgramInputs inputs, ProgramOutputs outputs) {
                        if (fails) throw std::out_of_range("no such expert");
                        same_rows(inputs, outputs);
                      }}});
    const ProgramInputsOnDevice inputs;
    const TestStream stream;
    inputs.load(runs[0], stream.get());
    const auto run_to_the_end = [&] {
      const ProgramValue& y = *layer.run(inputs.values(runs[0]), stream)[0];
      for (int lane = 0; lane < 2; ++lane) exchange.synchronize({.lane = lane, .stream = stream});
      return &y;
    };
    require_result(*run_to_the_end(), runs[0], "before");
    fails = rank.index() == 1;
    std::string found;
    try {
      run_to_the_end();
    } catch (const std::out_of_range& error) {
      found = error.what();
    } catch (const UsageError& error) {
      found = error.what();
    }
    require(found.find("no such expert") != std::string::npos, "rank ", rank.index(), ": '", found, "'");
    fails = false;
    stream.synchronize();
    for (int lane = 0; lane < 2; ++lane)  // what the refusals of both lanes have left
      usage_error([&] { exchange.synchronize({.lane = lane, .stream = stream}); });
    rank.barrier();
    require_result(*run_to_the_end(), runs[0], "after the failure");
  });
}

}  // namespace
}  // namespace ferry::contract
