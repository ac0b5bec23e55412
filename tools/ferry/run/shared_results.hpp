// Where ranks leave what they found, for the process that started them.
#pragma once

#include <cstdint>
#include <span>
#include <type_traits>

#include "memory/mapping.hpp"
#include "tools/ferry/common/check_counter.hpp"
#include "tools/report/run_report.hpp"

namespace ferry::app {

// One rank's results. Zero bytes are a fresh one.
struct RankResults {
  Tally dispatch, combine;  // elementwise experts, to the bit
  Tally dense;              // SwiGLU against fp32
  Tally repeated;           // the timed results are those that were checked

  // Over the timed steps:
  std::int64_t rows = 0;  // arrived, padding not counted
  std::int64_t dispatch_wire_bytes = 0, dispatch_messages = 0;
  std::int64_t combine_wire_bytes = 0, combine_messages = 0;
};

// One block of memory that is made before the ranks start and that threads and forked processes share. Every
// rank writes its own entries; what all ranks know alike is written by rank 0. It may be read when all ranks
// have ended.
class Board {
 public:
  Board(int ranks, int steps, int experts);

  RankResults& rank(int rank) const { return results()[rank]; }
  report::StepTimes& times(int step, int rank) const { return all_times()[step * ranks_ + rank]; }

  std::span<report::StepTimes> all_times() const;     // [steps][ranks]
  std::span<std::int64_t> dispatch_messages() const;  // [ranks][ranks] from, to; the diagonal is local
  std::span<std::int64_t> combine_messages() const;   // [ranks][ranks]
  std::span<std::int64_t> routes() const;             // [experts]
  std::int64_t& dropped() const { return *numbers(0); }

 private:
  std::span<RankResults> results() const;
  std::int64_t* numbers(std::int64_t index) const;

  int ranks_, steps_, experts_;
  Mapping memory_;
};

static_assert(std::is_trivially_copyable_v<RankResults> && std::is_trivially_copyable_v<report::StepTimes>);

}  // namespace ferry::app
