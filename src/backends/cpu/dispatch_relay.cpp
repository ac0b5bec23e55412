#include "backends/cpu/dispatch_relay.hpp"

#include <cstring>

#include "plan/slot.hpp"

namespace ferry::cpu {

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

}  // namespace ferry::cpu
