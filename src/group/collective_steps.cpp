#include "group/collective_steps.hpp"

#include <vector>

#include "base/errors.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

void require_same_size(const Rank& rank, std::int64_t bytes) {
  std::vector<std::int64_t> sizes(rank.size());
  rank.all_gather(&bytes, sizes.data(), sizeof bytes);
  for (int peer = 0; peer < rank.size(); ++peer) {
    if (sizes[peer] == sizes[0]) continue;
    throw UsageError(str("symmetric memory must have the same size on every rank: rank 0 asks for ",
                         counted(sizes[0], "byte"), ", rank ", peer, " for ", sizes[peer]));
  }
}

void throw_first_error(const Rank& rank, const std::exception_ptr& mine) {
  const ErrorRecord record = mine ? ErrorRecord::of(mine) : ErrorRecord{};
  std::vector<ErrorRecord> records(rank.size());
  rank.all_gather(&record, records.data(), sizeof record);
  for (int peer = 0; peer < rank.size(); ++peer) {
    if (records[peer].kind != ErrorRecord::Kind::none) records[peer].raise(str("rank ", peer, ": "));
  }
}

}  // namespace ferry
