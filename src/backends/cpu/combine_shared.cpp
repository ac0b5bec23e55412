// Shared experts in combine: their rows lie on the token's own rank, so this phase's rank adds or copies them
// itself.
#include "backends/cpu/combine.hpp"

namespace ferry::cpu {

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
  if (call_.outputs.data == nullptr || (call_.shared_outputs == nullptr && !split_)) return;
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
