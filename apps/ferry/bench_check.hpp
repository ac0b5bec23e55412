// Whether a dispatch and a combine of a bench did what they must, before they are timed.
#pragma once

#include <cstdint>
#include <vector>

#include "apps/ferry/bench_inputs.hpp"
#include "ferry/exchange.hpp"

namespace ferry::app {

// Every count, source, weight and byte that arrived, against the sets the ranks were given. Throws
// CheckFailed. Returns the rows compared.
std::int64_t check_arrivals(const BenchPoint& point, const BenchInputs& inputs, int set, int rank,
                            const Arrivals& arrivals);

// Every byte of the result of experts that leave rows as they are. Throws CheckFailed. Returns the rows
// compared.
std::int64_t check_result(const BenchPoint& point, const BenchInputs& inputs, int set, int rank,
                          const std::byte* result);

}  // namespace ferry::app
