// The receive half of combine: at home, a token's rows or sums are added in order.
#include <algorithm>
#include <cstring>

#include "backends/cpu/combine.hpp"
#include "group/fault_points.hpp"

namespace ferry::cpu {

void Combine::receive() {
  const int ranks = shared_.ranks(), me = shared_.me();
  for (int step = 0; step < ranks; ++step) lane_.channel.wait((me + step) % ranks);
  fault_point(FaultPoint::combine_waited, me);
  for (int peer = 0; peer < ranks; ++peer) {
    const auto* words = reinterpret_cast<const std::int32_t*>(lane_.channel.note_from(peer));
    rows_.note(peer, words[0]);
    values_.note(peer, words[1]);
    weights_.note(peer, words[2]);
    chunks_.note(peer, words[3] != 0, words[4]);
  }
  rows_.check("combine", "outputs and result");
  values_.check("combine", "row_values and route_values");
  weights_.check("combine", "weights of the rows");
  auto receive = [&](std::int64_t chunk) {
    const std::int64_t end = std::min<std::int64_t>(chunks_.end(chunk), plan_.header->tokens);
    for (std::int64_t token = chunks_.begin(chunk); token < end; ++token) receive_token(token, end);
  };
  auto send = [&](std::int64_t chunk) {
    stage_chunk(chunks_.begin(chunk), chunks_.end(chunk));
    fault_point(FaultPoint::combine_chunk_sent, me);
  };
  chunks_.play(lane_.channel, me, receive, send);
  fault_point(FaultPoint::combine_done, me);
}

void Combine::receive_token(std::int64_t token, std::int64_t end) {
  if (call_.result.data != nullptr) {
    if (partial_) {
      reduce_sums(token, end);
    } else if (call_.reduction == Reduction::exact) {
      reduce_rows(token);
    } else {
      copy_rows(token);
    }
  }
  if (call_.route_values != nullptr) bring_values(token);
}

void* Combine::result_row(std::int64_t row) const {
  const std::int64_t dense = shared_.config.hidden * bytes_of(call_.result.type);
  const std::int64_t stride = call_.result.stride != 0 ? call_.result.stride : dense;
  return static_cast<std::byte*>(call_.result.data) + row * stride;
}

// Rows of this rank's own tokens on this rank never travel, unless the split form had to keep them.
bool Combine::stays_home(std::int64_t route) const {
  return !split_ && plan_.route_rank[route] == shared_.me();
}

// The token's rows on this rank, by slot.
void Combine::own_rows(std::int64_t token, std::int32_t* rows) {
  for (int slot = 0; slot < shared_.config.top_k; ++slot) {
    const std::int64_t route = token * shared_.config.top_k + slot;
    const std::int32_t row = plan_.route_row[route];
    const bool kept = row != -1 && lane_.usable(plan_.route_rank[route], shared_.ranks(), route);
    rows[slot] = kept && stays_home(route) ? row : -1;
  }
}

int Combine::own_rows_to_fetch(std::int64_t token, const void** outputs) const {
  const std::int64_t first = token * shared_.config.top_k;
  std::int32_t rows[kMaxTopK];
  for (int slot = 0; slot < shared_.config.top_k; ++slot)
    rows[slot] = stays_home(first + slot) ? plan_.route_row[first + slot] : -1;
  return rows_to_fetch(rows, outputs);
}

// `end`: of the tokens whose turn it is.
void Combine::reduce_sums(std::int64_t token, std::int64_t end) {
  const int top_k = shared_.config.top_k, most_ranks = plan_.header->shape.most_ranks();
  const void* sums[kMaxTopK];
  int count = 0;
  for (int position = 0; position < most_ranks; ++position) {
    const std::int64_t entry = token * most_ranks + position;
    const std::int32_t rank = plan_.token_ranks[entry];
    if (rank == -1) break;
    if (!lane_.usable(rank, shared_.ranks(), entry)) continue;
    if (split_ || rank != shared_.me()) {
      sums[count++] = staged(shared_.me(), token, position);
      continue;
    }
    std::int32_t rows[kMaxTopK];
    own_rows(token, rows);
    sum_on_rank(scratch_.data(), rows, token * top_k, Store::cached, nullptr);
    sums[count++] = scratch_.data();
  }
  const void* next[kMaxTopK];
  const int next_count = token + 1 < end ? own_rows_to_fetch(token + 1, next) : 0;
  shared_.kernels.weighted_sum({.out = result_row(token),
                                .out_type = call_.result.type,
                                .rows = sums,
                                .row_type = shared_.config.combine_type,
                                .wire_type = shared_.config.combine_type,
                                .weights = nullptr,
                                .count = count,
                                .columns = shared_.config.hidden,
                                .store = row_store_,
                                .next = next,
                                .next_count = next_count});
}

const std::byte* Combine::staged_route(std::int64_t route) const {
  return staged(shared_.me(), route / shared_.config.top_k, route % shared_.config.top_k);
}

const RouteTail& Combine::staged_tail(std::int64_t route) const {
  return *reinterpret_cast<const RouteTail*>(staged_route(route) + layout_.tail_offset);
}

// A route's row in the wire type, or null: masked, dropped or damaged. `slot` picks the scratch row.
const void* Combine::row_at_home(std::int64_t route, int slot) {
  const std::int32_t row = plan_.route_row[route];
  if (row == -1 || !lane_.usable(plan_.route_rank[route], shared_.ranks(), route)) return nullptr;
  if (!stays_home(route)) return staged_route(route);
  if (!lane_.usable(row, plan_.header->total, route)) return nullptr;
  if (call_.outputs.type == shared_.config.combine_type) return output_row(row);
  std::byte* scratch = scratch_.data() + slot * layout_.bytes;
  shared_.kernels.convert_row(scratch, shared_.config.combine_type, output_row(row), call_.outputs.type,
                              shared_.config.hidden, Store::cached);
  return scratch;
}

float Combine::weight_at_home(std::int64_t route) const {
  if (call_.topk_weights != nullptr) return call_.topk_weights[route];
  if (!stays_home(route)) return staged_tail(route).weight;
  return call_.row_weights != nullptr ? call_.row_weights[plan_.route_row[route]] : 1.0f;
}

void Combine::reduce_rows(std::int64_t token) {
  const int top_k = shared_.config.top_k;
  const void* rows[kMaxTopK];
  float weights[kMaxTopK];
  int count = 0;
  for (int slot = 0; slot < top_k; ++slot) {
    const std::int64_t route = token * top_k + slot;
    const void* row = row_at_home(route, slot);
    if (row == nullptr) continue;
    rows[count] = row;
    weights[count++] = weight_at_home(route);
  }
  shared_.kernels.weighted_sum({.out = result_row(token),
                                .out_type = call_.result.type,
                                .rows = rows,
                                .row_type = shared_.config.combine_type,
                                .wire_type = shared_.config.combine_type,
                                .weights = weights,
                                .count = count,
                                .columns = shared_.config.hidden,
                                .store = row_store_});
}

void Combine::copy_rows(std::int64_t token) {
  const int top_k = shared_.config.top_k;
  for (int slot = 0; slot < top_k; ++slot) {
    const std::int64_t route = token * top_k + slot;
    const void* row = row_at_home(route, slot);
    if (row == nullptr) {
      shared_.kernels.zero(result_row(route), shared_.config.hidden * bytes_of(call_.result.type));
    } else {
      shared_.kernels.convert_row(result_row(route), call_.result.type, row, shared_.config.combine_type,
                                  shared_.config.hidden, row_store_);
    }
  }
}

void Combine::bring_values(std::int64_t token) {
  const int top_k = shared_.config.top_k, most_ranks = plan_.header->shape.most_ranks();
  for (int slot = 0; slot < top_k; ++slot) {
    const std::int64_t route = token * top_k + slot;
    std::int32_t row = plan_.route_row[route];
    if (row != -1 && !lane_.usable(plan_.route_rank[route], shared_.ranks(), route)) row = -1;
    float value = 0;
    if (row != -1 && stays_home(route)) {
      if (lane_.usable(row, plan_.header->total, route)) value = call_.row_values[row];
    } else if (row != -1 && !partial_) {
      value = staged_tail(route).value;
    } else if (row != -1) {
      const std::int32_t* ranks = plan_.token_ranks + token * most_ranks;
      const std::int32_t* entry = std::find(ranks, ranks + most_ranks, plan_.route_rank[route]);
      if (entry == ranks + most_ranks) {
        lane_.record_bad_source(route);
      } else {
        const std::byte* sum = staged(shared_.me(), token, entry - ranks);
        std::memcpy(&value, sum + layout_.tail_offset + 4 * slot, sizeof value);
      }
    }
    call_.route_values[route] = value;
  }
}

}  // namespace ferry::cpu
