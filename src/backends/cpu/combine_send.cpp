// The send phase of combine: writes this rank's rows, or their sums, for the source ranks.
#include <algorithm>
#include <cstring>

#include "backends/cpu/combine.hpp"
#include "exchange/compared_options.hpp"
#include "group/fault_points.hpp"

namespace ferry::cpu {

void Combine::send(const CombineCall& call, bool split, bool continues) {
  call_ = call;
  split_ = split;
  partial_ = call.reduction == Reduction::partial;
  values_ = {};
  weights_ = {};
  layout_ = combine_row_layout(context_.config.combine_type, context_.config.hidden, context_.config.top_k);
  plan_ = view_plan(call.plan.storage(), context_.plan_shape);
  header_ = *plan_.header;
  plan_.header = &header_;
  shared_ = shared_rows(context_.config, context_.me(), plan_.header->tokens);
  scratch_.resize(
      static_cast<std::size_t>((context_.config.top_k + context_.config.shared_experts) * layout_.bytes));

  if (continues) {
    lane_.link->go_on();
  } else {
    ComparedOptions options = options_of(call);
    add_plan(call.plan, &options);
    lane_.link->begin(Operation::combine, options);
  }
  fault_point(FaultPoint::combine_begin, context_.me());
  staged_rows_per_token_ = partial_ ? plan_.header->shape.most_ranks() : context_.config.top_k;
  incoming_.assign(static_cast<std::size_t>(staged_rows_per_token_), {});
  addends_.resize(static_cast<std::size_t>(staged_rows_per_token_ + context_.config.shared_experts));
  row_store_ = store_for(plan_.header->total * layout_.bytes);
  chunks_.start(context_.tokens_per_chunk, split, context_.ranks());
  // In shared memory the receiver reads a chunk while it is still in a cache, so chunks are written through
  // the cache.
  staging_store_ = split || lane_.link->packs() ? row_store_ : Store::cached;
  next_.assign(static_cast<std::size_t>(context_.ranks()), 0);
  start_sending();
  for (int peer = 0; peer < context_.ranks(); ++peer) write_summary(peer);
  stage_chunk(0, chunks_.first_end());
  fault_point(FaultPoint::combine_rows_sent, context_.me());
  lane_.link->post(split);
  save_shared_rows();
  fault_point(FaultPoint::combine_posted, context_.me());
}

void Combine::write_summary(int peer) const {
  // Row values describe rows, route values describe tokens. A rank may have neither.
  const bool rows = plan_.header->total > 0, relevant = rows || plan_.header->tokens > 0;
  auto* summary = reinterpret_cast<SummaryHead*>(lane_.link->summary_to(peer));
  summary->arguments[0] = given(rows ? call_.row_values : call_.route_values, relevant);
  summary->arguments[1] = given(call_.row_weights, rows);
  summary->split = split_;
  summary->max_rows = plan_.header->tokens;
  summary->rows_end = static_cast<std::int32_t>(rows_end_);
}

// Where messages are packed, counts the rows for every source rank and makes room for them.
void Combine::start_sending() {
  const int ranks = context_.ranks();
  packs_ = lane_.link->packs();
  relays_add_ =
      partial_ && lane_.link->has_relays() && context_.config.reduction_level == ReductionLevel::node;
  relay_.start();
  rows_end_ = 0;
  sent_.assign(static_cast<std::size_t>(ranks),
               {.value_bytes = layout_.tail_offset, .tail_bytes = tail_bytes(call_.row_values != nullptr)});
  if (packs_) {
    bytes_to_.assign(static_cast<std::size_t>(ranks), 0);
    for (int source = 0; source < ranks; ++source) {
      PairRows& rows = sent_[static_cast<std::size_t>(source)];
      if (source != context_.me() || split_) rows.count = count_rows(source);
      bytes_to_[static_cast<std::size_t>(source)] = rows.count * (rows.value_bytes + rows.tail_bytes);
    }
    lane_.link->reserve(
        {.direction = Direction::to_sources,
         .message_bytes = std::max<std::int64_t>(1, sent_[0].value_bytes + sent_[0].tail_bytes),
         .bytes = bytes_to_,
         .forwarder = relays_add_ ? &relay_ : nullptr});
  } else if (header_.magic == kFewerRowsMagic) {
    for (int source = 0; source < ranks; ++source) count_rows(source);
  } else {
    rows_end_ = -1;
  }
  for (int source = 0; source < ranks; ++source)
    sent_[static_cast<std::size_t>(source)].first = lane_.link->outgoing(Staging::combine, source);
}

// Also finds rows_end_: a row that this rank has not stored (ReceiveBuffers::rows) is not in its plan, but in
// that of the source rank.
std::int64_t Combine::count_rows(int source) {
  const std::int64_t messages = lane_.message_count(plan_, source, context_.me());
  if (partial_) return messages;
  const std::int64_t top_k = context_.config.top_k;
  const std::int32_t* rows =
      plan_.received_rows_of_message + std::int64_t{source} * context_.config.max_tokens * top_k;
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < messages * top_k; ++i) {
    count += rows[i] != -1;
    rows_end_ = std::max<std::int64_t>(rows_end_, rows[i] + std::int64_t{1});
  }
  return count;
}

// Bytes of a packed row's tail.
std::int64_t Combine::tail_bytes(bool values) const {
  if (!partial_) return sizeof(RouteTail);
  return (relays_add_ ? static_cast<std::int64_t>(sizeof(SumHead)) : 0) +
         (values ? std::int64_t{4} * context_.config.top_k : 0);
}

StagedRow Combine::outgoing_row(int source, std::int64_t token, std::int64_t index) {
  PairRows& rows = sent_[static_cast<std::size_t>(source)];
  if (packs_) return rows.row(rows.next++);
  std::byte* row = rows.first + shared_offset(token, index);
  return {row, row + layout_.tail_offset};
}

// Stages tokens [begin, end) of every source rank.
void Combine::stage_chunk(std::int64_t begin, std::int64_t end) {
  for (int step = 1; step <= context_.ranks(); ++step) {
    const int source = (context_.me() + step) % context_.ranks();
    if (source != context_.me() || split_) stage_tokens(source, begin, end);
  }
  stream_fence();
}

// Messages to a source rank are in the order of its tokens.
void Combine::stage_tokens(int source, std::int64_t begin, std::int64_t end) {
  const std::int64_t count = lane_.message_count(plan_, source, context_.me());
  std::int64_t& next = next_[static_cast<std::size_t>(source)];
  for (; next < count; ++next) {
    const std::int64_t message = std::int64_t{source} * context_.config.max_tokens + next;
    const std::int32_t token = plan_.received_token[message];
    if (token >= end && token < context_.config.max_tokens) return;
    const bool valid = lane_.valid_entry(token, context_.config.max_tokens, message);
    // The place of a packed row does not depend on its token.
    if (!valid && !packs_) continue;
    // A damaged plan may name a token that the source rank has already finished.
    if (valid && token < begin) {
      lane_.record_bad_source(message);
    } else if (partial_) {
      stage_sum(source, message, token, next + 1 == count);
    } else {
      stage_rows(source, message, token);
    }
  }
}

void Combine::stage_sum(int source, std::int64_t message, std::int32_t token, bool last) {
  const int top_k = context_.config.top_k;
  const std::int32_t position = plan_.received_position[message];
  if (!lane_.valid_entry(position, staged_rows_per_token_, message) && !packs_) return;
  StagedRow row = outgoing_row(source, token, position);
  const std::int32_t* rows = plan_.received_rows_of_message + message * top_k;
  if (relays_add_) {
    write_sum_head(row.tail, token, rows);
    row.tail += sizeof(SumHead);
  }
  // The rows of the next message lie in the segments of other experts, which no hardware prefetcher predicts;
  // the plan knows them.
  const std::int32_t* next_rows = last ? nullptr : rows + top_k;
  sum_on_rank(row.values, rows, message * top_k, staging_store_, next_rows);
  if (call_.row_values != nullptr) write_route_values_of_sum(row.tail, rows);
  count_row(source, layout_.tail_offset + (call_.row_values != nullptr ? 4 * top_k : 0));
}

void Combine::write_sum_head(std::byte* tail, std::int32_t token, const std::int32_t* rows) const {
  SumHead head{.token = token, .slots = 0};
  for (int slot = 0; slot < context_.config.top_k; ++slot)
    head.slots |= std::uint32_t{rows[slot] != -1} << slot;
  std::memcpy(tail, &head, sizeof head);
}

void Combine::write_route_values_of_sum(std::byte* tail, const std::int32_t* rows) const {
  float values[kMaxTopK];
  for (int slot = 0; slot < context_.config.top_k; ++slot) {
    const bool here = rows[slot] >= 0 && rows[slot] < plan_.header->total;
    values[slot] = here ? call_.row_values[rows[slot]] : 0.0f;
  }
  std::memcpy(tail, values, 4 * static_cast<std::size_t>(context_.config.top_k));
}

void Combine::stage_rows(int source, std::int64_t message, std::int32_t token) {
  const Config& config = context_.config;
  for (int slot = 0; slot < config.top_k; ++slot) {
    const std::int32_t row = plan_.received_rows_of_message[message * config.top_k + slot];
    if (row == -1) continue;
    const StagedRow out = outgoing_row(source, token, slot);
    if (!lane_.valid_entry(row, plan_.header->total, message * config.top_k + slot)) continue;
    context_.kernels.convert_row(out.values, config.combine_type, output_row(row), call_.outputs.type,
                                 config.hidden, staging_store_);
    const RouteTail tail{.weight = call_.row_weights != nullptr ? call_.row_weights[row] : 1.0f,
                         .value = call_.row_values != nullptr ? call_.row_values[row] : 0.0f};
    std::memcpy(out.tail, &tail, sizeof tail);
    count_row(source, layout_.tail_offset + static_cast<std::int64_t>(sizeof(RouteTail)));
  }
}

// A link that packs counts what it sends.
void Combine::count_row(int source, std::int64_t bytes) {
  if (packs_ || source == context_.me()) return;
  lane_.counts.count_combine({.messages = 1, .bytes = bytes}, context_.other_node(source));
}

const void* Combine::output_row(std::int64_t row) const {
  return row_at(call_.outputs.data, call_.outputs.stride,
                context_.config.hidden * bytes_of(call_.outputs.type), row);
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
