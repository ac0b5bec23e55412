#include "cuda/sizes.hpp"

#include <algorithm>

#include "core/backend.hpp"
#include "core/configuration.hpp"
#include "core/text.hpp"
#include "cuda/lane_view.hpp"
#include "format/parts.hpp"
#include "layout/device_message.hpp"

namespace ferry {
namespace cuda {
namespace {

// Arrays one after the other, each from a multiple of 256 bytes.
class Chain {
 public:
  std::int64_t take(std::int64_t bytes) {
    const std::int64_t begin = end_;
    end_ = align_up(begin + bytes, 256);
    return begin;
  }
  std::int64_t bytes() const { return end_; }

 private:
  std::int64_t end_ = 0;
};

}  // namespace

void check_limits(const Config& config) {
  if (config.placement.ranks() > kMaxRanks) {
    throw UnsupportedError(
        str("the cuda backend takes up to ", kMaxRanks, " ranks, got ", config.placement.ranks()));
  }
  if (config.experts > kMaxExperts) {
    throw UnsupportedError(
        str("the cuda backend takes up to ", kMaxExperts, " experts, got ", config.experts));
  }
}

DeviceSignals device_signals(const Config& config) {
  return {.ranks = config.placement.ranks(),
          .experts = config.experts,
          .max_tokens = config.max_tokens,
          .combine_rows = exchange_shape(config, 0).combine_rows};
}

ExchangeLayout device_layout(const Config& config) {
  ExchangeShape shape = exchange_shape(config, device_signals(config).bytes());
  shape.message_bytes = device_message_layout(parts_of(config.format, config.hidden), config.top_k).bytes;
  shape.combine_row_bytes = align_up(shape.combine_row_bytes, kLine);
  return exchange_layout(shape);
}

ExchangeArrays exchange_arrays(const Config& config) {
  const std::int64_t experts = config.experts, ranks = config.placement.ranks();
  Chain chain;
  ExchangeArrays arrays;
  arrays.place = chain.take(experts * static_cast<std::int64_t>(sizeof(ExpertPlace)));
  arrays.expert_at = chain.take(4 * experts);
  arrays.first_expert = chain.take(4 * (ranks + 1));
  arrays.group_capacities = chain.take(8 * ranks);
  arrays.bytes = chain.bytes();
  return arrays;
}

LaneArrays lane_arrays(const Config& config, int rank) {
  const std::int64_t rows = row_capacity(config, rank), groups = groups_of(config, rank);
  const std::int64_t experts = config.experts, ranks = config.placement.ranks();
  const bool rank_major = config.layout == Layout::rank_major;
  Chain chain;
  LaneArrays arrays;
  arrays.state = chain.take(sizeof(LaneState));
  arrays.first_rows = chain.take(4 * ranks * std::max(experts, ranks));
  arrays.load = chain.take(8 * experts);
  arrays.metadata = chain.take(sizeof(StepMetadata));
  arrays.plan = chain.take(view_plan(nullptr, plan_shape(config)).bytes);
  arrays.weight = chain.take(4 * rows * (rank_major ? config.top_k : 1));
  arrays.local_ids = chain.take(rank_major ? 4 * rows * config.top_k : 0);
  arrays.dots = chain.take(rank_major ? 0 : 4 * rows);
  arrays.group_expert = chain.take(4 * groups);
  arrays.counts = chain.take(4 * groups);
  arrays.row_offsets = chain.take(4 * (groups + 1));
  if (config.own_arrivals) {
    const std::int64_t before = chain.bytes();
    // Holds the parts of every format whose messages are not larger than the configuration's: a row takes on
    // arrival what it takes in a message, or less. Columns start at multiples of a few rows, parts at
    // multiples of 256 bytes.
    const std::int64_t row = wire_bytes(parts_of(config.format, config.hidden));
    arrays.parts = chain.take((rows + kColumnAlignment - 1) * row + kMaxParts * 256);
    arrays.parts_bytes = chain.bytes() - before;
  }
  arrays.bytes = chain.bytes();
  return arrays;
}

}  // namespace cuda

Sizes cuda_backend_sizes(const Config& config, int rank) {
  cuda::check_limits(config);
  const ExchangeLayout layout = cuda::device_layout(config);
  const cuda::LaneArrays arrays = cuda::lane_arrays(config, rank);
  const std::int64_t lanes = config.lanes;
  return {.dispatch_staging = 2 * lanes * layout.dispatch,
          .combine_staging = 2 * lanes * layout.combine,
          .signals = lanes * layout.signals,
          .arrivals = lanes * arrays.parts_bytes,
          .plans = lanes * (arrays.bytes - arrays.parts_bytes) + cuda::exchange_arrays(config).bytes};
}

}  // namespace ferry
