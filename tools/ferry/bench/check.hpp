// Compares the results of a benchmark's dispatch and combine with its inputs, before they are timed.
#pragma once

#include <cstdint>

#include "ferry/exchange.hpp"
#include "tools/ferry/bench/inputs.hpp"

namespace ferry::app {

// All throw CheckFailed, and return the number of rows compared.

// Compares every count, source, weight and byte that `rank` received.
std::int64_t check_received(const BenchPoint& point, const BenchInputs& inputs, int set, int rank,
                            const DispatchResult& received);

// Compares all but the bytes, which may be in device memory. `weighted`: the dispatch carried weights.
std::int64_t check_row_positions(const BenchInputs& inputs, int set, int rank, const DispatchResult& received,
                                 bool weighted);

struct CombineMode {
  Reduction reduction = Reduction::partial;
  bool weighted = true;
};

// Compares every byte of combine's result, for experts that return their rows unchanged.
std::int64_t check_result(const BenchPoint& point, const BenchInputs& inputs, int set, int rank,
                          const std::byte* result, const CombineMode& mode);

}  // namespace ferry::app
