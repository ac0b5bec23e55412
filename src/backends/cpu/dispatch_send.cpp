// The send phase of dispatch: plans from this rank's ids, writes a message for each (token, rank) into the
// receiver's staging, posts the call, and writes the rows of shared experts.
#include <algorithm>
#include <cstring>

#include "backends/cpu/dispatch.hpp"
#include "exchange/compared_options.hpp"
#include "group/fault_points.hpp"

namespace ferry::cpu {

void Dispatch::send(const DispatchCall& call, bool split) {
  call_ = call;
  split_ = split;
  by_plan_ = !call.plan.empty();
  input_scales_.assign(call.input_scales.begin(), call.input_scales.end());
  const bool by_expert = !input_scales_.empty();
  const int hidden = context_.config.hidden;
  parts_ = by_expert ? parts_by_expert(call.format, hidden) : parts_of(call.format, hidden);
  message_parts_ = by_expert ? value_parts(call.tokens.type, hidden) : parts_;
  encoding_ = encoding_of(call.format);
  layout_ = message_layout(message_parts_, context_.config.top_k);
  ComparedOptions options = options_of(context_.config, call);
  add_plan(call.plan, &options);
  const std::uint64_t number = lane_.link->begin(Operation::dispatch, options);
  fault_point(FaultPoint::dispatch_begin, context_.me());
  start_plan(number);
  if (keeps_all_own_tokens()) list_own_tokens();

  const std::int64_t ranks_per_token = plan_.header->shape.most_ranks();
  const std::int64_t max_messages = max_messages_to_peer();
  chunks_.start(context_.messages_per_chunk, split, context_.ranks());
  // The receiver reads a chunk while it is still in a cache, so chunks are written through the cache.
  staging_store_ = split || lane_.link->packs()
                       ? store_for(call.tokens.count * ranks_per_token * layout_.bytes)
                       : Store::cached;
  for (int peer = 0; peer < context_.ranks(); ++peer) write_summary(peer, max_messages);
  reserve_messages();
  stage_chunk(0, chunks_.first_end());
  fault_point(FaultPoint::dispatch_rows_sent, context_.me());
  lane_.link->post(split);
  prepare_parts();
  write_shared_rows();
  fault_point(FaultPoint::dispatch_posted, context_.me());
}

void Dispatch::start_plan(std::uint64_t number) {
  if (by_plan_) {
    plan_ = view_plan(call_.plan.storage(), context_.plan_shape);
    header_ = *plan_.header;
    plan_.header = &header_;
    return;
  }
  void* storage = call_.memory.plan != nullptr ? call_.memory.plan : lane_.array<void>(lane_.arrays.plan);
  plan_ = view_plan(storage, context_.plan_shape);
  *plan_.header = {.magic = 0,
                   .config_hash = context_.row_order_hash,
                   .placement_version = context_.config.placement.version(),
                   .call = number,
                   .shape = context_.plan_shape,
                   .rank = context_.me(),
                   .tokens = static_cast<std::int32_t>(call_.tokens.count),
                   .total = 0,
                   .dropped = 0,
                   .check = 0};
  plan_sends(context_.config, context_.me(), call_.ids, plan_.header->tokens, plan_,
             lane_.diagnostics.bad_id);
}

std::int64_t Dispatch::max_messages_to_peer() {
  int max_messages = 0;
  for (int peer = 0; peer < context_.ranks(); ++peer) {
    if (peer != context_.me())
      max_messages = std::max(max_messages, lane_.message_count(plan_, context_.me(), peer));
  }
  return max_messages;
}

void Dispatch::write_summary(int peer, std::int64_t max_messages) const {
  std::byte* out = lane_.link->summary_to(peer);
  *reinterpret_cast<SummaryHead*>(out) = {
      .arguments = {},
      .split = split_,
      .max_rows = static_cast<std::int32_t>(max_messages),
      .rows_end = call_.row_limit(row_capacity(context_.config, context_.me())),
      .tokens = plan_.header->tokens};
  if (by_plan_) return;
  const int experts = context_.config.experts, ranks = context_.ranks(), me = context_.me();
  auto* counts = reinterpret_cast<std::int32_t*>(out + sizeof(SummaryHead));
  std::memcpy(counts, plan_.counts + std::int64_t{me} * experts, 4 * static_cast<std::size_t>(experts));
  std::memcpy(counts + experts, plan_.tokens_between + std::int64_t{me} * ranks,
              4 * static_cast<std::size_t>(ranks));
}

void Dispatch::reserve_messages() {
  if (!lane_.link->packs()) return;
  if (lane_.link->has_relays()) list_tokens_for_nodes();
  relay_.start(layout_);
  bytes_to_.resize(static_cast<std::size_t>(context_.ranks()));
  for (int peer = 0; peer < context_.ranks(); ++peer) {
    const bool staged = peer != context_.me() || split_;
    const auto messages = staged ? static_cast<std::int64_t>(tokens_to_send(peer).size()) : 0;
    bytes_to_[static_cast<std::size_t>(peer)] = messages * layout_.bytes;
  }
  lane_.link->reserve({.direction = Direction::to_experts,
                       .message_bytes = layout_.bytes,
                       .bytes = bytes_to_,
                       .forwarder = &relay_});
}

void Dispatch::list_tokens_for_nodes() {
  const Topology& topology = context_.rank.topology();
  const int most_ranks = plan_.header->shape.most_ranks();
  tokens_to_node_.resize(static_cast<std::size_t>(topology.nodes()));
  for (std::vector<std::int32_t>& tokens : tokens_to_node_) tokens.clear();
  for (std::int32_t token = 0; token < plan_.header->tokens; ++token) {
    for (int i = 0; i < most_ranks; ++i) {
      const std::int64_t entry = std::int64_t{token} * most_ranks + i;
      const std::int32_t rank = plan_.token_ranks[entry];
      if (rank == -1) break;
      if (!lane_.valid_entry(rank, context_.ranks(), entry)) continue;
      std::vector<std::int32_t>& tokens = tokens_to_node_[static_cast<std::size_t>(topology.node_of(rank))];
      if (tokens.empty() || tokens.back() != token) tokens.push_back(token);
    }
  }
}

// The tokens of the messages to a rank. With relays, a rank of another node gets messages only if it is the
// relay there: those of its whole node.
std::span<const std::int32_t> Dispatch::tokens_to_send(int destination) {
  const Topology& topology = context_.rank.topology();
  const int me = context_.me(), node = topology.node_of(destination);
  if (lane_.link->has_relays() && context_.other_node(destination)) {
    if (topology.relay_of(me, node) != destination) return {};
    return tokens_to_node_[static_cast<std::size_t>(node)];
  }
  if (destination == me && keeps_all_own_tokens()) return own_tokens_;
  return {plan_.sent_tokens + std::int64_t{destination} * context_.config.max_tokens,
          static_cast<std::size_t>(lane_.message_count(plan_, me, destination))};
}

// Stages messages [begin, end) to every rank.
void Dispatch::stage_chunk(std::int64_t begin, std::int64_t end) {
  for (int step = 1; step <= context_.ranks(); ++step) {
    const int destination = (context_.me() + step) % context_.ranks();
    if (destination != context_.me() || split_) stage_messages(destination, begin, end);
  }
  stream_fence();
}

void Dispatch::stage_messages(int destination, std::int64_t begin, std::int64_t end) {
  const std::span<const std::int32_t> tokens = tokens_to_send(destination);
  const int top_k = context_.config.top_k;
  end = std::min(end, static_cast<std::int64_t>(tokens.size()));
  std::byte* const messages = lane_.link->outgoing(Staging::dispatch, destination);
  for (std::int64_t i = begin; i < end; ++i) {
    std::byte* message = messages + chunks_.staging_index(i) * layout_.bytes;
    const std::int32_t token = tokens[static_cast<std::size_t>(i)];
    // An invalid entry of a damaged plan: sends a message with token -1, which the receiver skips.
    const std::int64_t entry = std::int64_t{destination} * context_.config.max_tokens + i;
    const bool valid = lane_.valid_entry(token, call_.tokens.count, entry);
    const MessageHead head =
        valid ? MessageHead{token, rank_position(token, destination)} : MessageHead{-1, -1};
    std::memcpy(message + layout_.head_offset, &head, sizeof head);
    if (!valid) continue;
    encode(token, message);
    const auto slot_bytes = static_cast<std::size_t>(4 * top_k);
    std::memcpy(message + layout_.ids_offset, plan_.route_expert + std::int64_t{token} * top_k, slot_bytes);
    if (call_.weights != nullptr) {
      std::memcpy(message + layout_.weights_offset, call_.weights + std::int64_t{token} * top_k, slot_bytes);
    }
  }
  // A link that packs counts what it sends.
  if (destination == context_.me() || begin >= end || lane_.link->packs()) return;
  lane_.counts.count_dispatch({.messages = end - begin, .bytes = (end - begin) * layout_.bytes},
                              context_.other_node(destination));
}

const std::byte* Dispatch::caller_part(int part, std::int64_t token) const {
  const auto p = static_cast<std::size_t>(part);
  const bool quantised = encoding_.quantises();
  const std::int64_t row_bytes =
      quantised ? context_.config.hidden * bytes_of(call_.tokens.type) : parts_.part[part].row_bytes;
  return row_at(call_.tokens.parts[p], call_.tokens.strides[p], row_bytes, token);
}

void Dispatch::encode(std::int64_t token, std::byte* message) const {
  if (encoding_.quantises() && input_scales_.empty()) {
    const EncodedRow to{message + layout_.part_offset[0], message + layout_.part_offset[1],
                        message + layout_.part_offset[2]};
    const float global_scale = call_.global_scale != nullptr ? *call_.global_scale : 1.0f;
    if (!context_.kernels.encode_row(to, caller_part(0, token), call_.tokens.type, context_.config.hidden,
                                     encoding_, global_scale))
      lane_.diagnostics.record({.rank = context_.me(), .expert = -1, .scale = global_scale});
    return;
  }
  for (int p = 0; p < message_parts_.count; ++p) {
    context_.kernels.copy(message + layout_.part_offset[p], caller_part(p, token),
                          message_parts_.part[p].row_bytes, staging_store_);
  }
}

// Index of `rank` in the token's ascending list of destination ranks.
int Dispatch::rank_position(std::int64_t token, int rank) const {
  const int max_ranks = plan_.header->shape.most_ranks();
  const std::int32_t* ranks = plan_.token_ranks + token * max_ranks;
  for (int i = 0; i < max_ranks; ++i) {
    if (ranks[i] == rank) return i;
  }
  return -1;  // the plan is damaged; the receiver counts the bad entry
}

}  // namespace ferry::cpu
