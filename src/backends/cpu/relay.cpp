#include "backends/cpu/relay.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "plan/slot.hpp"

namespace ferry::cpu {

void sum_on_node(const CpuContext& context, void* out, const void* const* rows, int count, Store store) {
  const DType type = context.config.combine_type;
  context.kernels.weighted_sum({.out = out,
                                .out_type = type,
                                .rows = rows,
                                .row_type = type,
                                .combine_type = type,
                                .count = count,
                                .columns = context.config.hidden,
                                .store = store});
}

void add_within_nodes(const CpuContext& context, PartialSums& sums, std::byte* scratch, std::int64_t stride) {
  // Ranks of a node need not be consecutive. Insertion keeps the rank order of a node's rows.
  PartialSums sorted;
  for (int i = 0; i < sums.count; ++i) {
    sorted.add(sums.rows[i], sums.nodes[i]);
    for (int at = i; at > 0 && sorted.nodes[at - 1] > sorted.nodes[at]; --at) {
      std::swap(sorted.rows[at - 1], sorted.rows[at]);
      std::swap(sorted.nodes[at - 1], sorted.nodes[at]);
    }
  }
  sums.count = 0;
  for (int begin = 0, end = 0; begin < sorted.count; begin = end) {
    while (end < sorted.count && sorted.nodes[end] == sorted.nodes[begin]) ++end;
    const void* sum = sorted.rows[begin];
    // A single row is its own sum: adding it to +0 would change only a -0 or the bits of a NaN, which the
    // source rank's addition, from +0 too, changes in the same way.
    if (end - begin > 1) {
      sum_on_node(context, scratch, sorted.rows + begin, end - begin, Store::cached);
      sum = scratch;
      scratch += stride;
    }
    sums.add(sum, sorted.nodes[begin]);
  }
}

DispatchRelay::DispatchRelay(const CpuContext& context)
    : context_(context), node_(context.rank.topology().node_of(context.me())) {}

void DispatchRelay::start(const MessageLayout& layout) {
  layout_ = layout;
  bad_messages_.clear();
}

std::vector<const std::byte*>& DispatchRelay::messages_for(int origin, int final) {
  const Topology& topology = context_.rank.topology();
  const std::size_t ranks = topology.ranks_of(node_).size();
  return messages_[static_cast<std::size_t>(origin) * ranks +
                   static_cast<std::size_t>(topology.local_rank_of(final))];
}

std::vector<ForwardedMessages> DispatchRelay::plan(std::span<const HeldMessages> held) {
  const Config& config = context_.config;
  const Topology& topology = context_.rank.topology();
  const std::vector<int>& ranks = topology.ranks_of(node_);
  messages_.resize(static_cast<std::size_t>(context_.ranks()) * ranks.size());
  for (std::vector<const std::byte*>& each : messages_) each.clear();
  std::vector<ForwardedMessages> forwards;
  for (const HeldMessages& from : held) {
    const std::int64_t count = from.bytes / layout_.bytes;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::byte* const message = from.data + i * layout_.bytes;
      const auto* ids = reinterpret_cast<const std::int32_t*>(message + layout_.ids_offset);
      for (int slot = 0; slot < config.top_k; ++slot) {
        const IdKind kind = classify_id(ids[slot], config.experts);
        if (kind == IdKind::bad) bad_messages_.push_back(std::int64_t{from.origin} * config.max_tokens + i);
        if (kind != IdKind::expert) continue;
        const int rank = config.placement.location(ids[slot]).rank;
        if (topology.node_of(rank) != node_) continue;
        std::vector<const std::byte*>& list = messages_for(from.origin, rank);
        if (list.empty() || list.back() != message) list.push_back(message);
      }
    }
    for (const int rank : ranks) {
      const auto messages = static_cast<std::int64_t>(messages_for(from.origin, rank).size());
      if (messages > 0) forwards.push_back({from.origin, rank, messages * layout_.bytes, messages});
    }
  }
  return forwards;
}

void DispatchRelay::write(std::span<ForwardedMessages> forwards) {
  for (const ForwardedMessages& messages : forwards) {
    std::byte* out = messages.out;
    for (const std::byte* message : messages_for(messages.origin, messages.final)) {
      std::memcpy(out, message, static_cast<std::size_t>(layout_.bytes));
      out += layout_.bytes;
    }
  }
}

int position_of_rank(const Config& config, const std::int32_t* ids, int rank) {
  int position = 0;
  for (int slot = 0; slot < config.top_k; ++slot) {
    if (classify_id(ids[slot], config.experts) != IdKind::expert) continue;
    const int destination = config.placement.location(ids[slot]).rank;
    if (destination >= rank) continue;
    // Counts a rank at its first slot.
    bool first = true;
    for (int before = 0; before < slot && first; ++before) {
      first = classify_id(ids[before], config.experts) != IdKind::expert ||
              config.placement.location(ids[before]).rank != destination;
    }
    position += first;
  }
  return position;
}

// The arguments of any rank determine the contents of rows; a rank without rows does not know them.
PackedRows CombineRelay::packed_rows() const {
  const Config& config = context_.config;
  OptionalArgument values;
  for (int peer = 0; peer < context_.ranks(); ++peer) {
    const auto& summary = *reinterpret_cast<const SummaryHead*>(link_.summary_from(peer));
    values.add_rank(peer, summary.arguments[0]);
  }
  return {.value_bytes = config.hidden * bytes_of(config.combine_type),
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
    if (rows.size() == 1) {
      std::memcpy(out, rows[0].values, static_cast<std::size_t>(format_.value_bytes));
    } else {
      sum_on_node(context_, out, values.data(), static_cast<int>(values.size()), Store::cached);
    }
    out += format_.value_bytes;
    tail += format_.tail_bytes;
  }
}

}  // namespace ferry::cpu
