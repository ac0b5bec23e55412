#include "backends/reference/staging_layout.hpp"

#include <algorithm>

#include "exchange/configuration.hpp"
#include "group/channel.hpp"

namespace ferry::reference {
namespace {

std::int64_t whole_pages(std::int64_t bytes) {
  return (bytes + 4095) / 4096 * 4096;
}

// Largest row of a token in any format this configuration lets through.
std::int64_t token_bytes(const Config& config) {
  std::int64_t raw = 0;
  for (const std::int64_t part : config.format.part_bytes) raw += part;
  return std::max<std::int64_t>(4 * config.hidden, raw);
}

}  // namespace

Stage::Stage(const Config& config) {
  const int ranks = config.placement.ranks();
  slots = std::int64_t{config.max_tokens} * config.top_k;
  rows = 0;
  for (int rank = 0; rank < ranks; ++rank) rows = std::max(rows, row_capacity(config, rank));
  channel = whole_pages(Channel::bytes(ranks, sizeof(Note)));
  dispatch = whole_pages(slots * 12 + config.max_tokens * token_bytes(config));
  combine = whole_pages(rows * (config.hidden * bytes_of(config.combine_type) + 8));
}

}  // namespace ferry::reference
