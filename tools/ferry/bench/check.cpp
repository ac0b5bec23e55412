#include "tools/ferry/bench/check.hpp"

#include <fmt/core.h>

#include <cstring>
#include <set>

#include "format/parts.hpp"
#include "tools/ferry/commands/commands.hpp"

namespace ferry::app {

namespace {

void require_right(const CheckCounter& counter) {
  if (counter.wrong > 0) throw CheckFailed(fmt::format("check failed: {}", counter.first_failure.data()));
}

// The factor by which combine multiplies a token whose experts return their rows unchanged.
float combine_factor(const BenchPoint& point, const std::int32_t* ids, const float* weights, bool weighted) {
  float sum = 0;
  std::set<int> ranks;
  for (int slot = 0; slot < point.config.top_k; ++slot) {
    if (ids[slot] < 0) continue;
    sum += weighted ? weights[slot] : 1.0f;
    ranks.insert(point.config.placement.location(ids[slot]).rank);
  }
  return point.config.layout == Layout::rank_major ? static_cast<float>(ranks.size()) : sum;
}

}  // namespace

std::int64_t check_received(const BenchPoint& point, const BenchInputs& inputs, int set, int rank,
                            const DispatchResult& received) {
  const PartList parts = parts_of(point.config.format, point.config.hidden);
  std::vector<std::byte> message(static_cast<std::size_t>(wire_bytes(parts)));
  CheckCounter counter;
  inputs.check(set).run(rank, received, counter, [&](int source, std::int64_t token) {
    write_message(point, inputs, set, source, token, message.data());
    DispatchCheck::Parts expected;
    auto from = message.begin();
    for (int p = 0; p < parts.count; from += parts.part[p++].wire_bytes)
      expected[at(p)].assign(from, from + parts.part[p].wire_bytes);
    return expected;
  });
  require_right(counter);
  return inputs.check(set).rows(rank);
}

std::int64_t check_row_positions(const BenchInputs& inputs, int set, int rank, const DispatchResult& received,
                                 bool weighted) {
  CheckCounter counter;
  inputs.check(set).run(rank, received, counter, {}, weighted);
  require_right(counter);
  return inputs.check(set).rows(rank);
}

std::int64_t check_result(const BenchPoint& point, const BenchInputs& inputs, int set, int rank,
                          const std::byte* result, const CombineMode& mode) {
  const int top_k = point.config.top_k;
  const bool unreduced = mode.reduction == Reduction::unreduced;
  const auto bytes = static_cast<std::size_t>(point.token_bytes());
  std::vector<std::byte> expected(bytes);
  const int rows = unreduced ? top_k : 1;
  for (std::int64_t token = 0; token < point.tokens; ++token) {
    const std::int32_t* ids = inputs.ids(set, rank) + token * top_k;
    const float sum = combine_factor(point, ids, inputs.weights(set, rank) + token * top_k, mode.weighted);
    for (int i = 0; i < rows; ++i) {
      // A masked slot's row is +0 everywhere. Multiplying by 0 would give -0 for negative values.
      const bool masked = unreduced ? ids[i] < 0 : sum == 0;
      if (masked) {
        std::memset(expected.data(), 0, bytes);
      } else {
        inputs.write_token(set, rank, token, unreduced ? 1.0f : sum, expected.data());
      }
      const std::byte* row = result + (token * rows + i) * point.token_bytes();
      if (std::memcmp(row, expected.data(), bytes) != 0)
        throw CheckFailed(
            fmt::format("check failed: set {}, rank {}: the result of token {} is wrong", set, rank, token));
    }
  }
  return std::int64_t{point.tokens} * rows;
}

}  // namespace ferry::app
