#include "backends/reference/staging_layout.hpp"

#include <algorithm>

#include "exchange/configuration.hpp"
#include "ferry/plan.hpp"
#include "group/channel.hpp"

namespace ferry::reference {
namespace {

std::int64_t round_up_to_page(std::int64_t bytes) {
  return (bytes + 4095) / 4096 * 4096;
}

// The largest row of a token in any format that this configuration accepts.
std::int64_t token_bytes(const Config& config) {
  std::int64_t raw = 0;
  for (const std::int64_t part : config.format.part_bytes) raw += part;
  return std::max<std::int64_t>(4 * config.hidden, raw);
}

}  // namespace

StagingLayout::StagingLayout(const Config& config) {
  const int ranks = config.placement.ranks();
  slots = std::int64_t{config.max_tokens} * config.top_k;
  max_rows = 0;
  for (int rank = 0; rank < ranks; ++rank) max_rows = std::max(max_rows, row_capacity(config, rank));
  channel = round_up_to_page(Channel::bytes(ranks, sizeof(CallSummary)));
  dispatch = round_up_to_page(slots * 12 + config.max_tokens * token_bytes(config));
  const std::int64_t beside_row = 2 * sizeof(float) + sizeof(Source);
  combine = round_up_to_page(max_rows * (config.hidden * bytes_of(config.combine_type) + beside_row));
}

}  // namespace ferry::reference
