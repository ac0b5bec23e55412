// What `ferry bench` was asked for.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "apps/ferry/bench_point.hpp"

namespace ferry::app {

struct BenchOptions {
  std::vector<std::string> traces;  // empty: uniform, synthesised, and the first recorded one if there is any
  std::string tokens = "1:2048";
  std::vector<int> ranks{4};
  std::string backend = "cpu";
  std::vector<int> sms{0};
  std::vector<std::string> formats{"bf16"}, layouts{"expert_major"}, reductions{"partial"};
  bool processes = false;
  int hidden = 7168;
  int experts = 0;  // 0: of the first recorded trace, or else 256
  int top_k = 0;    // 0: of the first recorded trace, or else 8
  int repetitions = 50;
  std::uint64_t seed = 1;
  std::string json;
};

void add_bench_options(CLI::App& command, BenchOptions& options);

// `1:64` doubles from the first to the last; `1,5,64` is a list. Throws UsageError.
std::vector<int> parse_sweep(const std::string& text);

// Opens the traces. Throws UsageError and SystemError.
std::vector<Trace> open_bench_traces(const BenchOptions& options);

// Every combination asked for, traces side by side. Throws what construction of an exchange would throw, and
// SystemError for a point that does not fit into memory, before anything is measured.
std::vector<BenchPoint> bench_points(const BenchOptions& options, const std::vector<Trace>& traces);

}  // namespace ferry::app
