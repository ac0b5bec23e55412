// What every token of a set is and arrives as, for ranks as threads: each writes its own tokens, all read.
#pragma once

#include <cstddef>
#include <vector>

#include "tools/ferry/bench/inputs.hpp"

namespace ferry::app {

class TokenTables {
 public:
  explicit TokenTables(const BenchPoint& point);

  // This rank's part of a set. Ranks meet before anybody reads, and before the next set is written.
  void write(const BenchInputs& inputs, int set, int rank);

  const std::vector<std::byte>& tokens() const { return tokens_; }  // [R, N] of BenchPoint::type
  // [R, N] as write_message makes them; the tokens themselves where nothing is quantised.
  const std::vector<std::byte>& messages() const { return quantised_ ? messages_ : tokens_; }
  const std::byte* tokens_of(int rank) const;

 private:
  const BenchPoint& point_;
  bool quantised_;
  std::int64_t message_bytes_;
  std::vector<std::byte> tokens_, messages_;
};

}  // namespace ferry::app
