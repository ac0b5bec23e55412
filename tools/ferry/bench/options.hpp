// What `ferry bench` was asked for.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "ferry/trace.hpp"

namespace ferry::app {

struct BenchOptions {
  std::vector<std::string> traces;  // empty: uniform, synthesised, and the first recorded one if there is any
  std::string tokens = "1:2048";
  std::vector<int> ranks{4};
  std::string backend = "cpu";
  std::vector<std::string> formats{"bf16"}, layouts{"expert_major"}, reductions{"partial"};
  // GPUs alone
  std::vector<std::string> works{"dispatch", "combine"}, weights{"with"}, launches{"graph"}, forms{"fused"};
  std::vector<int> sms{0};
  std::string nccl;  // path of the library; empty: looked for

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

}  // namespace ferry::app
