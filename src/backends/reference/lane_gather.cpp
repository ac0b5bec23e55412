// all_gather_v and reduce_scatter_v of the reference backend: every rank reads the rows of all ranks.
#include <algorithm>
#include <cstring>
#include <vector>

#include "backends/reference/lane.hpp"
#include "exchange/call_options.hpp"
#include "exchange/gather.hpp"
#include "group/fault_points.hpp"
#include "oracle/gather.hpp"

namespace ferry::reference {
namespace {

std::vector<oracle::Bytes> of_group(const SubGroup& group, const std::vector<oracle::Bytes>& all) {
  const auto first = all.begin() + static_cast<std::ptrdiff_t>(group.first);
  return {first, first + static_cast<std::ptrdiff_t>(group.count)};
}

}  // namespace

// Sends this rank's terms to every rank. Returns those of all ranks.
std::vector<GatherTerms> Lane::exchange_terms(Operation operation, const GatherTerms& mine,
                                              const CallOption& same_everywhere) {
  channel_.begin(operation, {&same_everywhere, 1});
  write_summary({.count = mine.count, .held = mine.held});
  post_all();
  wait_all();
  std::vector<GatherTerms> all;
  for (int peer = 0; peer < context_.ranks(); ++peer) {
    const CallSummary summary = summary_of(peer);
    all.push_back({summary.count, summary.held});
  }
  return all;
}

// Returns what every rank publishes, `bytes[r]` of rank r, in rounds of what the dispatch staging holds.
std::vector<oracle::Bytes> Lane::publish(Operation operation, const void* rows,
                                         const std::vector<std::int64_t>& bytes) {
  const std::int64_t largest = *std::max_element(bytes.begin(), bytes.end());
  const std::int64_t round = context_.staging.dispatch;
  const auto* const mine = static_cast<const std::byte*>(rows);
  std::vector<oracle::Bytes> all(bytes.size());
  for (std::int64_t begin = 0; begin < largest; begin += round) {
    channel_.begin(operation, {});
    fault_point(FaultPoint::gather_begin, context_.me());
    const std::int64_t sent = std::clamp<std::int64_t>(bytes[context_.me()] - begin, 0, round);
    if (sent > 0) std::memcpy(dispatch_staging(context_.me()), mine + begin, sent);
    fault_point(FaultPoint::gather_sent, context_.me());
    post_all();
    fault_point(FaultPoint::gather_posted, context_.me());
    wait_all();
    fault_point(FaultPoint::gather_waited, context_.me());
    for (int peer = 0; peer < context_.ranks(); ++peer) {
      const std::int64_t received = std::clamp<std::int64_t>(bytes[peer] - begin, 0, round);
      const std::byte* const staged = dispatch_staging(peer);
      all[peer].insert(all[peer].end(), staged, staged + received);
    }
  }
  return all;
}

std::int64_t Lane::all_gather_v(const AllGatherCall& call) {
  const std::vector<GatherTerms> all =
      exchange_terms(Operation::all_gather_v, {call.count, call.capacity}, {"row_bytes", call.row_bytes});
  check_all_gather(all, call.sub_group);
  std::vector<std::int64_t> bytes;
  for (const GatherTerms& rank : all) bytes.push_back(rank.count * call.row_bytes);
  const auto group = SubGroup::of(context_.me(), call.sub_group, context_.ranks());
  const oracle::Bytes rows =
      oracle::gathered(of_group(group, publish(Operation::all_gather_v, call.rows, bytes)));
  if (!rows.empty()) std::memcpy(call.gathered, rows.data(), rows.size());
  return sum_of_counts(group.terms(all));
}

void Lane::reduce_scatter_v(const ReduceScatterCall& call) {
  const std::vector<GatherTerms> all =
      exchange_terms(Operation::reduce_scatter_v, {call.count, call.total}, type_option("type", call.type));
  check_reduce_scatter(all, call.sub_group);
  const std::int64_t hidden = context_.config.hidden;
  std::vector<std::int64_t> bytes;
  for (const GatherTerms& rank : all) bytes.push_back(rank.held * hidden * bytes_of(call.type));
  const auto group = SubGroup::of(context_.me(), call.sub_group, context_.ranks());
  const std::int64_t first = sum_of_counts(
      std::span(all).subspan(group.first, static_cast<std::size_t>(context_.me()) - group.first));
  const oracle::Bytes sums =
      oracle::scattered_sums(of_group(group, publish(Operation::reduce_scatter_v, call.rows, bytes)),
                             call.type, hidden, first, call.count);
  if (!sums.empty()) std::memcpy(call.sums, sums.data(), sums.size());
}

}  // namespace ferry::reference
