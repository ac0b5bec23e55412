// The receive phase of combine: the source rank adds a token's rows or sums in the order of the contract.
#include <algorithm>
#include <cstring>

#include "backends/cpu/combine.hpp"
#include "group/fault_points.hpp"

namespace ferry::cpu {

void Combine::receive() {
  const int ranks = context_.ranks(), me = context_.me();
  for (int step = 0; step < ranks; ++step) lane_.channel.wait((me + step) % ranks);
  fault_point(FaultPoint::combine_waited, me);
  read_summaries();
  auto receive = [&](std::int64_t chunk) {
    const std::int64_t end = std::min<std::int64_t>(chunks_.end(chunk), plan_.header->tokens);
    for (std::int64_t token = chunks_.begin(chunk); token < end; ++token) receive_token(token, end);
  };
  auto send = [&](std::int64_t chunk) {
    stage_chunk(chunks_.begin(chunk), chunks_.end(chunk));
    fault_point(FaultPoint::combine_chunk_sent, me);
  };
  chunks_.run(lane_.channel, me, receive, send);
  fault_point(FaultPoint::combine_done, me);
}

void Combine::read_summaries() {
  for (int peer = 0; peer < context_.ranks(); ++peer) {
    const auto& summary = *reinterpret_cast<const SummaryHead*>(lane_.channel.summary_from(peer));
    rows_.add_rank(peer, summary.arguments[0]);
    values_.add_rank(peer, summary.arguments[1]);
    weights_.add_rank(peer, summary.arguments[2]);
    chunks_.add_rank(peer, summary.split != 0, summary.max_rows);
  }
  rows_.require_same("combine", "outputs and result");
  values_.require_same("combine", "row_values and route_values");
  weights_.require_same("combine", "row_weights");
}

void Combine::receive_token(std::int64_t token, std::int64_t end) {
  if (call_.result.data != nullptr) {
    if (partial_) {
      add_partial_sums(token, end);
    } else if (call_.reduction == Reduction::exact) {
      add_rows(token);
    } else {
      copy_rows(token);
    }
  }
  if (call_.route_values != nullptr) write_route_values(token);
}

void* Combine::result_row(std::int64_t row) const {
  const std::int64_t dense = context_.config.hidden * bytes_of(call_.result.type);
  const std::int64_t stride = call_.result.stride != 0 ? call_.result.stride : dense;
  return static_cast<std::byte*>(call_.result.data) + row * stride;
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
  const void* sums[kMaxTopK];
  int count = 0;
  for (int position = 0; position < most_ranks; ++position) {
    const std::int64_t entry = token * most_ranks + position;
    const std::int32_t rank = plan_.token_ranks[entry];
    if (rank == -1) break;
    if (!lane_.valid_entry(rank, context_.ranks(), entry)) continue;
    if (split_ || rank != context_.me()) {
      sums[count++] = staged(context_.me(), token, position);
      continue;
    }
    std::int32_t rows[kMaxTopK];
    local_rows(token, rows);
    sum_on_rank(scratch_.data(), rows, token * top_k, Store::cached, nullptr);
    sums[count++] = scratch_.data();
  }
  const void* next[kMaxTopK];
  const int next_count = token + 1 < end ? local_rows_to_prefetch(token + 1, next) : 0;
  context_.kernels.weighted_sum({.out = result_row(token),
                                 .out_type = call_.result.type,
                                 .rows = sums,
                                 .row_type = context_.config.combine_type,
                                 .combine_type = context_.config.combine_type,
                                 .weights = nullptr,
                                 .count = count,
                                 .columns = context_.config.hidden,
                                 .store = row_store_,
                                 .next = next,
                                 .next_count = next_count});
}

const std::byte* Combine::staged_route(std::int64_t route) const {
  return staged(context_.me(), route / context_.config.top_k, route % context_.config.top_k);
}

const RouteTail& Combine::staged_tail(std::int64_t route) const {
  return *reinterpret_cast<const RouteTail*>(staged_route(route) + layout_.tail_offset);
}

// A route's row in the combine type; null if the route is masked, dropped or damaged. `slot` selects the
// scratch row for a conversion.
const void* Combine::row_of_route(std::int64_t route, int slot) {
  const std::int32_t row = plan_.route_row[route];
  if (row == -1 || !lane_.valid_entry(plan_.route_rank[route], context_.ranks(), route)) return nullptr;
  if (!is_local(route)) return staged_route(route);
  if (!lane_.valid_entry(row, plan_.header->total, route)) return nullptr;
  if (call_.outputs.type == context_.config.combine_type) return output_row(row);
  std::byte* scratch = scratch_.data() + slot * layout_.bytes;
  context_.kernels.convert_row(scratch, context_.config.combine_type, output_row(row), call_.outputs.type,
                               context_.config.hidden, Store::cached);
  return scratch;
}

float Combine::weight_of_route(std::int64_t route) const {
  if (call_.topk_weights != nullptr) return call_.topk_weights[route];
  if (!is_local(route)) return staged_tail(route).weight;
  return call_.row_weights != nullptr ? call_.row_weights[plan_.route_row[route]] : 1.0f;
}

void Combine::add_rows(std::int64_t token) {
  const int top_k = context_.config.top_k;
  const void* rows[kMaxTopK];
  float weights[kMaxTopK];
  int count = 0;
  for (int slot = 0; slot < top_k; ++slot) {
    const std::int64_t route = token * top_k + slot;
    const void* row = row_of_route(route, slot);
    if (row == nullptr) continue;
    rows[count] = row;
    weights[count++] = weight_of_route(route);
  }
  context_.kernels.weighted_sum({.out = result_row(token),
                                 .out_type = call_.result.type,
                                 .rows = rows,
                                 .row_type = context_.config.combine_type,
                                 .combine_type = context_.config.combine_type,
                                 .weights = weights,
                                 .count = count,
                                 .columns = context_.config.hidden,
                                 .store = row_store_});
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
      value = staged_tail(route).value;
    } else if (row != -1) {
      const std::int32_t* ranks = plan_.token_ranks + token * most_ranks;
      const std::int32_t* entry = std::find(ranks, ranks + most_ranks, plan_.route_rank[route]);
      if (entry == ranks + most_ranks) {
        lane_.record_bad_source(route);
      } else {
        const std::byte* sum = staged(context_.me(), token, entry - ranks);
        std::memcpy(&value, sum + layout_.tail_offset + 4 * slot, sizeof value);
      }
    }
    call_.route_values[route] = value;
  }
}

}  // namespace ferry::cpu
