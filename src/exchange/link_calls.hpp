// Small calls on the host, over a link by which the ranks exchange blocks: cpu::PeerLink or
// collective::EngineCall.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "exchange/compared_options.hpp"
#include "exchange/gather.hpp"
#include "group/fault_points.hpp"

namespace ferry {

// Returns the value of every rank, [R], in a call of the link. `options`: equal on all ranks.
template <class Value, class Link>
std::vector<Value> exchange_values(Link& link, Operation operation, std::span<const ComparedOption> options,
                                   const Value& mine, const Rank& rank) {
  link.begin(operation, options);
  fault_point(FaultPoint::metadata_begin, rank.index());
  for (int peer = 0; peer < rank.size(); ++peer) std::memcpy(link.summary_to(peer), &mine, sizeof mine);
  link.post(false);
  fault_point(FaultPoint::metadata_posted, rank.index());
  link.wait();
  fault_point(FaultPoint::metadata_waited, rank.index());
  std::vector<Value> all(static_cast<std::size_t>(rank.size()));
  for (int peer = 0; peer < rank.size(); ++peer)
    std::memcpy(&all[static_cast<std::size_t>(peer)], link.summary_from(peer), sizeof mine);
  return all;
}

template <class Link>
StepMetadata exchange_metadata(Link& link, std::int32_t count, const Rank& rank) {
  const std::vector<std::int32_t> counts = exchange_values(link, Operation::metadata, {}, count, rank);
  StepMetadata all{};
  for (int peer = 0; peer < rank.size(); ++peer) {
    const std::int32_t theirs = counts[static_cast<std::size_t>(peer)];
    check_told(Operation::metadata, "count", theirs, std::numeric_limits<std::int32_t>::max() / rank.size(),
               peer);
    all.sum += theirs;
    if (peer < rank.index()) all.prefix += theirs;
    all.maximum = std::max(all.maximum, theirs);
  }
  return all;
}

// `call.count` is this rank's. Throws as GatherRounds().
template <class Link>
GatherRounds exchange_terms(Link& link, const GatherCall& call, const Rank& rank) {
  const ComparedOption option =
      call.adds() ? type_option("type", call.type) : ComparedOption{"row_bytes", call.row_bytes};
  const GatherTerms mine{.held = call.held,
                         .place = call.place,
                         .count = static_cast<std::int32_t>(call.count),
                         .exact = call.device_count == nullptr ? 1 : 0};
  return {call, rank.index(), exchange_values(link, call.operation, {&option, 1}, mine, rank)};
}

}  // namespace ferry
