// Whether a dispatch and a combine of a bench did what they must, before they are timed.
#pragma once

#include <cstdint>
#include <vector>

#include "ferry/exchange.hpp"
#include "tools/ferry/bench/inputs.hpp"

namespace ferry::app {

// Every count, source, weight and byte that arrived, against the sets the ranks were given. Throws
// CheckFailed. Returns the rows compared.
std::int64_t check_received(const BenchPoint& point, const BenchInputs& inputs, int set, int rank,
                            const DispatchResult& received);

// The same without the bytes, which may lie elsewhere. Without `weighted` no weights travelled.
std::int64_t check_row_positions(const BenchPoint& point, const BenchInputs& inputs, int set, int rank,
                                 const DispatchResult& received, bool weighted);

// A token as it must arrive: its parts one after another, each of PartLayout::wire_bytes.
void write_message(const BenchPoint& point, const BenchInputs& inputs, int set, int rank, std::int64_t token,
                   std::byte* message);

// How rows came home.
struct CombineMode {
  Reduction reduction = Reduction::partial;
  bool weighted = true;
};

// Every byte of the result of experts that leave rows as they are. Throws CheckFailed. Returns the rows
// compared.
std::int64_t check_result(const BenchPoint& point, const BenchInputs& inputs, int set, int rank,
                          const std::byte* result, const CombineMode& how);

}  // namespace ferry::app
