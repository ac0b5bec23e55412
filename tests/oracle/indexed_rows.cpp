#include "oracle/indexed_rows.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace ferry::oracle {

IndexedRows indexed_rows(const GlobalInputs& inputs, const RowPositions& positions, int rank) {
  const Config& config = inputs.config;
  IndexedRows rows;
  rows.capacity = std::int64_t{positions.size()} * config.max_tokens;
  std::map<std::pair<int, std::int32_t>, std::int32_t> row_of;  // by source rank and token
  rows.source_offsets.push_back(0);
  for (int source = 0; source < positions.size(); ++source) {
    for (std::int32_t token = 0; token < positions.tokens(source); ++token) {
      bool here = source == rank && config.shared_experts > 0;
      for (int slot = 0; slot < config.top_k; ++slot)
        here = here || positions.route(source, token, slot).destination == rank;
      if (!here) continue;
      row_of[{source, token}] = static_cast<std::int32_t>(rows.source.size());
      rows.source.push_back({source, token, -1});
    }
    rows.source_offsets.push_back(static_cast<std::int32_t>(rows.source.size()));
  }
  const RankRows& here = positions.ranks[rank];
  for (const RowInfo& position : here.rows) {
    const bool kept = position.state == RowState::kept;
    const Source& source = position.source;
    rows.index.push_back(kept ? row_of.at({source.rank, source.token})
                              : static_cast<std::int32_t>(rows.capacity));
    rows.slot.push_back(kept ? source.slot : -1);
  }
  for (std::int64_t first = 0; first < here.capacity; first += config.alignment) {
    // The last group that begins here or before: empty ones begin where the next one does.
    const auto next = std::upper_bound(here.row_offsets.begin(), here.row_offsets.end(), first);
    const bool used = first < here.row_offsets.back();
    rows.block_group.push_back(used ? static_cast<std::int32_t>(next - here.row_offsets.begin()) - 1 : -1);
  }
  return rows;
}

}  // namespace ferry::oracle
