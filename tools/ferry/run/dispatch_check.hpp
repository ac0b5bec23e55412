// Compares one step's dispatch results with the oracle of tests/oracle, which shares no code with the
// backends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/exchange.hpp"
#include "oracle/encode.hpp"
#include "oracle/global_inputs.hpp"
#include "oracle/row_positions.hpp"
#include "tools/ferry/common/check_counter.hpp"
#include "tools/ferry/run/run_spec.hpp"

namespace ferry::app {

// Holds the ids and weights of all ranks in one step, and computes a token's values again when it needs them.
// Not thread-safe.
class DispatchCheck {
 public:
  DispatchCheck(const RunSpec& spec, int step);

  // Compares all that a rank received bit for bit: counts, offsets, sources, weights, values and scales.
  void run(int rank, const DispatchResult& received, CheckCounter& counter);

  // The values with which a rank's tokens reach the experts, [N, hidden]. For fp8 these are the values after
  // quantisation.
  std::vector<float> expected_values(int rank);

 private:
  struct Row;

  bool check_tables(int rank, const DispatchResult& received, CheckCounter& counter) const;
  void check_metadata(const Row& row, const DispatchResult& received, CheckCounter& counter) const;
  void check_slots(const Row& row, const DispatchResult& received, CheckCounter& counter) const;
  std::int64_t tile_row(const Row& row) const;
  void check_values(const Row& row, const DispatchResult& received,
                    const std::vector<oracle::PartShape>& shapes, CheckCounter& counter);
  void record(bool equal, const Row& row, const char* what, CheckCounter& counter) const;
  float weight_of(const Source& from, int slot) const;
  void decode(int rank, std::int64_t token, float* values);
  std::vector<std::byte> encoded(int rank, std::int64_t token, int part);

  const RunSpec& spec_;
  int step_;
  oracle::GlobalInputs global_;  // all ranks, without values
  oracle::GlobalInputs single_;  // the one token whose bytes are being compared
  oracle::RowPositions positions_;
};

}  // namespace ferry::app
