// The receive half of dispatch: wait for every rank's counts, fix all places, lay the arrivals out.
#include <algorithm>
#include <cstring>

#include "backends/cpu/dispatch.hpp"
#include "group/fault_points.hpp"

namespace ferry::cpu {

DispatchResult Dispatch::receive() {
  const int ranks = shared_.ranks(), me = shared_.me();
  for (int step = 0; step < ranks; ++step) lane_.channel.wait((me + step) % ranks);
  fault_point(FaultPoint::dispatch_waited, me);
  for (int peer = 0; peer < ranks; ++peer) take_note(peer);
  weights_.check("dispatch", "weights");

  finish_plan();
  prepare_received();
  write_groups();
  receive_chunks();
  if (!replay_) count_load();
  lane_.totals.total = plan_.header->total;
  lane_.totals.call = lane_.channel.call();
  fault_point(FaultPoint::dispatch_done, me);
  return received_;
}

void Dispatch::take_note(int peer) {
  const auto* words = reinterpret_cast<const std::int32_t*>(lane_.channel.note_from(peer));
  weights_.note(peer, words[0]);
  chunks_.note(peer, words[3] != 0, words[4]);
  if (replay_) return;
  const int experts = shared_.config.experts, ranks = shared_.ranks();
  std::memcpy(plan_.counts + std::int64_t{peer} * experts, words + kNoteWords,
              4 * static_cast<std::size_t>(experts));
  std::memcpy(plan_.tokens_between + std::int64_t{peer} * ranks, words + kNoteWords + experts,
              4 * static_cast<std::size_t>(ranks));
}

void Dispatch::finish_plan() {
  if (replay_) {
    copy_usable_counts();
    places_.compute(shared_.config, plan_);
    return;
  }
  places_.compute(shared_.config, plan_);
  plan_rows(shared_.config, shared_.me(), places_, plan_);
  PlanHeader& header = *plan_.header;
  header.total = places_.total(shared_.me());
  header.dropped = places_.overflow().dropped;
  header.magic = kPlanMagic;
  header.check = header_check(header);
  if (header.dropped > 0) lane_.findings.overflow = places_.overflow();
}

// Offsets come from counts: one outside [0, T*K] would put groups anywhere. The caller's plan stays as it is.
void Dispatch::copy_usable_counts() {
  const std::int64_t most = std::int64_t{shared_.config.max_tokens} * shared_.config.top_k;
  const std::int64_t ranks = shared_.ranks(), counts = ranks * shared_.config.experts;
  usable_counts_.resize(static_cast<std::size_t>(counts + ranks * ranks));
  std::int32_t* tokens = usable_counts_.data() + counts;
  for (std::int64_t i = 0; i < counts; ++i) {
    usable_counts_[static_cast<std::size_t>(i)] =
        lane_.usable(plan_.counts[i], most + 1, i) ? plan_.counts[i] : 0;
  }
  for (int source = 0; source < ranks; ++source) {
    for (int destination = 0; destination < ranks; ++destination) {
      tokens[source * ranks + destination] = lane_.messages_between(plan_, source, destination);
    }
  }
  plan_.counts = usable_counts_.data();
  plan_.tokens_between = tokens;
}

void Dispatch::receive_chunks() {
  const int me = shared_.me();
  ArrivalPlacer placer(shared_.config, me, places_, plan_);
  auto receive = [&](std::int64_t chunk) {
    for (int source = 0; source < shared_.ranks(); ++source)
      lay_out_from(source, chunks_.begin(chunk), chunks_.end(chunk), placer);
  };
  auto send = [&](std::int64_t chunk) {
    stage_chunk(chunks_.begin(chunk), chunks_.end(chunk));
    fault_point(FaultPoint::dispatch_chunk_sent, me);
  };
  chunks_.play(lane_.channel, me, receive, send);
}

void Dispatch::lay_out_from(int source, std::int64_t begin, std::int64_t end, ArrivalPlacer& placer) {
  const int me = shared_.me(), top_k = shared_.config.top_k;
  end = std::min<std::int64_t>(end, lane_.messages_between(plan_, source, me));
  const bool staged = source != me || split_;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t message = std::int64_t{source} * shared_.config.max_tokens + i;
    MessageHead head{plan_.sent_tokens[std::int64_t{me} * shared_.config.max_tokens + i], 0};
    Row row;
    if (staged) {
      const std::byte* from = lane_.message(me, source, chunks_.place(i), layout_.bytes);
      std::memcpy(&head, from + layout_.head_offset, sizeof head);
      row = staged_row(from);
    }
    if (staged && head.token == -1) continue;  // the sender's plan is damaged, and the sender says so
    if (!lane_.usable(head.token, staged ? shared_.config.max_tokens : call_.tokens.count, message)) continue;
    if (!staged) {
      head.position = position_of(head.token, me);
      row = own_row(head.token);
    }
    const std::int32_t* rows = replay_ ? plan_.came_rows + message * top_k
                                       : placer.place(source, i, head.token, head.position, row.ids);
    if (shared_.config.layout == Layout::rank_major) {
      write_token_row(row, rows);
    } else {
      write_rows(row, rows);
    }
  }
}

Dispatch::Row Dispatch::staged_row(const std::byte* message) const {
  Row row{};
  for (int p = 0; p < parts_.count; ++p) row.parts[p] = message + layout_.part_offset[p];
  row.ids = reinterpret_cast<const std::int32_t*>(message + layout_.ids_offset);
  row.weights = reinterpret_cast<const float*>(message + layout_.weights_offset);
  return row;
}

Dispatch::Row Dispatch::own_row(std::int64_t token) {
  Row row{};
  if (call_.format.kind == FormatKind::fp8_e4m3) {
    scratch_.resize(static_cast<std::size_t>(layout_.bytes));
    encode(token, scratch_.data());
    for (int p = 0; p < parts_.count; ++p) row.parts[p] = scratch_.data() + layout_.part_offset[p];
  } else {
    for (int p = 0; p < parts_.count; ++p) row.parts[p] = caller_row(p, token);
  }
  row.ids = plan_.route_expert + token * shared_.config.top_k;
  row.weights = call_.weights + token * shared_.config.top_k;
  return row;
}

void Dispatch::count_load() {
  for (int rank = 0; rank < shared_.ranks(); ++rank) {
    const std::int32_t* counts = plan_.counts + std::int64_t{rank} * shared_.config.experts;
    for (std::size_t e = 0; e < lane_.expert_load.size(); ++e) lane_.expert_load[e] += counts[e];
  }
  ++lane_.dispatches;
}

}  // namespace ferry::cpu
