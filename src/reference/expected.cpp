#include "reference/expected.hpp"

#include <algorithm>
#include <set>
#include <utility>

namespace ferry::reference {

StepMetadata step_metadata(const std::vector<std::int32_t>& counts, int rank) {
  StepMetadata all;
  for (int r = 0; r < static_cast<int>(counts.size()); ++r) {
    all.sum += counts[r];
    all.prefix += r < rank ? counts[r] : 0;
    all.maximum = r == 0 ? counts[r] : std::max(all.maximum, counts[r]);
  }
  return all;
}

std::int64_t dispatch_messages(const Places& places, int rank) {
  std::int64_t messages = 0;
  for (int to = 0; to < places.size(); ++to) {
    if (to != rank) messages += places.tokens_between[rank * places.size() + to];
  }
  return messages;
}

std::int64_t combine_messages(const Places& places, int rank, Reduction reduction) {
  std::int64_t routes = 0;
  std::set<std::pair<int, int>> tokens;
  for (const PlacedRow& row : places.ranks[rank].rows) {
    if (row.state != RowState::kept || row.source.rank == rank) continue;
    ++routes;
    tokens.insert({row.source.rank, row.source.token});
  }
  return reduction == Reduction::partial ? static_cast<std::int64_t>(tokens.size()) : routes;
}

}  // namespace ferry::reference
