// What a step's dispatch must bring, by the oracle of src/reference: nothing of the backend's own code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"
#include "oracle/encode.hpp"
#include "oracle/global_inputs.hpp"
#include "oracle/row_positions.hpp"
#include "tools/ferry/common/check_counter.hpp"
#include "tools/ferry/run/run_spec.hpp"

namespace ferry::app {

// It knows every rank's ids and weights, and makes tokens again one by one as it needs them. One thread uses
// it.
class StepOracle {
 public:
  StepOracle(const Job& job, int step);

  // Compares the arrivals of a rank to the bit: counts, offsets, sources, weights, values, scales.
  void check(int rank, const DispatchResult& received, Tally& tally);

  // The values that a rank's tokens arrive with, [N, hidden]: for fp8 what is left of them after quantising.
  std::vector<float> arriving(int rank);

 private:
  struct Row;

  bool check_tables(int rank, const DispatchResult& received, Tally& tally) const;
  void check_notes(const Row& row, const DispatchResult& received, Tally& tally) const;
  void check_slots(const Row& row, const DispatchResult& received, Tally& tally) const;
  void check_values(const Row& row, const DispatchResult& received,
                    const std::vector<oracle::PartShape>& shapes, Tally& tally);
  void note(bool right, const Row& row, const char* what, Tally& tally) const;
  float weight_of(const Source& from, int slot) const;
  void decode(int rank, std::int64_t token, float* values);
  std::vector<std::byte> encoded(int rank, std::int64_t token, int part);

  const Job& job_;
  int step_;
  oracle::GlobalInputs global_;  // every rank, without values
  oracle::GlobalInputs one_;     // one token: the one whose bytes are looked at
  oracle::RowPositions positions_;
};

}  // namespace ferry::app
