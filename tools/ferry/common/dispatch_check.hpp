// Compares the results of a dispatch with the oracle of tests/oracle, which shares no code with the backends.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"
#include "oracle/global_inputs.hpp"
#include "oracle/row_positions.hpp"
#include "tools/ferry/common/check_counter.hpp"

namespace ferry::app {

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
  void check_values(int rank, const DispatchResult& received, CheckCounter& counter,
                    const TokenParts& token) const;
  void record(bool equal, int rank, std::size_t row, const char* what, CheckCounter& counter) const;

  oracle::GlobalInputs inputs_;
  std::string name_;
  oracle::RowPositions positions_;
};

}  // namespace ferry::app
