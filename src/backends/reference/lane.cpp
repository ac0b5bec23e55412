#include "backends/reference/lane.hpp"

#include <cstring>

#include "base/text.hpp"

namespace ferry::reference {

Lane::Lane(const Shared& shared, int index)
    : expert_load(shared.config.experts),
      shared_(shared),
      index_(index),
      channel_(shared.rank, shared.memory, shared.stage.channel_of(index), sizeof(Note),
               shared.config.deadline) {}

void Lane::post_all() {
  for (int peer = 0; peer < shared_.ranks(); ++peer) channel_.post(peer);
}

void Lane::wait_all() {
  for (int peer = 0; peer < shared_.ranks(); ++peer) channel_.wait(peer);
}

void Lane::write_note(const Note& note) {
  for (int peer = 0; peer < shared_.ranks(); ++peer) std::memcpy(channel_.note_to(peer), &note, sizeof note);
}

Note Lane::note_of(int peer) const {
  Note note;
  std::memcpy(&note, channel_.note_from(peer), sizeof note);
  return note;
}

std::byte* Lane::dispatch_stage(int rank) const {
  return shared_.memory.at(rank, shared_.stage.dispatch_of(index_, channel_.parity()));
}

std::byte* Lane::combine_stage(int rank) const {
  return shared_.memory.at(rank, shared_.stage.combine_of(index_, channel_.parity()));
}

void Lane::require_alike(const char* operation, const char* argument, std::int32_t Note::* given) const {
  int with = -1, without = -1;
  for (int peer = 0; peer < shared_.ranks(); ++peer) {
    const std::int32_t said = note_of(peer).*given;
    if (said == Note::kNothing) continue;
    int& seen = said == 1 ? with : without;
    if (seen < 0) seen = peer;
  }
  if (with < 0 || without < 0) return;
  throw UsageError(str(operation, ": the ranks' options differ: ", argument, " given on rank ", with,
                       " and not on rank ", without));
}

void Lane::record_bad_source(std::int64_t index) {
  BadSource& bad = findings.bad_source;
  bad.rank = shared_.me();
  bad.index = bad.count == 0 ? index : std::min(bad.index, index);
  ++bad.count;
}

}  // namespace ferry::reference
