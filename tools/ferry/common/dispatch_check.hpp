// Compares the results of a dispatch with the oracle of tests/oracle, which shares no code with the backends.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"
#include "oracle/global_inputs.hpp"
#include "oracle/row_positions.hpp"

namespace ferry::app {

// Converts an index that cannot be negative to the type that standard containers take.
inline std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

// Counts what a check compared and what it found wrong. Trivially copyable, so that it can lie in memory that
// processes share. All zeros is the initial state.
struct CheckCounter {
  std::int64_t compared = 0;
  std::int64_t wrong = 0;
  double max_error = 0;                   // largest relative error, for checks with a tolerance
  std::array<char, 200> first_failure{};  // where the first wrong value was found, in words

  void pass(std::int64_t count) { compared += count; }

  void fail(std::int64_t count, const std::string& where) {
    compared += count;
    if (wrong == 0) where.copy(first_failure.data(), first_failure.size() - 1);
    wrong += count;
  }

  void add(const CheckCounter& other) {
    if (wrong == 0) first_failure = other.first_failure;
    compared += other.compared;
    wrong += other.wrong;
    max_error = std::max(max_error, other.max_error);
  }
};

class DispatchCheck {
 public:
  // A token as it must be received: its parts, elements in order.
  using Parts = std::array<std::vector<std::byte>, kMaxParts>;
  using TokenParts = std::function<Parts(int rank, std::int64_t token)>;

  // `inputs`: the ids and weights of all ranks. Values are made again when they are needed. `name`: what is
  // checked, such as "step 3", for messages.
  DispatchCheck(oracle::GlobalInputs inputs, std::string name);

  // Compares bit for bit the counts, offsets, sources and, if the call was `weighted`, weights that a rank
  // received; with `token` also values and scales.
  void run(int rank, const DispatchResult& received, CheckCounter& counter, const TokenParts& token = {},
           bool weighted = true) const;

  std::int64_t rows(int rank) const;  // that a rank must receive, without padding

 private:
  bool check_tables(int rank, const DispatchResult& received, CheckCounter& counter) const;
  void check_metadata(int rank, const DispatchResult& received, CheckCounter& counter, bool weighted) const;
  void check_index(int rank, const DispatchResult& received, CheckCounter& counter) const;
  void check_values(int rank, const DispatchResult& received, CheckCounter& counter,
                    const TokenParts& token) const;
  void record(bool equal, int rank, std::size_t row, const char* what, CheckCounter& counter) const;

  oracle::GlobalInputs inputs_;
  std::string name_;
  oracle::RowPositions positions_;
};

}  // namespace ferry::app
