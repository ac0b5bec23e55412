// A combine's sums on one rank: of a token's rows on the rank of the experts, the first step of `partial`;
// and of the rows of shared experts, which lie on the token's own rank.
#include "backends/cpu/combine.hpp"

namespace ferry::cpu {

const void* Combine::output_row(std::int64_t row) const {
  const std::int64_t dense = context_.config.hidden * bytes_of(call_.outputs.type);
  const std::int64_t stride = call_.outputs.stride != 0 ? call_.outputs.stride : dense;
  return static_cast<const std::byte*>(call_.outputs.data) + row * stride;
}

// Collects the token's rows on this rank in slot order, with their weights (1 if the call has none). `entry`
// is the index of rows[0] in the plan, for the report of a bad entry.
int Combine::gather_rows(const std::int32_t* rows, std::int64_t entry, const void** outputs, float* weights) {
  int count = 0;
  for (int slot = 0; slot < context_.config.top_k; ++slot) {
    if (rows[slot] == -1 || !lane_.valid_entry(rows[slot], plan_.header->total, entry + slot)) continue;
    outputs[count] = output_row(rows[slot]);
    weights[count] = call_.row_weights != nullptr ? call_.row_weights[rows[slot]] : 1.0f;
    ++count;
    if (context_.config.layout == Layout::rank_major) break;  // all slots name the same row
  }
  return count;
}

// The rows that a later sum will read. Skips invalid entries; they are counted when that sum is computed.
int Combine::rows_to_prefetch(const std::int32_t* rows, const void** outputs) const {
  int count = 0;
  for (int slot = 0; slot < context_.config.top_k; ++slot) {
    if (rows[slot] >= 0 && rows[slot] < plan_.header->total) outputs[count++] = output_row(rows[slot]);
    if (count > 0 && context_.config.layout == Layout::rank_major) break;  // all slots name the same row
  }
  return count;
}

// `next_rows`: rows of the next sum, to be prefetched during this one; null: none.
void Combine::sum_on_rank(void* out, const std::int32_t* rows, std::int64_t entry, Store store,
                          const std::int32_t* next_rows) {
  const void* next[kMaxTopK];
  const void* outputs[kMaxTopK];
  float weights[kMaxTopK];
  const int count = gather_rows(rows, entry, outputs, weights);
  context_.kernels.weighted_sum({.out = out,
                                 .out_type = context_.config.combine_type,
                                 .rows = outputs,
                                 .row_type = call_.outputs.type,
                                 .combine_type = context_.config.combine_type,
                                 .weights = call_.row_weights != nullptr ? weights : nullptr,
                                 .count = count,
                                 .columns = context_.config.hidden,
                                 .store = store,
                                 .next = next,
                                 .next_count = next_rows != nullptr ? rows_to_prefetch(next_rows, next) : 0});
}

// Shared experts in combine: their rows lie on the token's own rank, so this phase's rank adds or copies them
// itself.

// The row of a shared expert's output for a token, in the caller's outputs; null if it was dropped.
const void* Combine::shared_output(int expert, std::int64_t token) {
  const std::int64_t row = shared_.row(expert, token);
  const bool kept = row >= 0 && lane_.valid_entry(static_cast<std::int32_t>(row), plan_.header->total, row);
  return kept ? output_row(row) : nullptr;
}

// A shared expert's row between the phases.
std::byte* Combine::kept_shared_row(int expert, std::int64_t token) const {
  const Config& config = context_.config;
  const std::int64_t index = std::int64_t{expert} * config.max_tokens + token;
  return lane_.array<std::byte>(lane_.arrays.shared_outputs) +
         index * config.hidden * bytes_of(config.combine_type);
}

// Writes the rows that cannot wait for the receive phase: to the caller's shared_outputs, or in the split
// form to the lane's memory, because the caller may reuse its outputs.
void Combine::save_shared_rows() {
  const Config& config = context_.config;
  if (call_.shared_outputs == nullptr && !split_) return;
  for (int expert = 0; expert < config.shared_experts; ++expert) {
    for (std::int64_t token = 0; token < plan_.header->tokens; ++token) {
      const void* const row = shared_output(expert, token);
      if (call_.shared_outputs != nullptr) {
        copy_shared_row(expert, token, row);
      } else if (row != nullptr) {
        context_.kernels.convert_row(kept_shared_row(expert, token), config.combine_type, row,
                                     call_.outputs.type, config.hidden, row_store_);
      }
    }
  }
}

// Writes a row, null if it was dropped, to shared_outputs.
void Combine::copy_shared_row(int expert, std::int64_t token, const void* row) {
  const Config& config = context_.config;
  const std::int64_t bytes = config.hidden * bytes_of(call_.result.type);
  std::byte* const out = static_cast<std::byte*>(call_.shared_outputs) +
                         (std::int64_t{expert} * plan_.header->tokens + token) * bytes;
  if (row == nullptr) return context_.kernels.zero(out, bytes);
  if (call_.outputs.type != config.combine_type) {
    context_.kernels.convert_row(scratch_.data(), config.combine_type, row, call_.outputs.type, config.hidden,
                                 Store::cached);
    row = scratch_.data();
  }
  context_.kernels.convert_row(out, call_.result.type, row, config.combine_type, config.hidden, row_store_);
}

// Appends the token's shared rows, in the combine type, to the `count` rows of a sum. Returns the new count.
int Combine::add_shared_rows(std::int64_t token, const void** rows, int count) {
  const Config& config = context_.config;
  if (call_.shared_outputs != nullptr) return count;
  for (int expert = 0; expert < config.shared_experts; ++expert) {
    if (split_) {
      if (shared_.row(expert, token) >= 0) rows[count++] = kept_shared_row(expert, token);
      continue;
    }
    const void* row = shared_output(expert, token);
    if (row == nullptr) continue;
    if (call_.outputs.type != config.combine_type) {
      // The scratch rows before these hold the token's routed rows.
      std::byte* const scratch = scratch_.data() + (config.top_k + expert) * layout_.bytes;
      context_.kernels.convert_row(scratch, config.combine_type, row, call_.outputs.type, config.hidden,
                                   Store::cached);
      row = scratch;
    }
    rows[count++] = row;
  }
  return count;
}

}  // namespace ferry::cpu
