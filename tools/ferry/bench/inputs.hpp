// The tokens, ids and weights of a benchmark: several sets, so that no call finds the data of the previous
// call in the caches.
//
// Values are whole numbers from -3 to 3 and weights are 1 or 0.5. Every sum of a combine is therefore exact
// in every type and any order, and the expected result is the token times one factor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ferry/exchange.hpp"
#include "tools/ferry/bench/point.hpp"
#include "tools/ferry/common/dispatch_check.hpp"

namespace ferry::app {

class BenchInputs {
 public:
  static constexpr int kSets = 4;

  explicit BenchInputs(const BenchPoint& point);

  // [N, K]
  const std::int32_t* ids(int set, int rank) const { return &ids_[routes_before(set, rank)]; }
  const float* weights(int set, int rank) const { return &weights_[routes_before(set, rank)]; }

  // What the dispatch of a set must return.
  const DispatchCheck& check(int set) const { return checks_[static_cast<std::size_t>(set)]; }

  // A token's values times `factor`, [H] of BenchPoint::type.
  void write_token(int set, int rank, std::int64_t token, float factor, std::byte* row) const;

 private:
  std::size_t routes_before(int set, int rank) const;
  oracle::GlobalInputs oracle_inputs(int set) const;

  const BenchPoint& point_;
  std::vector<std::int32_t> ids_;  // [kSets, R, N, K]
  std::vector<float> weights_;     // [kSets, R, N, K]
  std::vector<float> pattern_;     // a token's values are a section of it
  std::vector<DispatchCheck> checks_;
};

// A token as it must be received: its parts one after another, each of PartLayout::wire_bytes.
void write_message(const BenchPoint& point, const BenchInputs& inputs, int set, int rank, std::int64_t token,
                   std::byte* message);

// All ranks' tokens of one set, as sent and as received, for ranks that are threads: each writes its own
// tokens, and all read.
class TokenTables {
 public:
  explicit TokenTables(const BenchPoint& point);

  // Writes one rank's tokens of a set. The ranks need a barrier before anyone reads, and one before the next
  // set.
  void write(const BenchInputs& inputs, int set, int rank);

  const std::vector<std::byte>& tokens() const { return tokens_; }  // [R, N] of BenchPoint::type
  // [R, N] as write_message() makes them; the tokens themselves if the format does not quantise.
  const std::vector<std::byte>& messages() const { return quantised_ ? messages_ : tokens_; }
  bool quantised() const { return quantised_; }
  const std::byte* tokens_of(int rank) const;

 private:
  const BenchPoint& point_;
  bool quantised_;
  std::int64_t message_bytes_;
  std::vector<std::byte> tokens_, messages_;
};

// ---- compare the results of a benchmark's dispatch and combine with its inputs, before they are timed

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
