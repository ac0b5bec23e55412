#include "group/agreement.hpp"

#include <algorithm>
#include <vector>

#include "base/text.hpp"

namespace ferry {

std::string describe_difference(const ComparedOption& option, int rank, std::int64_t mine, int peer,
                                std::int64_t theirs) {
  const auto text = [&](std::int64_t value) {
    return option.name_of != nullptr ? option.name_of(value) : std::to_string(value);
  };
  return str(option.name, " is ", text(mine), " on rank ", rank, " and ", text(theirs), " on rank ", peer,
             ": pass the same on every rank");
}

void throw_given_on_some(const char* operation, const char* argument, int with, int without) {
  throw UsageError(str(operation, ": the ranks' options differ: ", argument, " given on rank ", with,
                       " and not on rank ", without, ": pass it on every rank, or on none"));
}

void throw_other_epoch(Operation operation, std::uint64_t call, const EpochOfRank& mine,
                       const EpochOfRank& theirs) {
  throw UsageError(str(to_string(operation), " ", call, ": rank ", mine.rank, " is in epoch ", mine.epoch,
                       " and rank ", theirs.rank, " in epoch ", theirs.epoch,
                       ": ranks make calls together only in one epoch"));
}

void require_same_call(const CallTerms& mine, const PeerCall& peer) {
  if (peer.epoch != mine.epoch)
    throw_other_epoch(mine.operation, mine.call, {mine.rank, mine.epoch}, {peer.rank, peer.epoch});
  if (peer.operation != mine.operation) {
    throw UsageError(str("call ", mine.call, " of the lane is ", to_string(mine.operation), " on rank ",
                         mine.rank, " and ", to_string(peer.operation), " on rank ", peer.rank));
  }
  const std::string call = str(to_string(mine.operation), " ", mine.call);
  for (std::size_t i = 0; i < std::min(mine.options.size(), peer.options.size()); ++i) {
    if (peer.options[i] == mine.options[i].value) continue;
    const ComparedOption& option = mine.options[i];
    throw UsageError(
        str(call, ": ", describe_difference(option, mine.rank, option.value, peer.rank, peer.options[i])));
  }
  if (peer.options.size() != mine.options.size()) {
    throw UsageError(str(call, " has ", mine.options.size(), " options on rank ", mine.rank, " and ",
                         peer.options.size(), " on rank ", peer.rank));
  }
}

void throw_refusal(int peer, Operation operation, std::uint64_t call, const ErrorRecord& refusal) {
  refusal.raise(str("rank ", peer, " refused ", to_string(operation), " ", call, ": "));
}

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
