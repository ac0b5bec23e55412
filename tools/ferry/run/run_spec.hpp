// The complete specification of a `ferry run`: options, trace, configuration and expert weights. It is built
// before the ranks start, and they only read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/trace.hpp"
#include "tools/ferry/common/config.hpp"
#include "tools/ferry/run/swiglu.hpp"

namespace ferry::app {

// The options of `ferry run`, with their defaults.
struct RunOptions {
  std::string backend = "automatic";
  EngineChoice choice;  // of collective
  int ranks = 0;        // 0: 8; collective: as many as mpirun has started
  int hosts = 1;        // simulated
  bool processes = false;
  int deadline = 30;  // seconds

  std::string trace;  // empty: a recorded trace if there is one, otherwise synth:decode
  int layer = -1;     // -1: all layers in turn
  int steps = 16;     // a step is one dispatch, the experts, one combine
  int tokens = 128;   // per rank and step
  int experts = 0;    // 0: as the trace has
  int top_k = 0;      // 0: as the trace has
  int shared_experts = 0;
  std::uint64_t seed = 1;

  int hidden = 1024;
  int inner = 64;
  std::string layout = "expert_major";
  std::string format = "bf16";
  std::optional<double> global_scale;  // g of nvfp4; none: 1
  std::string reduction = "partial";
  std::string reduction_level = "automatic";
  std::string hops = "automatic";
  int alignment = 1;
  std::string input = "own";  // or replicated: all ranks have rank 0's tokens; or gathered: Transfer::gather

  std::string program;  // a file; empty: the layer of dispatch, experts and combine
  int overlap = 1;      // micro-batches of the program
  // The option that asks for GPUs; empty: none does.
  std::string gpu_option() const {
    return backend == "cuda" || backend == "nvshmem" ? "--backend " + backend : choice.gpu_option();
  }
  // Whether mpirun has started the ranks.
  bool on_mpi() const {
    return backend == "collective" || (backend == "nvshmem" && hosts == 1 && !processes);
  }
  bool runs_program() const { return !program.empty() || overlap > 1; }

  std::string json, html, timeline;
  std::string compare;  // the JSON of an earlier run; empty: none
};

struct RunSpec {
  RunOptions options;
  Trace trace;
  std::optional<SynthSpec> synth;  // the recipe of a synthesised trace
  Config config;
  DType type = DType::bf16;  // of tokens, expert rows and results
  ExpertWeights weights;

  std::int64_t tokens() const { return options.tokens; }
  // The scale of every dispatch with nvfp4.
  float global_scale() const { return static_cast<float>(options.global_scale.value_or(1)); }
  // Shared expert s has the number experts + s.
  int all_experts() const { return config.experts + config.shared_experts; }
  std::int64_t row_bytes() const { return config.hidden * bytes_of(type); }
  // Bytes of one rank's result in a step.
  std::int64_t result_bytes() const {
    return tokens() * row_bytes() * (config.reduction == Reduction::unreduced ? config.top_k : 1);
  }
};

// Opens the trace and creates the experts' weights. RunOptions::ranks must not be 0.
// @throws UsageError         options that contradict one another or the trace
// @throws UnsupportedError   the backend is not in this build
// @throws SystemError        the run would not fit into memory
RunSpec make_run_spec(const RunOptions& options);

// The rank whose tokens and routes `rank` has.
int token_rank(const RunSpec& spec, int rank);

// The experts on a rank, as RunSpec numbers them. Shared experts come first, as their groups do.
std::vector<int> experts_on(const RunSpec& spec, int rank);

// Ids and weights of one rank and step, [N, K] each.
struct Routes {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

Routes make_routes(const RunSpec& spec, int step, int rank);

// The routes whose terms `rank` gets from combine: with replicated input those to its own experts, the others
// masked.
Routes combined_routes(const RunSpec& spec, int rank, Routes routes);

// Tokens of one rank and step, [N, hidden] of RunSpec::type.
std::vector<std::byte> make_tokens(const RunSpec& spec, int step, int rank);

// Values of one token, [hidden] of RunSpec::type: a function of the run's seed, step, rank and token number.
void make_token(const RunSpec& spec, int step, int rank, std::int64_t token, std::byte* values);

}  // namespace ferry::app
