// Everything about a run that is settled before its ranks start. They only read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/trace.hpp"
#include "tools/ferry/run/run_options.hpp"
#include "tools/ferry/run/swiglu.hpp"

namespace ferry::app {

struct Job {
  RunOptions options;
  Trace trace;
  std::optional<SynthSpec> synth;  // what a synthesised trace was drawn from
  bool fell_back = false;          // no trace was asked for, and no recorded one was found
  Config config;
  DType type = DType::bf16;  // of tokens, expert rows and results
  ExpertWeights weights;

  std::int64_t tokens() const { return options.tokens; }
  std::int64_t row_bytes() const { return config.hidden * bytes_of(type); }
  std::int64_t result_bytes() const {  // of a rank's step
    return tokens() * row_bytes() * (config.reduction == Reduction::unreduced ? config.top_k : 1);
  }
};

// Opens the trace and makes the experts' weights. Throws UsageError for options that contradict one another,
// SystemError when the machine has not the memory.
Job make_job(const RunOptions& options);

// A rank's ids and weights of a step, [N, K] each.
struct Routes {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};

Routes make_routes(const Job& job, int step, int rank);

// A rank's tokens of a step, [N, hidden] of Job::type.
std::vector<std::byte> make_tokens(const Job& job, int step, int rank);

// The values of one token, [hidden] of Job::type: a function of the run's seed and where the token is.
void make_token(const Job& job, int step, int rank, std::int64_t token, std::byte* values);

}  // namespace ferry::app
