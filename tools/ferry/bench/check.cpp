#include "tools/ferry/bench/check.hpp"

#include <fmt/core.h>

#include <cstring>
#include <set>
#include <string>
#include <tuple>

#include "format/parts.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/scale_row.hpp"

namespace ferry::app {

namespace {

void require(bool correct, const std::string& what, int set, int rank) {
  if (!correct) throw CheckFailed(fmt::format("check failed: set {}, rank {}: {}", set, rank, what));
}

struct Checker {
  const BenchPoint& point;
  const BenchInputs& inputs;
  int set, rank;
  const DispatchResult& received;
  bool weighted, compares_values;
  PartList parts = parts_of(point.config.format, point.config.hidden);
  std::vector<std::byte> message = std::vector<std::byte>(static_cast<std::size_t>(wire_bytes(parts)));

  bool rank_major() const { return point.config.layout == Layout::rank_major; }
  int rank_of(std::int32_t id) const { return id < 0 ? -1 : point.config.placement.location(id).rank; }

  std::int64_t check() {
    const std::vector<std::int64_t> counts = expected_counts();
    std::int64_t rows = 0;
    for (int group = 0; group < received.groups; ++group) {
      const std::int64_t count = counts[static_cast<std::size_t>(group)];
      require(received.counts[group] == count,
              fmt::format("group {} has {} rows, expected {}", group, received.counts[group], count), set,
              rank);
      check_group(group);
      rows += count;
    }
    return rows;
  }

  std::vector<std::int64_t> expected_counts() const {
    std::vector<std::int64_t> counts(static_cast<std::size_t>(received.groups));
    const int top_k = point.config.top_k;
    for (int source = 0; source < point.ranks; ++source) {
      for (std::int64_t t = 0; t < point.tokens; ++t) {
        const std::int32_t* ids = inputs.ids(set, source) + t * top_k;
        bool counted = false;
        for (int slot = 0; slot < top_k; ++slot) {
          if (rank_of(ids[slot]) != rank || (rank_major() && counted)) continue;
          counted = true;
          const int group = rank_major() ? source : point.config.placement.location(ids[slot]).local;
          ++counts[static_cast<std::size_t>(group)];
        }
      }
    }
    return counts;
  }

  // The counts are right. If the sources ascend too, every expected row is there exactly once.
  void check_group(int group) {
    Source last;
    for (std::int32_t i = 0; i < received.counts[group]; ++i) {
      const std::int64_t row = received.row_offsets[group] + i;
      const Source& source = received.source[row];
      const bool ascends =
          std::tie(last.rank, last.token, last.slot) < std::tie(source.rank, source.token, source.slot);
      require(i == 0 || ascends, fmt::format("row {} is out of order", row), set, rank);
      require(belongs(source, group), fmt::format("row {} is in the wrong group", row), set, rank);
      require(!compares_values || same_values(source, row), fmt::format("row {} differs from its token", row),
              set, rank);
      last = source;
    }
  }

  bool belongs(const Source& source, int group) const {
    if (source.rank < 0 || source.rank >= point.ranks || source.token < 0 || source.token >= point.tokens) {
      return false;
    }
    if (rank_major()) return source.rank == group && source.slot == -1 && slots_belong(source);
    if (source.slot < 0 || source.slot >= point.config.top_k) return false;
    const std::int64_t route = std::int64_t{source.token} * point.config.top_k + source.slot;
    const std::int64_t row = &source - received.source;
    return inputs.ids(set, source.rank)[route] == received.group_expert[group] &&
           (!weighted || received.weight[row] == inputs.weights(set, source.rank)[route]);
  }

  // rank_major: compares the local experts and weights of the token's slots.
  bool slots_belong(const Source& source) const {
    const std::int64_t top_k = point.config.top_k, first = (&source - received.source) * top_k;
    const std::int64_t route = source.token * top_k;
    const std::int32_t* ids = inputs.ids(set, source.rank) + route;
    const float* weights = inputs.weights(set, source.rank) + route;
    for (std::int64_t slot = 0; slot < top_k; ++slot) {
      const bool local_expert = rank_of(ids[slot]) == rank;
      const int local = local_expert ? point.config.placement.location(ids[slot]).local : -1;
      if (received.local_ids[first + slot] != local) return false;
      if (weighted && received.weight[first + slot] != (local_expert ? weights[slot] : 0.0f)) return false;
    }
    return true;
  }

  bool same_values(const Source& source, std::int64_t row) {
    write_message(point, inputs, set, source.rank, source.token, message.data());
    const std::byte* expected = message.data();
    for (int p = 0; p < parts.count; expected += parts.part[p].wire_bytes, ++p) {
      if (!same_part(p, row, expected)) return false;
    }
    return true;
  }

  bool same_part(int p, std::int64_t row, const std::byte* expected) const {
    const PartLayout& part = parts.part[p];
    const ReceivedPart& found = received.parts[static_cast<std::size_t>(p)];
    const auto* data = static_cast<const std::byte*>(found.data);
    const auto bytes = static_cast<std::size_t>(part.element_bytes);
    const std::int64_t place = scale_row(received, part, row, found.leading_dimension);
    for (std::int64_t e = 0; e < elements_of(part); ++e) {
      const std::int64_t at = element_offset(part, place, e, found.leading_dimension);
      if (std::memcmp(data + at, expected + e * part.element_bytes, bytes) != 0) return false;
    }
    return true;
  }
};

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
  return Checker{point, inputs, set, rank, received, true, true}.check();
}

std::int64_t check_row_positions(const BenchPoint& point, const BenchInputs& inputs, int set, int rank,
                                 const DispatchResult& received, bool weighted) {
  return Checker{point, inputs, set, rank, received, weighted, false}.check();
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
      require(std::memcmp(row, expected.data(), bytes) == 0,
              fmt::format("the result of token {} is wrong", token), set, rank);
    }
  }
  return std::int64_t{point.tokens} * rows;
}

}  // namespace ferry::app
