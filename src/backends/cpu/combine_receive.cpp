// The receive phase of combine: the source rank adds a token's rows or sums in the order of the contract.
#include <algorithm>
#include <cstring>

#include "backends/cpu/combine.hpp"
#include "backends/cpu/relay.hpp"
#include "group/fault_points.hpp"

namespace ferry::cpu {

void Combine::receive() {
  const int me = context_.me();
  lane_.link->wait();
  fault_point(FaultPoint::combine_waited, me);
  read_summaries();
  if (packs_) {
    lane_.counts.count_combine(lane_.link->sent_within_node(), false);
    lane_.counts.count_combine(lane_.link->sent_between_nodes(), true);
    for (const std::int64_t row : relay_.bad_rows()) lane_.record_bad_source(row);
  }
  start_receiving();
  auto receive = [&](std::int64_t chunk) {
    const std::int64_t end = std::min<std::int64_t>(chunks_.end(chunk), plan_.header->tokens);
    for (std::int64_t token = chunks_.begin(chunk); token < end; ++token) receive_token(token, end);
  };
  auto send = [&](std::int64_t chunk) {
    stage_chunk(chunks_.begin(chunk), chunks_.end(chunk));
    fault_point(FaultPoint::combine_chunk_sent, me);
  };
  chunks_.run(*lane_.link, me, receive, send);
  if (packs_ && !partial_) require_all_read();
  fault_point(FaultPoint::combine_done, me);
}

void Combine::read_summaries() {
  peer_rows_end_.clear();
  for (int peer = 0; peer < context_.ranks(); ++peer) {
    const auto& summary = *reinterpret_cast<const SummaryHead*>(lane_.link->summary_from(peer));
    values_.add_rank(peer, summary.arguments[0]);
    weights_.add_rank(peer, summary.arguments[1]);
    chunks_.add_rank(peer, summary.split != 0,
                     lane_.valid_count(summary.max_rows, context_.config.max_tokens, peer));
    peer_rows_end_.push_back(summary.rows_end);
  }
  values_.require_same("combine", "row_values and route_values");
  weights_.require_same("combine", "row_weights");
}

void Combine::start_receiving() {
  const int ranks = context_.ranks();
  received_.assign(static_cast<std::size_t>(ranks),
                   {.value_bytes = layout_.tail_offset, .tail_bytes = tail_bytes(values_.given_anywhere())});
  for (int source = 0; source < ranks; ++source) {
    PairRows& rows = received_[static_cast<std::size_t>(source)];
    rows.first = const_cast<std::byte*>(lane_.link->incoming(Staging::combine, source));
    const std::int64_t row_bytes = rows.value_bytes + rows.tail_bytes;
    if (packs_ && row_bytes > 0) rows.count = lane_.link->incoming_bytes(source) / row_bytes;
  }
}

// Finds the rows that the ranks of the experts have sent for the token. Packed rows that this rank reads from
// its own outputs have no entry.
void Combine::find_incoming_rows(std::int64_t token) {
  for (std::int64_t i = 0; i < staged_rows_per_token_; ++i) {
    const std::int64_t entry = token * staged_rows_per_token_ + i;
    if (!packs_) {
      std::byte* row = received_[static_cast<std::size_t>(context_.me())].first + shared_offset(token, i);
      incoming_[static_cast<std::size_t>(i)] = {row, row + layout_.tail_offset};
      if (!partial_ && was_left_out(entry)) incoming_[static_cast<std::size_t>(i)] = {};
    } else if (partial_) {
      const std::int32_t source = plan_.token_ranks[entry];
      const bool of_node =
          relays_add_ && source >= 0 && source < context_.ranks() && context_.other_node(source);
      incoming_[static_cast<std::size_t>(i)] =
          of_node ? incoming_node_sum(entry, static_cast<std::int32_t>(token))
                  : incoming_sum(source, static_cast<std::int32_t>(token));
    } else {
      incoming_[static_cast<std::size_t>(i)] = incoming_route(entry);
    }
  }
}

// The sum that rank `source` has sent for the token. Sums are in the order of the messages that this rank
// sent.
StagedRow Combine::incoming_sum(int source, std::int32_t token) {
  if (source < 0 || source >= context_.ranks() || (!split_ && source == context_.me())) return {};
  PairRows& rows = received_[static_cast<std::size_t>(source)];
  const std::int64_t first = std::int64_t{source} * context_.config.max_tokens;
  const std::int32_t* sent = plan_.sent_tokens + first;
  // Only a damaged plan has a message whose token no longer goes there.
  while (rows.next < rows.count && sent[rows.next] < token) ++rows.next;
  if (rows.next < rows.count && sent[rows.next] == token) {
    StagedRow row = rows.row(rows.next);
    if (relays_add_) row.tail += sizeof(SumHead);
    return row;
  }
  lane_.record_bad_source(first + std::min<std::int64_t>(rows.next, context_.config.max_tokens - 1));
  return {};
}

// The sum of another node for the token, for a rank of that node in the token's list of ranks. The node's
// first rank in the list stands for the node; the others have the tail alone, which holds the values of all
// slots.
StagedRow Combine::incoming_node_sum(std::int64_t entry, std::int32_t token) {
  const Topology& topology = context_.rank.topology();
  const int node = topology.node_of(plan_.token_ranks[entry]);
  PairRows& rows = received_[static_cast<std::size_t>(topology.relay_of(context_.me(), node))];
  SumHead head{.token = -1, .slots = 0};
  while (rows.next < rows.count) {
    std::memcpy(&head, rows.row(rows.next).tail, sizeof head);
    if (head.token >= token) break;
    ++rows.next;
  }
  if (rows.next == rows.count || head.token != token) {
    lane_.record_bad_source(entry);  // of a damaged plan: no rank of the node has returned the token
    return {};
  }
  StagedRow row = rows.row(rows.next);
  row.tail += sizeof(SumHead);
  for (std::int64_t other = token * staged_rows_per_token_; other < entry; ++other) {
    const std::int32_t rank = plan_.token_ranks[other];
    if (rank >= 0 && rank < context_.ranks() && topology.node_of(rank) == node) row.values = nullptr;
  }
  return row;
}

// Whether the rank that holds the route's expert has not stored the row (ReceiveBuffers::rows).
bool Combine::was_left_out(std::int64_t route) const {
  const std::int32_t source = plan_.route_rank[route];
  if (source < 0 || source >= context_.ranks()) return false;
  const std::int64_t end = peer_rows_end_[static_cast<std::size_t>(source)];
  return end >= 0 && plan_.route_row[route] >= end;
}

StagedRow Combine::incoming_route(std::int64_t route) {
  const std::int32_t row = plan_.route_row[route], source = plan_.route_rank[route];
  if (row == -1 || source < 0 || source >= context_.ranks() || is_local(route)) return {};
  if (was_left_out(route)) return {};
  PairRows& rows = received_[static_cast<std::size_t>(source)];
  if (rows.next < rows.count) return rows.row(rows.next++);
  lane_.record_bad_source(route);
  return {};
}

// The rows that were sent are those that this rank's plan names, unless a plan is damaged.
void Combine::require_all_read() {
  for (int source = 0; source < context_.ranks(); ++source) {
    const PairRows& rows = received_[static_cast<std::size_t>(source)];
    if (rows.next != rows.count) lane_.record_bad_source(std::int64_t{source} * context_.config.max_tokens);
  }
}

void Combine::receive_token(std::int64_t token, std::int64_t end) {
  find_incoming_rows(token);
  if (partial_) {
    add_partial_sums(token, end);
  } else if (call_.reduction == Reduction::exact) {
    add_rows(token);
  } else {
    copy_rows(token);
  }
  if (call_.route_values != nullptr) write_route_values(token);
}

void* Combine::result_row(std::int64_t row) const {
  return row_at(call_.result.data, call_.result.stride, context_.config.hidden * bytes_of(call_.result.type),
                row);
}

// Null: nothing is added.
const void* Combine::residual_row(std::int64_t token) const {
  const Epilogue& epilogue = call_.epilogue;
  if (epilogue.residual == nullptr) return nullptr;
  return row_at(epilogue.residual, epilogue.stride, context_.config.hidden * bytes_of(call_.result.type),
                token);
}

// Whether the route's row is read directly from this rank's outputs: its expert is on this rank, and the call
// is fused, so that the outputs are still valid.
bool Combine::is_local(std::int64_t route) const {
  return !split_ && plan_.route_rank[route] == context_.me();
}

// The token's local rows, by slot; -1: not local, masked or dropped.
void Combine::local_rows(std::int64_t token, std::int32_t* rows) {
  for (int slot = 0; slot < context_.config.top_k; ++slot) {
    const std::int64_t route = token * context_.config.top_k + slot;
    const std::int32_t row = plan_.route_row[route];
    const bool valid = row != -1 && lane_.valid_entry(plan_.route_rank[route], context_.ranks(), route);
    rows[slot] = valid && is_local(route) ? row : -1;
  }
}

int Combine::local_rows_to_prefetch(std::int64_t token, const void** outputs) const {
  const std::int64_t first = token * context_.config.top_k;
  std::int32_t rows[kMaxTopK];
  for (int slot = 0; slot < context_.config.top_k; ++slot)
    rows[slot] = is_local(first + slot) ? plan_.route_row[first + slot] : -1;
  return rows_to_prefetch(rows, outputs);
}

// partial. `end`: end of the chunk's tokens; the last one prefetches nothing.
void Combine::add_partial_sums(std::int64_t token, std::int64_t end) {
  const int top_k = context_.config.top_k, most_ranks = plan_.header->shape.most_ranks();
  const Topology& topology = context_.rank.topology();
  const bool by_node = context_.config.reduction_level == ReductionLevel::node;
  PartialSums sums;
  int count = 0;
  const auto add = [&](const void* sum, int rank) {
    if (by_node) return sums.add(sum, topology.node_of(rank));
    addends_[static_cast<std::size_t>(count++)] = sum;
  };
  for (int position = 0; position < most_ranks; ++position) {
    const std::int64_t entry = token * most_ranks + position;
    const std::int32_t rank = plan_.token_ranks[entry];
    if (rank == -1) break;
    if (!lane_.valid_entry(rank, context_.ranks(), entry)) continue;
    if (split_ || rank != context_.me()) {
      const StagedRow& row = incoming_[static_cast<std::size_t>(position)];
      if (row.values != nullptr) add(row.values, rank);
      continue;
    }
    std::int32_t rows[kMaxTopK];
    local_rows(token, rows);
    sum_on_rank(scratch_.data(), rows, token * top_k, Store::cached, nullptr);
    add(scratch_.data(), rank);
  }
  // The first scratch row holds this rank's own sum. Nodes with several ranks are at most half of the K
  // ranks.
  if (by_node) {
    add_within_nodes(context_, sums, scratch_.data() + layout_.bytes, layout_.bytes);
    std::copy_n(sums.rows, sums.count, addends_.begin());
    count = sums.count;
  }
  count = add_shared_rows(token, addends_.data(), count);
  const void* next[kMaxTopK];
  const int next_count = token + 1 < end ? local_rows_to_prefetch(token + 1, next) : 0;
  context_.kernels.weighted_sum({.out = result_row(token),
                                 .out_type = call_.result.type,
                                 .rows = addends_.data(),
                                 .row_type = context_.config.combine_type,
                                 .combine_type = context_.config.combine_type,
                                 .count = count,
                                 .columns = context_.config.hidden,
                                 .store = row_store_,
                                 .epilogue = !call_.epilogue.empty(),
                                 .residual = residual_row(token),
                                 .scale = call_.epilogue.scale,
                                 .next = next,
                                 .next_count = next_count});
}

const RouteTail& Combine::incoming_tail(std::int64_t route) const {
  return *reinterpret_cast<const RouteTail*>(incoming_[route % context_.config.top_k].tail);
}

// A route's row in the combine type; null if the route is masked, dropped or damaged. `slot` is the route's,
// and selects the scratch row for a conversion.
const void* Combine::row_of_route(std::int64_t route, int slot) {
  const std::int32_t row = plan_.route_row[route];
  if (row == -1 || !lane_.valid_entry(plan_.route_rank[route], context_.ranks(), route)) return nullptr;
  if (!is_local(route)) return incoming_[slot].values;
  if (!lane_.valid_entry(row, plan_.header->total, route)) return nullptr;
  if (call_.outputs.type == context_.config.combine_type) return output_row(row);
  std::byte* scratch = scratch_.data() + slot * layout_.bytes;
  context_.kernels.convert_row(scratch, context_.config.combine_type, output_row(row), call_.outputs.type,
                               context_.config.hidden, Store::cached);
  return scratch;
}

float Combine::weight_of_route(std::int64_t route) const {
  if (call_.topk_weights != nullptr) return call_.topk_weights[route];
  if (!is_local(route)) return incoming_tail(route).weight;
  return call_.row_weights != nullptr ? call_.row_weights[plan_.route_row[route]] : 1.0f;
}

void Combine::add_rows(std::int64_t token) {
  const int top_k = context_.config.top_k;
  const void* rows[kMaxRows];
  float weights[kMaxRows];
  int count = 0;
  for (int slot = 0; slot < top_k; ++slot) {
    const std::int64_t route = token * top_k + slot;
    const void* row = row_of_route(route, slot);
    if (row == nullptr) continue;
    rows[count] = row;
    weights[count++] = weight_of_route(route);
  }
  const int routed = count;
  count = add_shared_rows(token, rows, count);
  std::fill(weights + routed, weights + count, 1.0f);
  context_.kernels.weighted_sum({.out = result_row(token),
                                 .out_type = call_.result.type,
                                 .rows = rows,
                                 .row_type = context_.config.combine_type,
                                 .combine_type = context_.config.combine_type,
                                 .weights = weights,
                                 .count = count,
                                 .columns = context_.config.hidden,
                                 .store = row_store_,
                                 .epilogue = !call_.epilogue.empty(),
                                 .residual = residual_row(token),
                                 .scale = call_.epilogue.scale});
}

void Combine::copy_rows(std::int64_t token) {
  const int top_k = context_.config.top_k;
  for (int slot = 0; slot < top_k; ++slot) {
    const std::int64_t route = token * top_k + slot;
    const void* row = row_of_route(route, slot);
    if (row == nullptr) {
      context_.kernels.zero(result_row(route), context_.config.hidden * bytes_of(call_.result.type));
    } else {
      context_.kernels.convert_row(result_row(route), call_.result.type, row, context_.config.combine_type,
                                   context_.config.hidden, row_store_);
    }
  }
}

void Combine::write_route_values(std::int64_t token) {
  const int top_k = context_.config.top_k, most_ranks = plan_.header->shape.most_ranks();
  for (int slot = 0; slot < top_k; ++slot) {
    const std::int64_t route = token * top_k + slot;
    std::int32_t row = plan_.route_row[route];
    if (row != -1 && !lane_.valid_entry(plan_.route_rank[route], context_.ranks(), route)) row = -1;
    float value = 0;
    if (row != -1 && is_local(route)) {
      if (lane_.valid_entry(row, plan_.header->total, route)) value = call_.row_values[row];
    } else if (row != -1 && !partial_) {
      if (incoming_[slot].tail != nullptr) value = incoming_tail(route).value;
    } else if (row != -1) {
      const std::int32_t* ranks = plan_.token_ranks + token * most_ranks;
      const std::int32_t* entry = std::find(ranks, ranks + most_ranks, plan_.route_rank[route]);
      if (entry == ranks + most_ranks) {
        lane_.record_bad_source(route);
      } else if (const std::byte* tail = incoming_[entry - ranks].tail; tail != nullptr) {
        std::memcpy(&value, tail + std::int64_t{4} * slot, sizeof value);
      }
    }
    call_.route_values[route] = value;
  }
}

}  // namespace ferry::cpu
