// The receive phase of dispatch: waits for every rank's counts, computes the row positions from them, and
// copies the messages to their rows.
#include <algorithm>
#include <cstring>

#include "backends/cpu/dispatch.hpp"
#include "group/fault_points.hpp"

namespace ferry::cpu {

DispatchResult Dispatch::receive() {
  const int ranks = context_.ranks(), me = context_.me();
  lane_.link->wait();
  fault_point(FaultPoint::dispatch_waited, me);
  row_limits_.clear();
  for (int peer = 0; peer < ranks; ++peer) read_summary(peer);
  if (lane_.link->packs()) {
    lane_.counts.count_dispatch(lane_.link->sent_within_node(), false);
    lane_.counts.count_dispatch(lane_.link->sent_between_nodes(), true);
    add_relay_diagnostics();
  }

  finish_plan();
  prepare_result();
  write_groups();
  receive_chunks();
  if (!by_plan_) {
    const auto counts =
        static_cast<std::size_t>(context_.ranks()) * static_cast<std::size_t>(context_.config.experts);
    lane_.counts.count_routes(call_.layer, {plan_.counts, counts});
  }
  lane_.totals.total = plan_.header->total;
  lane_.totals.call = lane_.link->call();
  fault_point(FaultPoint::dispatch_done, me);
  return result_;
}

void Dispatch::read_summary(int peer) {
  const std::byte* in = lane_.link->summary_from(peer);
  const auto& summary = *reinterpret_cast<const SummaryHead*>(in);
  const std::int64_t tokens = context_.config.max_tokens;
  chunks_.add_rank(peer, summary.split != 0, lane_.valid_count(summary.max_rows, tokens, peer));
  if (by_plan_) return;
  row_limits_.push_back(summary.rows_end);
  const std::int64_t experts = context_.config.experts, ranks = context_.ranks();
  if (context_.config.shared_experts > 0)
    plan_.rank_tokens[peer] = lane_.valid_count(summary.tokens, tokens, peer);
  const auto* counts = reinterpret_cast<const std::int32_t*>(in + sizeof(SummaryHead));
  for (std::int64_t i = peer * experts; i < (peer + 1) * experts; ++i)
    plan_.counts[i] = lane_.valid_count(*counts++, tokens * context_.config.top_k, i);
  for (std::int64_t i = peer * ranks; i < (peer + 1) * ranks; ++i)
    plan_.tokens_between[i] = lane_.valid_count(*counts++, tokens, i);
}

void Dispatch::finish_plan() {
  if (by_plan_) {
    copy_valid_counts();
    row_offsets_.compute(context_.config, plan_);
    return;
  }
  row_offsets_.compute(context_.config, plan_);
  plan_rows(context_.config, context_.me(), row_offsets_, plan_);
  PlanHeader& header = *plan_.header;
  header.total = row_offsets_.total(context_.me());
  header.dropped = row_offsets_.dropped();
  header.magic = header.total > stored_rows_ ? kFewerRowsMagic : kPlanMagic;
  header.check = header_check(header);
  if (const Overflow found = row_offsets_.overflow(row_limits_); found.dropped > 0)
    lane_.diagnostics.overflow = found;
}

// Row positions follow from the counts, and a damaged count outside [0, T*K] would move rows out of the
// buffers. Works on a copy, so the caller's plan does not change.
void Dispatch::copy_valid_counts() {
  const std::int64_t most = std::int64_t{context_.config.max_tokens} * context_.config.top_k;
  const std::int64_t ranks = context_.ranks(), counts = ranks * context_.config.experts;
  valid_counts_.resize(static_cast<std::size_t>(counts + ranks * ranks + ranks));
  std::int32_t* tokens = valid_counts_.data() + counts;
  for (std::int64_t i = 0; i < counts; ++i)
    valid_counts_[static_cast<std::size_t>(i)] = lane_.valid_count(plan_.counts[i], most, i);
  for (int source = 0; source < ranks; ++source) {
    for (int destination = 0; destination < ranks; ++destination) {
      tokens[source * ranks + destination] = lane_.message_count(plan_, source, destination);
    }
  }
  // The rows of this rank's shared experts have already been written for the header's number of tokens.
  std::int32_t* const rank_tokens = tokens + ranks * ranks;
  for (int rank = 0; rank < ranks && context_.config.shared_experts > 0; ++rank) {
    rank_tokens[rank] = lane_.valid_count(
        plan_.rank_tokens[rank], rank == context_.me() ? header_.tokens : context_.config.max_tokens, rank);
  }
  plan_.counts = valid_counts_.data();
  plan_.tokens_between = tokens;
  plan_.rank_tokens = rank_tokens;
}

void Dispatch::receive_chunks() {
  const int me = context_.me();
  RowAssigner assigner(context_.config, me, row_offsets_, plan_);
  auto receive = [&](std::int64_t chunk) {
    for (int source = 0; source < context_.ranks(); ++source)
      receive_messages(source, chunks_.begin(chunk), chunks_.end(chunk), assigner);
  };
  auto send = [&](std::int64_t chunk) {
    stage_chunk(chunks_.begin(chunk), chunks_.end(chunk));
    fault_point(FaultPoint::dispatch_chunk_sent, me);
  };
  chunks_.run(*lane_.link, me, receive, send);
}

// By a damaged plan a source may send fewer messages than this rank's plan says: only those are read.
std::int64_t Dispatch::messages_from(int source) {
  const bool all = source == context_.me() && keeps_all_own_tokens();
  const std::int64_t planned =
      all ? static_cast<std::int64_t>(own_tokens_.size()) : lane_.message_count(plan_, source, context_.me());
  if (!lane_.link->packs() || (source == context_.me() && !split_)) return planned;
  const std::int64_t sent = lane_.link->incoming_bytes(source) / layout_.bytes;
  if (sent < planned) lane_.record_bad_source(std::int64_t{source} * context_.config.max_tokens + sent);
  return std::min(planned, sent);
}

void Dispatch::receive_messages(int source, std::int64_t begin, std::int64_t end, RowAssigner& assigner) {
  const int me = context_.me(), top_k = context_.config.top_k;
  end = std::min(end, messages_from(source));
  // A fused call reads this rank's own tokens from the caller's memory.
  const bool staged = source != me || split_;
  const bool relayed = lane_.link->has_relays() && context_.other_node(source);
  const std::byte* const messages = lane_.link->incoming(Staging::dispatch, source);
  const std::int64_t routed = lane_.message_count(plan_, source, me);
  const std::span<const std::int32_t> own_tokens = tokens_to_send(me);
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t message = std::int64_t{source} * context_.config.max_tokens + i;
    MessageHead head{staged ? -1 : own_tokens[static_cast<std::size_t>(i)], 0};
    TokenData token;
    if (staged) {
      const std::byte* in = messages + chunks_.staging_index(i) * layout_.bytes;
      std::memcpy(&head, in + layout_.head_offset, sizeof head);
      token = staged_token(in);
    }
    if (staged && head.token == -1) continue;  // the sender's plan is damaged, and the sender reports it
    const std::int64_t tokens = staged ? context_.config.max_tokens : call_.tokens.count;
    if (!lane_.valid_entry(head.token, tokens, message)) continue;
    // A relay forwards messages unchanged, and the source rank has written the position of the relay.
    if (relayed && !by_plan_) head.position = position_of_rank(context_.config, token.ids, me);
    if (!staged) {
      head.position = rank_position(head.token, me);
      token = caller_token(head.token);
    }
    const std::int32_t* rows = nullptr;  // of a token that has shared experts only
    if (i < routed) {
      rows = by_plan_ ? plan_.received_rows_of_message + message * top_k
                      : assigner.assign(source, i, head.token, head.position, token.ids);
    }
    if (stored_rows_ < result_.capacity) {
      drop_rows(plan_.received_rows_of_message + message * top_k);
      // A fused combine reads this rank's own rows where its plan says that they are.
      if (source == me) drop_own_rows(head.token);
    }
    if (context_.config.layout == Layout::rank_major) {
      write_rank_major_row(token, rows);
    } else if (context_.config.layout == Layout::expert_indexed) {
      write_indexed_row(source, i, head.token, token, rows);
    } else {
      write_expert_rows(token, rows);
    }
  }
}

void Dispatch::add_relay_diagnostics() {
  for (const std::int64_t message : relay_.bad_messages()) lane_.record_bad_source(message);
}

// Drops the rows of a message, [K], that the caller's memory has no room for.
void Dispatch::drop_rows(std::int32_t* rows) const {
  for (int slot = 0; slot < context_.config.top_k; ++slot) {
    if (rows[slot] >= stored_rows_) rows[slot] = -1;
  }
}

void Dispatch::drop_own_rows(std::int32_t token) const {
  for (int slot = 0; slot < context_.config.top_k; ++slot) {
    const std::int64_t route = std::int64_t{token} * context_.config.top_k + slot;
    if (plan_.route_rank[route] == context_.me() && plan_.route_row[route] >= stored_rows_)
      plan_.route_row[route] = -1;
  }
}

Dispatch::TokenData Dispatch::staged_token(const std::byte* message) const {
  TokenData data{};
  for (int p = 0; p < message_parts_.count; ++p) data.parts[p] = message + layout_.part_offset[p];
  data.ids = reinterpret_cast<const std::int32_t*>(message + layout_.ids_offset);
  data.weights = reinterpret_cast<const float*>(message + layout_.weights_offset);
  return data;
}

Dispatch::TokenData Dispatch::caller_token(std::int64_t token) {
  TokenData data{};
  if (encoding_.quantises() && input_scales_.empty()) {
    scratch_.resize(static_cast<std::size_t>(layout_.bytes));
    encode(token, scratch_.data());
    for (int p = 0; p < parts_.count; ++p) data.parts[p] = scratch_.data() + layout_.part_offset[p];
  } else {
    for (int p = 0; p < message_parts_.count; ++p) data.parts[p] = caller_part(p, token);
  }
  data.ids = plan_.route_expert + token * context_.config.top_k;
  data.weights = call_.weights + token * context_.config.top_k;
  return data;
}

}  // namespace ferry::cpu
