#include "tools/ferry/bench/inputs.hpp"

#include <algorithm>
#include <numeric>

#include "backends/cpu/kernels.hpp"
#include "tools/ferry/common/random.hpp"

namespace ferry::app {

namespace {

constexpr std::uint64_t kOffsets = 4096;  // pieces of the pattern
constexpr int kNameColumns = 16;          // first columns of a token, which tell it from every other

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
}

std::size_t BenchInputs::routes_before(int set, int rank) const {
  return static_cast<std::size_t>(std::int64_t{set} * point_.ranks + rank) *
         static_cast<std::size_t>(point_.tokens) * static_cast<std::size_t>(point_.config.top_k);
}

void BenchInputs::write_token(int set, int rank, std::int64_t token, float factor, std::byte* row) const {
  const std::uint64_t key = key_of(set, rank, token);
  const auto begin = pattern_.begin() + static_cast<std::ptrdiff_t>(key % kOffsets);
  std::vector<float> values(begin, begin + point_.config.hidden);
  std::uint64_t name = key;
  for (int c = 0; c < std::min(kNameColumns, point_.config.hidden); ++c, name /= 7) {
    values[static_cast<std::size_t>(c)] = small_number(name);
  }
  for (float& value : values) value *= factor;
  cpu::kernels().convert_row(row, point_.type, values.data(), DType::fp32, point_.config.hidden,
                             cpu::Store::cached);
}

BenchRouting BenchInputs::routing() const {
  BenchRouting sum;
  for (int set = 0; set < kSets; ++set) count_set(set, sum);
  return {.routes = sum.routes / kSets,
          .pairs = sum.pairs / kSets,
          .remote_pairs = sum.remote_pairs / kSets,
          .busiest_share = sum.busiest_share / kSets};
}

void BenchInputs::count_set(int set, BenchRouting& sum) const {
  std::vector<std::int64_t> load(static_cast<std::size_t>(point_.ranks));
  for (int rank = 0; rank < point_.ranks; ++rank) {
    const std::int32_t* id = ids(set, rank);
    for (int token = 0; token < point_.tokens; ++token) {
      std::vector<bool> goes_to(static_cast<std::size_t>(point_.ranks));
      for (int slot = 0; slot < point_.config.top_k; ++slot, ++id) {
        if (*id < 0) continue;
        const auto to = static_cast<std::size_t>(point_.config.placement.place(*id).rank);
        ++load[to];
        goes_to[to] = true;
      }
      const auto pairs = std::count(goes_to.begin(), goes_to.end(), true);
      sum.pairs += pairs;
      sum.remote_pairs += pairs - (goes_to[static_cast<std::size_t>(rank)] ? 1 : 0);
    }
  }
  const std::int64_t routes = std::accumulate(load.begin(), load.end(), std::int64_t{0});
  sum.routes += routes;
  if (routes > 0) {
    sum.busiest_share +=
        static_cast<double>(*std::max_element(load.begin(), load.end())) / static_cast<double>(routes);
  }
}

}  // namespace ferry::app
