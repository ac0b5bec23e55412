#include "backends/reference/lane.hpp"

#include <cstring>

namespace ferry::reference {

Lane::Lane(const ReferenceContext& context, int index)
    : counts(context.config.experts),
      context_(context),
      index_(index),
      channel_(context.rank, context.memory.sections(context.staging.channel_of(index)), sizeof(CallSummary),
               context.config.deadline) {}

void Lane::post_all() {
  for (int peer = 0; peer < context_.ranks(); ++peer) channel_.post(peer);
}

void Lane::wait_all() {
  for (int peer = 0; peer < context_.ranks(); ++peer) channel_.wait(peer);
}

void Lane::write_summary(const CallSummary& summary) {
  for (int peer = 0; peer < context_.ranks(); ++peer)
    std::memcpy(channel_.summary_to(peer), &summary, sizeof summary);
}

CallSummary Lane::summary_of(int peer) const {
  CallSummary summary;
  std::memcpy(&summary, channel_.summary_from(peer), sizeof summary);
  return summary;
}

std::byte* Lane::dispatch_staging(int rank) const {
  return context_.memory.at(rank, context_.staging.dispatch_of(index_, channel_.parity()));
}

std::byte* Lane::combine_staging(int rank) const {
  return context_.memory.at(rank, context_.staging.combine_of(index_, channel_.parity()));
}

void Lane::require_same(const char* operation, const char* argument,
                        std::int32_t CallSummary::* argument_given) const {
  int with = -1, without = -1;
  for (int peer = 0; peer < context_.ranks(); ++peer) {
    const std::int32_t given = summary_of(peer).*argument_given;
    if (given == CallSummary::kIrrelevant) continue;
    int& first = given == 1 ? with : without;
    if (first < 0) first = peer;
  }
  if (with < 0 || without < 0) return;
  throw_given_on_some(operation, argument, with, without);
}

void Lane::record_bad_source(std::int64_t index) {
  BadSource& bad = diagnostics.bad_source;
  bad.rank = context_.me();
  bad.index = bad.count == 0 ? index : std::min(bad.index, index);
  ++bad.count;
}

}  // namespace ferry::reference
