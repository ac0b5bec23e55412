// The send half of combine: this rank's rows, or their sums, go to the home ranks' staging.
#include <cstring>

#include "core/checks.hpp"
#include "core/fault_points.hpp"
#include "cpu/combine.hpp"

namespace ferry::cpu {

void Combine::send(const CombineCall& call, bool split) {
  call_ = call;
  split_ = split;
  partial_ = call.reduction == Reduction::partial;
  rows_ = {};
  values_ = {};
  weights_ = {};
  layout_ = combine_row_layout(shared_.config.wire, shared_.config.hidden, shared_.config.top_k);
  plan_ = view_plan(call.plan.storage(), shared_.plan_shape);
  scratch_.resize(static_cast<std::size_t>(shared_.config.top_k * layout_.bytes));
  carries_rows_ = call.outputs.data != nullptr || plan_.header->total == 0;

  const CallOption options[] = {{"reduction", static_cast<std::int64_t>(call.reduction)},
                                {kPlanOption, made_by(call.plan)},
                                {kHomeWeightsOption, 0}};
  lane_.channel.begin(Operation::combine, options);
  fault_point(FaultPoint::combine_begin, shared_.me());
  store_ = store_for(plan_.header->total * layout_.bytes);
  for (int step = 1; step <= shared_.ranks(); ++step) {
    const int home = (shared_.me() + step) % shared_.ranks();
    write_note(home);
    if (home == shared_.me() && !split_) continue;
    if (partial_) {
      stage_sums(home);
    } else {
      stage_rows(home);
    }
  }
  stream_fence();
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
  words[2] = Presence::word(call_.weights != nullptr, rows);
  words[1] =
      Presence::word(rows ? call_.row_values != nullptr : call_.route_values != nullptr, rows || tokens);
}

void Combine::stage_sums(int home) {
  const Config& config = shared_.config;
  const int count = lane_.messages_between(plan_, home, shared_.me());
  const std::int64_t most_ranks = plan_.header->shape.most_ranks();
  for (int i = 0; i < count; ++i) {
    const std::int64_t message = std::int64_t{home} * config.max_tokens + i;
    const std::int32_t token = plan_.came_token[message], position = plan_.came_position[message];
    if (!lane_.usable(token, config.max_tokens, message) || !lane_.usable(position, most_ranks, message))
      continue;
    std::byte* row = lane_.combine_row(home, token * most_ranks + position);
    const std::int32_t* rows = plan_.came_rows + message * config.top_k;
    if (carries_rows_ && i + 1 < count) prefetch_rows(message + 1);
    if (carries_rows_) sum_on_rank(row, rows, message * config.top_k, store_);
    if (call_.row_values != nullptr) write_sum_tail(row, rows);
  }
  if (home == shared_.me()) return;
  const std::int64_t values = carries_rows_ ? layout_.tail_offset : 0;
  lane_.wire.combine_messages += count;
  lane_.wire.combine_bytes += count * (values + (call_.row_values != nullptr ? 4 * config.top_k : 0));
}

// The rows of one token lie with different experts: nothing but the plan foretells where the next ones are.
void Combine::prefetch_rows(std::int64_t message) const {
  const std::int32_t* rows = plan_.came_rows + message * shared_.config.top_k;
  for (int slot = 0; slot < shared_.config.top_k; ++slot) {
    if (rows[slot] >= 0 && rows[slot] < plan_.header->total) prefetch_head(output_row(rows[slot]));
  }
}

void Combine::write_sum_tail(std::byte* row, const std::int32_t* rows) const {
  float values[kMaxTopK];
  for (int slot = 0; slot < shared_.config.top_k; ++slot) {
    const bool here = rows[slot] >= 0 && rows[slot] < plan_.header->total;
    values[slot] = here ? call_.row_values[rows[slot]] : 0.0f;
  }
  std::memcpy(row + layout_.tail_offset, values, 4 * static_cast<std::size_t>(shared_.config.top_k));
}

void Combine::stage_rows(int home) {
  const Config& config = shared_.config;
  const int count = lane_.messages_between(plan_, home, shared_.me());
  std::int64_t sent = 0;
  for (int i = 0; i < count; ++i) {
    const std::int64_t message = std::int64_t{home} * config.max_tokens + i;
    const std::int32_t token = plan_.came_token[message];
    if (!lane_.usable(token, config.max_tokens, message)) continue;
    for (int slot = 0; slot < config.top_k; ++slot) {
      const std::int32_t row = plan_.came_rows[message * config.top_k + slot];
      if (row == -1 || !lane_.usable(row, plan_.header->total, message * config.top_k + slot)) continue;
      std::byte* to = lane_.combine_row(home, std::int64_t{token} * config.top_k + slot);
      if (carries_rows_) {
        shared_.kernels.convert_row(to, config.wire, output_row(row), call_.outputs.type, config.hidden,
                                    store_);
      }
      const RouteTail tail{.weight = call_.weights != nullptr ? call_.weights[row] : 1.0f,
                           .value = call_.row_values != nullptr ? call_.row_values[row] : 0.0f};
      std::memcpy(to + layout_.tail_offset, &tail, sizeof tail);
      ++sent;
    }
  }
  if (home == shared_.me()) return;
  lane_.wire.combine_messages += sent;
  lane_.wire.combine_bytes +=
      sent * ((carries_rows_ ? layout_.tail_offset : 0) + static_cast<std::int64_t>(sizeof(RouteTail)));
}

}  // namespace ferry::cpu
