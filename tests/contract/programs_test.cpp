// Programs against the same calls made one by one: random programs, micro-batches, functions that fail.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "harness/harness.hpp"
#include "harness/random.hpp"
#include "program/eager_run.hpp"
#include "program/on_host.hpp"
#include "program/random_program.hpp"

namespace ferry::contract {
namespace {

Config program_config(Random& random, int ranks) {
  Config config{.experts = ranks * random.between(1, 3),
                .top_k = random.between(1, 3),
                .hidden = kHidden,
                .max_tokens = 9,
                .format = Format::fp32(),
                .combine_type = DType::fp32};
  config.layout = random.pick({Layout::expert_major, Layout::expert_major, Layout::expert_padded});
  config.reduction = random.pick({Reduction::partial, Reduction::exact});
  config.repeats = true;  // nothing is dropped
  config.alignment = random.pick({1, 4});
  config.shared_experts = random.pick({0, 0, 2});
  return config;
}

void require_values(const ProgramValue& value, std::int64_t columns, const Floats& expected,
                    const std::string& what) {
  require_equal(value.rows * columns, static_cast<std::int64_t>(expected.size()), what, ": values");
  require_equal_bytes({static_cast<const std::byte*>(value.data), expected.size() * 4},
                      std::as_bytes(std::span(expected)), 4, what);
}

void require_tokens(const ProgramValue& value, const Floats& expected, const std::string& what) {
  require_values(value, kHidden, expected, what);
}

// A program of x, ids and weights whose outputs are tokens, on an exchange of its own and the same inputs in
// each run.
class TestedProgram {
 public:
  TestedProgram(const Rank& rank, const Setup& setup, const Program& program, const Config& config,
                const RankInputs& inputs, const ProgramFunctions& functions = kFunctions)
      : given_(inputs.values()),
        exchange_(rank, config),
        evaluator_(program, exchange_, setup.on_device() ? on_host(functions, config) : functions) {
    if (setup.on_device()) {
      stream_ = device::stream(device_number(rank, config.backend));
      given_ = pinned_.emplace(inputs).values();
    }
    given_.resize(program.inputs.size());
    rank.barrier();  // pinned memory is allocated while no rank's kernel waits for this one
  }
  ~TestedProgram() {
    if (pinned_) device::wait(stream_);
  }
  TestedProgram(const TestedProgram&) = delete;
  TestedProgram& operator=(const TestedProgram&) = delete;

  // The values of each output.
  std::vector<Floats> run() {
    const auto outputs = evaluator_.run(given_, stream_);
    for (int lane = 0; pinned_ && lane < exchange_.config().lanes; ++lane)
      exchange_.synchronize({.lane = lane, .stream = stream_});
    std::vector<Floats> found;
    for (const ProgramValue* const output : outputs) {
      std::optional<ResultOnHost> copy;
      if (pinned_) copy.emplace(*output, output->rows, exchange_.config());
      const auto* const values = static_cast<const float*>(copy ? copy->value().data : output->data);
      found.emplace_back(values, values + output->rows * kHidden);
    }
    return found;
  }

 private:
  std::vector<ProgramValue> given_;
  std::optional<PinnedInputs> pinned_;
  Exchange exchange_;
  Evaluator evaluator_;
  Stream stream_{};
};

void require_same(const std::vector<Floats>& found, const std::vector<Floats>& expected,
                  const std::string& what) {
  require_equal(found.size(), expected.size(), what, ": outputs");
  for (std::size_t i = 0; i < found.size(); ++i) {
    require_equal(found[i].size(), expected[i].size(), what, ": values");
    require_equal_bytes(std::as_bytes(std::span(found[i])), std::as_bytes(std::span(expected[i])), 4, what);
  }
}

// Compares a program's results on device memory with those on host memory, which have the bits of eager
// calls.
void require_bits_of_host_memory(const Rank& rank, const Program& program, const Config& of_host,
                                 const Config& config, std::uint64_t seed) {
  Exchange host_exchange(rank, of_host), exchange(rank, config);
  Evaluator on_cpu(program, host_exchange, kFunctions);
  // Streams of ranks that share a device need different queues, so they are made one after the other.
  std::optional<Evaluator> on_device;
  Stream stream;
  for (int turn = 0; turn < rank.size(); ++turn) {
    if (turn == rank.index()) {
      stream = device::new_stream(device_number(rank, config.backend));
      on_device.emplace(program, exchange, on_host(kFunctions, config));
    }
    rank.barrier();
  }
  for (std::uint64_t again = 0; again < 2; ++again) {
    const RankInputs inputs(config, seed + again, rank.index(), config.max_tokens);
    PinnedInputs pinned(inputs);
    rank.barrier();  // pinned memory is allocated while no rank's kernel waits for this one
    const auto expected = on_cpu.run(inputs.values());
    const auto found = on_device->run(pinned.values(), stream);
    for (int lane = 0; lane < config.lanes; ++lane) exchange.synchronize({.lane = lane, .stream = stream});
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const std::string& name = program.outputs[i];
      require(found[i]->rows >= expected[i]->rows, name, " has ", found[i]->rows, " rows");
      const ResultOnHost result(*found[i], expected[i]->rows, config);
      if (expected[i]->kind == ValueKind::metadata) {
        require(std::memcmp(&result.value().metadata, &expected[i]->metadata, sizeof(StepMetadata)) == 0,
                name, " differs");
        continue;
      }
      const auto* const values = static_cast<const float*>(expected[i]->data);
      const std::int64_t columns = expected[i]->kind == ValueKind::weights ? config.top_k : kHidden;
      require_values(result.value(), columns, Floats(values, values + expected[i]->rows * columns), name);
    }
  }
}

TEST_P(Contract, RandomProgramsMakeTheBitsOfEagerCalls) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (std::uint64_t number = 0; number < 5; ++number) {
      const std::uint64_t seed = seed_of(100 * static_cast<std::uint64_t>(ranks) + number);
      Random random(seed);
      Config of_host = program_config(random, ranks);
      of_host.lanes = 3;
      const Config config = on_backend(of_host);
      if (GetParam().rank_kind == RankKind::mpi || config.backend == BackendKind::collective) {
        of_host.backend = BackendKind::collective;  // the ranks may be on several hosts
        of_host.memory = MemoryKind::host;
      }
      const Program program =
          ProgramMaker(random, config.reduction, GetParam().has_gathers()).draw(random.between(6, 12));
      ASSERT_EQ(to_string(parse_program(to_string(program))), to_string(program));
      run(ranks, to_string(program), [&](const Rank& rank) {
        if (GetParam().on_device()) return require_bits_of_host_memory(rank, program, of_host, config, seed);
        Exchange eager_exchange(rank, config), exchange(rank, config);
        Evaluator evaluator(parse_program(to_string(program)), exchange, kFunctions);
        for (std::uint64_t again = 0; again < 2; ++again) {  // with other tokens
          const RankInputs inputs(config, seed + again, rank.index(), config.max_tokens);
          EagerRun eager(eager_exchange, inputs);
          for (const ProgramStep& step : program.steps) eager.run(step);
          const auto outputs = evaluator.run(inputs.values());
          for (std::size_t i = 0; i < outputs.size(); ++i) {
            const std::string& name = program.outputs[i];
            if (outputs[i]->kind == ValueKind::tokens) {
              require_tokens(*outputs[i], eager.tokens(name), name);
            } else if (outputs[i]->kind == ValueKind::weights) {
              require_values(*outputs[i], config.top_k, eager.weights(name), name);
            } else {
              require(std::memcmp(&outputs[i]->metadata, &eager.metadata(name), sizeof(StepMetadata)) == 0,
                      name, " differs");
            }
          }
        }
      });
    }
  }
}

TEST_P(Contract, ProgramsWithGathersAreRefusedWhereTheBackendHasNone) {
  if (GetParam().has_gathers()) GTEST_SKIP() << "has gathers";
  Random random(seed_of(7));
  const Config config = on_backend(program_config(random, 2));
  run(2, "gathers in two hops", [&](const Rank& rank) {
    Exchange exchange(rank, config);
    std::string found;
    try {
      Evaluator(parse_program("program g\ninput x: tokens\nall = all_gather_v(x)\noutput all\n"), exchange);
    } catch (const UnsupportedError& error) {
      found = error.what();
    }
    require(found.starts_with("program g, step all (all_gather_v): "), found);
  });
}

// Two layers; the second takes the mix of the first's result and its input.
Program layers(bool row_weights) {
  return parse_program(std::string(R"(
    program layers
    input x: tokens
    input ids: ids
    input weights: weights
    rows = dispatch(x, ids, weights)
    outputs: outputs = call experts(rows)
    y = combine(outputs, rows, )") +
                       (row_weights ? "rows" : "weights") + R"()
    h: tokens = call mix(y, x)
    sent = dispatch_send(h, rows, weights) lane=1
    again = dispatch_receive(sent)
    outputs2: outputs = call experts(again)
    z = combine(outputs2, again)
    output z
    output y
  )");
}

TEST_P(Contract, MicroBatchesMakeTheBytesOfThePlainProgram) {
  for (const int ranks : {1, 2, 4}) {
    for (const int batches : {1, 2, 3, 5}) {
      const std::uint64_t seed = seed_of(static_cast<std::uint64_t>(10 * ranks + batches));
      Random random(seed);
      Config config = on_backend(program_config(random, ranks));
      config.lanes = 2 * batches;
      const Program plain = layers(random.chance(0.5)), batched = overlap(plain, batches);
      ASSERT_EQ(parse_program(to_string(batched)), batched);
      run(ranks, to_string(batched), [&](const Rank& rank) {
        const RankInputs inputs(config, seed, rank.index(), config.max_tokens);
        TestedProgram whole(rank, GetParam(), plain, config, inputs),
            split(rank, GetParam(), batched, config, inputs);
        for (int again = 0; again < 2; ++again) require_same(split.run(), whole.run(), str("run ", again));
      });
    }
  }
}

// Tokens of all ranks, each added to the sum of the ranks by its factor: gathered, and scattered again.
Program gathered_layer() {
  return parse_program(R"(
    program gathered
    input x: tokens
    all = all_gather_v(x)
    part: tokens = call mix(all, all)
    y = reduce_scatter_v(part, x)
    output y
  )");
}

TEST_P(Contract, GatheredRowsInMicroBatchesMakeTheBytesOfThePlainProgram) {
  if (!GetParam().has_gathers()) GTEST_SKIP() << "not in two hops on device memory yet";
  for (const auto& [ranks, batches] : {std::pair{3, 1}, {3, 2}, {3, 3}, {2, 2}}) {
    const std::uint64_t seed = seed_of(static_cast<std::uint64_t>(batches));
    Random random(seed);
    Config config = on_backend(program_config(random, ranks));
    config.lanes = batches;
    const Program batched = overlap(gathered_layer(), batches);
    run(ranks, to_string(batched), [&](const Rank& rank) {
      const RankInputs inputs(config, seed, rank.index(), config.max_tokens);
      Floats expected;
      for (const float value : inputs.x) {  // every rank has added the same 1.5 x
        float sum = 0;
        for (int other = 0; other < rank.size(); ++other) sum += value + value / 2;
        expected.push_back(sum);
      }
      for (const Program& program : {gathered_layer(), batched})
        require_same(TestedProgram(rank, GetParam(), program, config, inputs).run(), {expected}, "y");
    });
  }
}

// The rank whose function fails takes part in the gather that is left by refusing it.
TEST_P(Contract, AFunctionBetweenGathersThatFailsEndsTheRunOnAllRanks) {
  if (has_kernels(GetParam().backend)) GTEST_SKIP() << "CudaProgram tests a failing function there";
  const std::uint64_t config_seed = seed_of(5), input_seed = seed_of(6);  // those of all processes
  const auto body = [&](const Rank& rank) {
    Random random(config_seed);
    Config config = on_backend(program_config(random, rank.size()));
    config.lanes = 2;
    const RankInputs inputs(config, input_seed, rank.index(), config.max_tokens);
    bool fails = false;
    ProgramFunctions functions = kFunctions;
    functions["mix"] = [&](Inputs taken, Made made) {
      if (fails) throw std::out_of_range("no such part");
      mix(taken, made);
    };
    TestedProgram program(rank, GetParam(), overlap(gathered_layer(), 2), config, inputs, functions);
    const std::vector<Floats> expected = program.run();
    fails = rank.index() == 1;
    std::string found;
    try {
      program.run();
    } catch (const std::out_of_range& error) {
      found = error.what();
    } catch (const UsageError& error) {
      found = error.what();
    }
    if (fails) {
      require_equal(found, "no such part", "rank ", rank.index());
    } else {
      require(found.starts_with("program gathered, step y.0 (reduce_scatter_v): ") &&
                  found.find("rank 1 refused reduce_scatter_v ") != std::string::npos &&
                  found.find("failed on rank 1: no such part") != std::string::npos,
              "rank ", rank.index(), ": '", found, "'");
    }
    fails = false;
    require_same(program.run(), expected, "after the failure");
  };
  for (const int ranks : {2, 3}) run(ranks, "a failing function between gathers", body);
}

// The function fails on one rank, or on all; the other ranks get its text, and the next run is as if nothing
// had happened.
TEST_P(Contract, AFunctionThatFailsEndsTheRunOnAllRanks) {
  if (has_kernels(GetParam().backend)) GTEST_SKIP() << "CudaProgram tests it there";
  const Program batched = overlap(layers(true), 2);
  const std::uint64_t config_seed = seed_of(3), input_seed = seed_of(4);  // those of all processes
  const auto body = [&](const Rank& rank) {
    Random random(config_seed);
    Config config = on_backend(program_config(random, rank.size()));
    config.lanes = 4;
    const RankInputs inputs(config, input_seed, rank.index(), config.max_tokens);
    int calls_left = -1;  // before the function fails; -1: it does not
    ProgramFunctions functions = kFunctions;
    functions["experts"] = [&](Inputs taken, Made made) {
      if (calls_left-- == 0) throw std::out_of_range("no such expert");
      experts(taken, made);
    };
    TestedProgram program(rank, GetParam(), batched, config, inputs, functions);
    const std::vector<Floats> expected = TestedProgram(rank, GetParam(), layers(true), config, inputs).run();
    for (int call = 0; call < 4; ++call) {
      for (int failing = 1; failing <= rank.size(); ++failing) {
        const bool fails = failing == rank.size() || rank.index() == failing;  // the last time: on all
        calls_left = fails ? call : -1;
        std::string found;
        try {
          program.run();
        } catch (const std::out_of_range& error) {
          found = error.what();
        } catch (const UsageError& error) {
          found = error.what();
        }
        if (fails) {
          require_equal(found, "no such expert", "rank ", rank.index(), ", call ", call);
        } else {
          require(found.find(str("failed on rank ", failing, ": no such expert")) != std::string::npos &&
                      found.starts_with("program layers, step "),
                  "rank ", rank.index(), ", call ", call, ": '", found, "'");
        }
        calls_left = -1;
        require_same(program.run(), expected, "after the failure");
      }
    }
  };
  for (const int ranks : {2, 3}) run(ranks, "a failing function", body);
}

}  // namespace
}  // namespace ferry::contract
