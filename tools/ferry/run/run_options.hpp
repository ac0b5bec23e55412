// What `ferry run` was asked for.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "ferry/config.hpp"
#include "ferry/trace.hpp"

namespace ferry::app {

// Seconds: on few cores a rank may check for long while its peers wait.
constexpr double kDeadline = 300.0;

struct RunOptions {
  std::string backend = "cpu";
  int ranks = 8;
  bool processes = false;

  std::string trace;  // empty: a recorded one if there is any, otherwise synth:decode
  int layer = -1;     // -1: all layers in turn
  int steps = 16;     // each one dispatch, the experts, one combine
  int tokens = 128;   // of a rank in a step
  int experts = 0;    // 0: the trace's
  int top_k = 0;      // 0: the trace's
  std::uint64_t seed = 1;

  int hidden = 1024;
  int inner = 64;
  std::string layout = "expert_major";
  std::string format = "bf16";
  std::string reduction = "partial";
  int alignment = 1;

  std::string json, html, timeline;
};

void add_run_options(CLI::App& command, RunOptions& options);

// The configuration these options ask for, to play `trace`. The wire type is the tokens' type. Throws
// UsageError for what the library or the program's experts cannot do, and UnsupportedError for a backend that
// is not here.
Config config_of(const RunOptions& options, const Trace& trace);

// Type of the tokens' values, which the results have too.
DType token_type(const Format& format);

}  // namespace ferry::app
