#include "backends/cpu/combine_relay.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "backends/cpu/lane.hpp"
#include "backends/cpu/node_sum.hpp"

namespace ferry::cpu {

// The arguments of any rank determine the contents of rows; a rank without rows does not know them.
PackedRows CombineRelay::packed_rows() const {
  const Config& config = context_.config;
  OptionalArgument outputs, values;
  for (int peer = 0; peer < context_.ranks(); ++peer) {
    const auto& summary = *reinterpret_cast<const SummaryHead*>(link_.summary_from(peer));
    outputs.add_rank(peer, summary.arguments[0]);
    values.add_rank(peer, summary.arguments[1]);
  }
  return {.value_bytes = outputs.given_anywhere() ? config.hidden * bytes_of(config.combine_type) : 0,
          .tail_bytes = static_cast<std::int64_t>(sizeof(SumHead)) +
                        (values.given_anywhere() ? std::int64_t{4} * config.top_k : 0)};
}

std::vector<ForwardedMessages> CombineRelay::plan(std::span<const HeldMessages> held) {
  format_ = packed_rows();
  rows_.clear();
  tokens_.resize(static_cast<std::size_t>(context_.ranks()));
  std::vector<ForwardedMessages> forwards;
  std::vector<Queue> queues;
  for (int source = 0; source < context_.ranks(); ++source) {
    queues.clear();
    // In rank order, because `held` is.
    for (const HeldMessages& each : held) {
      if (each.final == source) queues.push_back({&each, each.bytes / format_.row_bytes(), 0, -1});
    }
    if (queues.empty()) continue;
    std::vector<Token>& tokens = tokens_[static_cast<std::size_t>(source)];
    merge(queues, tokens);
    const auto count = static_cast<std::int64_t>(tokens.size());
    forwards.push_back({context_.me(), source, count * format_.row_bytes(), count});
  }
  return forwards;
}

// Copies the head of the queue's next row to head_; null at its end. Skips rows whose token is not valid, or
// not after the one before.
const SumHead* CombineRelay::head_of_next(Queue& queue) {
  for (; queue.next < queue.count; ++queue.next) {
    std::memcpy(&head_,
                queue.held->data + queue.count * format_.value_bytes + queue.next * format_.tail_bytes,
                sizeof head_);
    if (head_.token > queue.last_token && head_.token < context_.config.max_tokens) return &head_;
    bad_rows_.push_back(std::int64_t{queue.held->final} * context_.config.max_tokens + queue.next);
  }
  return nullptr;
}

// Every queue is in token order.
void CombineRelay::merge(std::vector<Queue>& queues, std::vector<Token>& tokens) {
  tokens.clear();
  while (true) {
    std::int32_t token = std::numeric_limits<std::int32_t>::max();
    for (Queue& queue : queues) {
      if (const SumHead* head = head_of_next(queue)) token = std::min(token, head->token);
    }
    if (token == std::numeric_limits<std::int32_t>::max()) return;
    tokens.push_back({rows_.size(), 0});
    for (Queue& queue : queues) {
      const SumHead* head = head_of_next(queue);
      if (head == nullptr || head->token != token) continue;
      const std::byte* const first = queue.held->data;
      rows_.push_back({first + queue.next * format_.value_bytes,
                       first + queue.count * format_.value_bytes + queue.next * format_.tail_bytes});
      ++tokens.back().count;
      ++queue.next;
      queue.last_token = token;
    }
  }
}

void CombineRelay::write_sums(int source, std::byte* out) const {
  const std::vector<Token>& tokens = tokens_[static_cast<std::size_t>(source)];
  std::byte* tail = out + static_cast<std::int64_t>(tokens.size()) * format_.value_bytes;
  std::vector<const void*> values;
  for (const Token& token : tokens) {
    const std::span<const Row> rows(rows_.data() + token.first, token.count);
    values.clear();
    SumHead sum{};
    std::memset(tail, 0, static_cast<std::size_t>(format_.tail_bytes));
    for (const Row& row : rows) {
      values.push_back(row.values);
      SumHead head;
      std::memcpy(&head, row.tail, sizeof head);
      sum = {head.token, sum.slots | head.slots};
      // Values of routes are copied, slot by slot.
      const bool has_values = format_.tail_bytes > static_cast<std::int64_t>(sizeof(SumHead));
      for (int slot = 0; has_values && slot < context_.config.top_k; ++slot) {
        const std::size_t at = sizeof(SumHead) + std::size_t{4} * static_cast<std::size_t>(slot);
        if ((head.slots >> slot & 1) != 0) std::memcpy(tail + at, row.tail + at, 4);
      }
    }
    std::memcpy(tail, &sum, sizeof sum);
    if (format_.value_bytes > 0) {
      if (rows.size() == 1) {
        std::memcpy(out, rows[0].values, static_cast<std::size_t>(format_.value_bytes));
      } else {
        sum_on_node(context_, out, values.data(), static_cast<int>(values.size()), Store::cached);
      }
    }
    out += format_.value_bytes;
    tail += format_.tail_bytes;
  }
}

}  // namespace ferry::cpu
