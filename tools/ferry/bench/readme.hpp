// ferry bench --readme: measures the figures of README.md's table on this machine, beside README's own.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tools/ferry/bench/point.hpp"

namespace ferry::app {

// The quotient that a figure gives. Both quantities are of the same run.
enum class ReadmeRatio : int {
  lower_bound,  // GPUs: time of a call / lower bound
  nccl,         // GPUs: time of NCCL's all-to-all-v with sorting and counts / time of a call
  memcpy        // CPU: bytes per second of a call / memcpy's
};

// A figure of README.md, and the call that it is of.
struct ReadmeFigure {
  ReadmeRatio ratio;
  Work work;  // dispatch or combine
  const char* format;
  int ranks, tokens, experts, top_k, hidden;  // tokens per rank
  const char* router;
  double value;         // README's, before it is rounded
  int decimals;         // that README shows
  const char* machine;  // that README's value is from
  const char* date;     // of README's value, such as 2026-11-21

  bool on_gpus() const { return ratio != ReadmeRatio::memcpy; }
};

struct ReadmeResult {
  ReadmeFigure figure;
  double measured = 0;
  std::string skipped{};  // why nothing was measured; otherwise empty
};

// In the order of README.md.
const std::vector<ReadmeFigure>& readme_figures();

// Measures what this machine can run, and says of each other figure why not: GPUs need one for each rank, the
// NCCL baseline its library (`nccl`: path, or empty for a search), the CPU memory.
// @throws CheckFailed  a call returned a wrong result
std::vector<ReadmeResult> measure_readme(const std::vector<ReadmeFigure>& figures, int repetitions,
                                         const std::string& nccl);

std::string readme_table(const std::vector<ReadmeResult>& results);
nlohmann::ordered_json readme_json(const std::vector<ReadmeResult>& results);

}  // namespace ferry::app
