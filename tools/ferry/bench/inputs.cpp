#include "tools/ferry/bench/inputs.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "backends/cpu/kernels/kernels.hpp"
#include "format/parts.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/random.hpp"

namespace ferry::app {

namespace {

constexpr std::uint64_t kOffsets = 4096;  // different start columns in the pattern
constexpr int kKeyColumns = 16;           // the first columns of a token, which are unique to it

float small_number(std::uint64_t bits) {
  return static_cast<float>(bits % 7) - 3.0f;
}

}  // namespace

BenchInputs::BenchInputs(const BenchPoint& point) : point_(point) {
  const Trace& trace = *point.trace;
  ids_.reserve(routes_before(kSets, 0));
  for (int set = 0; set < kSets; ++set) {
    for (int rank = 0; rank < point.ranks; ++rank) {
      const TracePartition mine = partition(trace, {.layer = set % trace.layers,
                                                    .rank = rank,
                                                    .ranks = point.ranks,
                                                    .tokens_per_rank = point.tokens,
                                                    .step = set / trace.layers});
      ids_.insert(ids_.end(), mine.ids.begin(), mine.ids.end());
    }
  }
  weights_.resize(ids_.size());
  for (std::size_t i = 0; i < weights_.size(); ++i) weights_[i] = mix(i) % 2 == 0 ? 1.0f : 0.5f;
  pattern_.resize(static_cast<std::size_t>(point.config.hidden) + kOffsets);
  for (std::size_t i = 0; i < pattern_.size(); ++i) pattern_[i] = small_number(mix(i + 1));
  for (int set = 0; set < kSets; ++set) checks_.emplace_back(oracle_inputs(set), fmt::format("set {}", set));
}

oracle::GlobalInputs BenchInputs::oracle_inputs(int set) const {
  oracle::GlobalInputs all;
  all.config = point_.config;
  all.format = point_.config.format;
  all.weighted = true;
  const std::int64_t routes = std::int64_t{point_.tokens} * point_.config.top_k;
  for (int rank = 0; rank < point_.ranks; ++rank) {
    oracle::RankInputs& one = all.ranks.emplace_back();
    one.tokens = point_.tokens;
    one.ids.assign(ids(set, rank), ids(set, rank) + routes);
    one.weights.assign(weights(set, rank), weights(set, rank) + routes);
  }
  return all;
}

std::size_t BenchInputs::routes_before(int set, int rank) const {
  return static_cast<std::size_t>(std::int64_t{set} * point_.ranks + rank) *
         static_cast<std::size_t>(point_.tokens) * static_cast<std::size_t>(point_.config.top_k);
}

void BenchInputs::write_token(int set, int rank, std::int64_t token, float factor, std::byte* row) const {
  const std::uint64_t key = key_of(set, rank, token);
  const auto begin = pattern_.begin() + static_cast<std::ptrdiff_t>(key % kOffsets);
  std::vector<float> values(begin, begin + point_.config.hidden);
  std::uint64_t digits = key;
  for (int c = 0; c < std::min(kKeyColumns, point_.config.hidden); ++c, digits /= 7) {
    values[static_cast<std::size_t>(c)] = small_number(digits);
  }
  for (float& value : values) value *= factor;
  cpu::kernels().convert_row(row, point_.type, values.data(), DType::fp32, point_.config.hidden,
                             cpu::Store::cached);
}

void write_message(const BenchPoint& point, const BenchInputs& inputs, int set, int rank, std::int64_t token,
                   std::byte* message) {
  if (!point.config.format.quantises()) return inputs.write_token(set, rank, token, 1.0f, message);
  std::vector<std::byte> values(static_cast<std::size_t>(point.token_bytes()));
  inputs.write_token(set, rank, token, 1.0f, values.data());
  const PartList parts = parts_of(point.config.format, point.config.hidden);
  std::byte* const scales = message + parts.part[0].wire_bytes;
  cpu::kernels().encode_row({message, scales, scales + parts.part[1].wire_bytes}, values.data(), point.type,
                            point.config.hidden, encoding_of(point.config.format), point.global_scale);
}

TokenTables::TokenTables(const BenchPoint& point)
    : point_(point),
      quantised_(point.config.format.quantises()),
      message_bytes_(wire_bytes(parts_of(point.config.format, point.config.hidden))),
      tokens_(static_cast<std::size_t>(std::int64_t{point.ranks} * point.tokens * point.token_bytes())),
      messages_(quantised_
                    ? static_cast<std::size_t>(std::int64_t{point.ranks} * point.tokens * message_bytes_)
                    : 0) {}

void TokenTables::write(const BenchInputs& inputs, int set, int rank) {
  for (std::int64_t token = 0; token < point_.tokens; ++token) {
    const std::int64_t index = std::int64_t{rank} * point_.tokens + token;
    inputs.write_token(set, rank, token, 1.0f,
                       &tokens_[static_cast<std::size_t>(index * point_.token_bytes())]);
    if (!quantised_) continue;
    write_message(point_, inputs, set, rank, token,
                  &messages_[static_cast<std::size_t>(index * message_bytes_)]);
  }
}

const std::byte* TokenTables::tokens_of(int rank) const {
  return &tokens_[static_cast<std::size_t>(std::int64_t{rank} * point_.tokens * point_.token_bytes())];
}

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
