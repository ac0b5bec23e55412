// The send half of combine: this rank's rows, or their sums, go to the home ranks' staging.
#include <cstring>

#include "backends/cpu/combine.hpp"
#include "exchange/call_options.hpp"
#include "group/fault_points.hpp"

namespace ferry::cpu {

void Combine::send(const CombineCall& call, bool split) {
  call_ = call;
  split_ = split;
  partial_ = call.reduction == Reduction::partial;
  rows_ = {};
  values_ = {};
  weights_ = {};
  layout_ = combine_row_layout(shared_.config.combine_type, shared_.config.hidden, shared_.config.top_k);
  plan_ = view_plan(call.plan.storage(), shared_.plan_shape);
  scratch_.resize(static_cast<std::size_t>(shared_.config.top_k * layout_.bytes));
  carries_rows_ = call.outputs.data != nullptr || plan_.header->total == 0;

  CallOptions options = options_of(call);
  add_plan(call.plan, &options);
  lane_.channel.begin(Operation::combine, options);
  fault_point(FaultPoint::combine_begin, shared_.me());
  rows_of_token_ = partial_ ? plan_.header->shape.most_ranks() : shared_.config.top_k;
  row_store_ = store_for(plan_.header->total * layout_.bytes);
  chunks_.start(shared_.chunk_tokens, split, shared_.ranks());
  // Chunks are read again while they are in a cache.
  staging_store_ = split ? row_store_ : Store::cached;
  next_.assign(static_cast<std::size_t>(shared_.ranks()), 0);
  for (int peer = 0; peer < shared_.ranks(); ++peer) write_note(peer);
  stage_chunk(0, chunks_.first_end());
  fault_point(FaultPoint::combine_rows_sent, shared_.me());
  for (int step = 1; step <= shared_.ranks(); ++step)
    lane_.channel.post((shared_.me() + step) % shared_.ranks());
  fault_point(FaultPoint::combine_posted, shared_.me());
}

void Combine::write_note(int peer) const {
  // Outputs and row values belong to rows, result and route values to tokens: a rank may have neither.
  const bool rows = plan_.header->total > 0, tokens = plan_.header->tokens > 0;
  auto* words = reinterpret_cast<std::int32_t*>(lane_.channel.note_to(peer));
  words[0] =
      Presence::word(rows ? call_.outputs.data != nullptr : call_.result.data != nullptr, rows || tokens);
  words[2] = Presence::word(call_.row_weights != nullptr, rows);
  words[1] =
      Presence::word(rows ? call_.row_values != nullptr : call_.route_values != nullptr, rows || tokens);
  words[3] = split_;
  words[4] = plan_.header->tokens;
}

// For tokens [begin, end) of each home.
void Combine::stage_chunk(std::int64_t begin, std::int64_t end) {
  for (int step = 1; step <= shared_.ranks(); ++step) {
    const int home = (shared_.me() + step) % shared_.ranks();
    if (home != shared_.me() || split_) stage_tokens(home, begin, end);
  }
  stream_fence();
}

// Messages of a home come in the order of its tokens.
void Combine::stage_tokens(int home, std::int64_t begin, std::int64_t end) {
  const std::int64_t count = lane_.messages_between(plan_, home, shared_.me());
  std::int64_t& next = next_[static_cast<std::size_t>(home)];
  for (; next < count; ++next) {
    const std::int64_t message = std::int64_t{home} * shared_.config.max_tokens + next;
    const std::int32_t token = plan_.came_token[message];
    if (token >= end && token < shared_.config.max_tokens) return;
    // One of a damaged plan may name a token that home has done with.
    if (!lane_.usable(token, shared_.config.max_tokens, message)) continue;
    if (token < begin) {
      lane_.record_bad_source(message);
    } else if (partial_) {
      stage_sum(home, message, token, next + 1 < count);
    } else {
      stage_rows(home, message, token);
    }
  }
}

void Combine::stage_sum(int home, std::int64_t message, std::int32_t token, bool another) {
  const int top_k = shared_.config.top_k;
  const std::int32_t position = plan_.came_position[message];
  if (!lane_.usable(position, rows_of_token_, message)) return;
  std::byte* row = staged(home, token, position);
  const std::int32_t* rows = plan_.came_rows + message * top_k;
  // The next message's rows lie with other experts: nothing but the plan foretells where.
  const std::int32_t* next_rows = another ? rows + top_k : nullptr;
  if (carries_rows_) sum_on_rank(row, rows, message * top_k, staging_store_, next_rows);
  if (call_.row_values != nullptr) write_sum_tail(row, rows);
  if (home == shared_.me()) return;
  ++lane_.wire.combine_messages;
  lane_.wire.combine_bytes +=
      (carries_rows_ ? layout_.tail_offset : 0) + (call_.row_values != nullptr ? 4 * top_k : 0);
}

void Combine::write_sum_tail(std::byte* row, const std::int32_t* rows) const {
  float values[kMaxTopK];
  for (int slot = 0; slot < shared_.config.top_k; ++slot) {
    const bool here = rows[slot] >= 0 && rows[slot] < plan_.header->total;
    values[slot] = here ? call_.row_values[rows[slot]] : 0.0f;
  }
  std::memcpy(row + layout_.tail_offset, values, 4 * static_cast<std::size_t>(shared_.config.top_k));
}

void Combine::stage_rows(int home, std::int64_t message, std::int32_t token) {
  const Config& config = shared_.config;
  for (int slot = 0; slot < config.top_k; ++slot) {
    const std::int32_t row = plan_.came_rows[message * config.top_k + slot];
    if (row == -1 || !lane_.usable(row, plan_.header->total, message * config.top_k + slot)) continue;
    std::byte* to = staged(home, token, slot);
    if (carries_rows_) {
      shared_.kernels.convert_row(to, config.combine_type, output_row(row), call_.outputs.type, config.hidden,
                                  staging_store_);
    }
    const RouteTail tail{.weight = call_.row_weights != nullptr ? call_.row_weights[row] : 1.0f,
                         .value = call_.row_values != nullptr ? call_.row_values[row] : 0.0f};
    std::memcpy(to + layout_.tail_offset, &tail, sizeof tail);
    if (home == shared_.me()) continue;
    ++lane_.wire.combine_messages;
    lane_.wire.combine_bytes +=
        (carries_rows_ ? layout_.tail_offset : 0) + static_cast<std::int64_t>(sizeof(RouteTail));
  }
}

}  // namespace ferry::cpu
