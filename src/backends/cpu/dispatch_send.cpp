// The send half of dispatch: plan from this rank's ids, stage a message for each (token, rank), raise the
// flags.
#include <algorithm>
#include <cstring>

#include "backends/cpu/dispatch.hpp"
#include "exchange/call_options.hpp"
#include "group/fault_points.hpp"

namespace ferry::cpu {
void Dispatch::send(const DispatchCall& call, bool split) {
  call_ = call;
  split_ = split;
  replay_ = !call.plan.empty();
  parts_ = parts_of(call.format, shared_.config.hidden);
  layout_ = message_layout(parts_, shared_.config.top_k);
  weights_ = {};
  CallOptions options = options_of(call);
  add_plan(call.plan, &options);
  const std::uint64_t number = lane_.channel.begin(Operation::dispatch, options);
  fault_point(FaultPoint::dispatch_begin, shared_.me());
  start_plan(number);

  const std::int64_t ranks_of_token = plan_.header->shape.most_ranks(), most = most_messages();
  chunks_.start(shared_.chunk_messages, split, shared_.ranks());
  // Chunks are read again while they are in a cache.
  staging_store_ = split ? store_for(call.tokens.count * ranks_of_token * layout_.bytes) : Store::cached;
  for (int peer = 0; peer < shared_.ranks(); ++peer) write_note(peer, most);
  stage_chunk(0, chunks_.first_end());
  fault_point(FaultPoint::dispatch_rows_sent, shared_.me());
  for (int step = 1; step <= shared_.ranks(); ++step)
    lane_.channel.post((shared_.me() + step) % shared_.ranks());
  fault_point(FaultPoint::dispatch_posted, shared_.me());
}

void Dispatch::start_plan(std::uint64_t number) {
  if (replay_) {
    plan_ = view_plan(call_.plan.storage(), shared_.plan_shape);
    return;
  }
  void* storage = call_.memory.plan != nullptr ? call_.memory.plan : lane_.array<void>(lane_.arrays.plan);
  plan_ = view_plan(storage, shared_.plan_shape);
  *plan_.header = {.magic = 0,
                   .config_hash = shared_.row_order_hash,
                   .placement_version = shared_.config.placement.version(),
                   .call = number,
                   .shape = shared_.plan_shape,
                   .rank = shared_.me(),
                   .tokens = static_cast<std::int32_t>(call_.tokens.count),
                   .total = 0,
                   .dropped = 0,
                   .check = 0};
  plan_sends(shared_.config, shared_.me(), call_.ids, plan_.header->tokens, plan_, lane_.findings.bad_id);
}

// To one peer.
std::int64_t Dispatch::most_messages() {
  int most = 0;
  for (int peer = 0; peer < shared_.ranks(); ++peer) {
    if (peer != shared_.me()) most = std::max(most, lane_.messages_between(plan_, shared_.me(), peer));
  }
  return most;
}

void Dispatch::write_note(int peer, std::int64_t most) const {
  auto* words = reinterpret_cast<std::int32_t*>(lane_.channel.note_to(peer));
  words[0] = Presence::word(call_.weights != nullptr, call_.tokens.count > 0);
  words[1] = 0;
  words[3] = split_;
  words[4] = static_cast<std::int32_t>(most);
  if (replay_) return;
  const int experts = shared_.config.experts, ranks = shared_.ranks(), me = shared_.me();
  std::memcpy(words + kNoteWords, plan_.counts + std::int64_t{me} * experts,
              4 * static_cast<std::size_t>(experts));
  std::memcpy(words + kNoteWords + experts, plan_.tokens_between + std::int64_t{me} * ranks,
              4 * static_cast<std::size_t>(ranks));
}

// Messages [begin, end) to each rank.
void Dispatch::stage_chunk(std::int64_t begin, std::int64_t end) {
  for (int step = 1; step <= shared_.ranks(); ++step) {
    const int destination = (shared_.me() + step) % shared_.ranks();
    if (destination != shared_.me() || split_) stage_messages(destination, begin, end);
  }
  stream_fence();
}

void Dispatch::stage_messages(int destination, std::int64_t begin, std::int64_t end) {
  const std::int32_t* tokens = plan_.sent_tokens + std::int64_t{destination} * shared_.config.max_tokens;
  const int top_k = shared_.config.top_k;
  end = std::min<std::int64_t>(end, lane_.messages_between(plan_, shared_.me(), destination));
  for (std::int64_t i = begin; i < end; ++i) {
    std::byte* message = lane_.message(destination, shared_.me(), chunks_.place(i), layout_.bytes);
    const std::int64_t token = tokens[i];
    // A damaged plan: the message stays empty, its token -1.
    const std::int64_t where = std::int64_t{destination} * shared_.config.max_tokens + i;
    const bool usable = lane_.usable(tokens[i], call_.tokens.count, where);
    const MessageHead head =
        usable ? MessageHead{tokens[i], position_of(token, destination)} : MessageHead{-1, -1};
    std::memcpy(message + layout_.head_offset, &head, sizeof head);
    if (!usable) continue;
    encode(token, message);
    const auto row = static_cast<std::size_t>(4 * top_k);
    std::memcpy(message + layout_.ids_offset, plan_.route_expert + token * top_k, row);
    if (call_.weights != nullptr) {
      std::memcpy(message + layout_.weights_offset, call_.weights + token * top_k, row);
    }
  }
  if (destination == shared_.me() || begin >= end) return;
  lane_.wire.dispatch_messages += end - begin;
  lane_.wire.dispatch_bytes += (end - begin) * layout_.bytes;
}

const std::byte* Dispatch::caller_row(int part, std::int64_t token) const {
  const auto p = static_cast<std::size_t>(part);
  const bool quantised = call_.format.kind == FormatKind::fp8_e4m3;
  const std::int64_t row =
      quantised ? shared_.config.hidden * bytes_of(call_.tokens.type) : parts_.part[part].row_bytes;
  const std::int64_t stride = call_.tokens.strides[p] != 0 ? call_.tokens.strides[p] : row;
  return static_cast<const std::byte*>(call_.tokens.parts[p]) + token * stride;
}

void Dispatch::encode(std::int64_t token, std::byte* message) const {
  if (call_.format.kind == FormatKind::fp8_e4m3) {
    shared_.kernels.encode_fp8_row(message + layout_.part_offset[0], message + layout_.part_offset[1],
                                   caller_row(0, token), call_.tokens.type, shared_.config.hidden,
                                   call_.format.fp8);
    return;
  }
  for (int p = 0; p < parts_.count; ++p) {
    shared_.kernels.copy(message + layout_.part_offset[p], caller_row(p, token), parts_.part[p].row_bytes,
                         staging_store_);
  }
}

int Dispatch::position_of(std::int64_t token, int rank) const {
  const int most = plan_.header->shape.most_ranks();
  const std::int32_t* ranks = plan_.token_ranks + token * most;
  for (int i = 0; i < most; ++i) {
    if (ranks[i] == rank) return i;
  }
  return -1;  // only in a damaged plan; the receiver counts it
}

}  // namespace ferry::cpu
