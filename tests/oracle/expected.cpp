#include "oracle/expected.hpp"

#include <algorithm>

namespace ferry::oracle {

StepMetadata step_metadata(const std::vector<std::int32_t>& counts, int rank) {
  StepMetadata all;
  for (int r = 0; r < static_cast<int>(counts.size()); ++r) {
    all.sum += counts[r];
    all.prefix += r < rank ? counts[r] : 0;
    all.maximum = r == 0 ? counts[r] : std::max(all.maximum, counts[r]);
  }
  return all;
}

std::int64_t dispatch_messages(const RowPositions& positions, int rank) {
  std::int64_t messages = 0;
  for (int to = 0; to < positions.size(); ++to) {
    if (to != rank) messages += positions.tokens_between[rank * positions.size() + to];
  }
  return messages;
}

std::int64_t combine_messages(const RowPositions& positions, int rank, Reduction reduction) {
  std::int64_t messages = 0;
  for (int source = 0; source < positions.size(); ++source) {
    if (source == rank) continue;
    if (reduction == Reduction::partial) {
      messages += positions.tokens_between[source * positions.size() + rank];
      continue;
    }
    messages += std::count_if(positions.ranks[rank].rows.begin(), positions.ranks[rank].rows.end(),
                              [&](const RowInfo& row) { return row.source.rank == source; });
  }
  return messages;
}

}  // namespace ferry::oracle
