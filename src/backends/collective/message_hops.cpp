#include "backends/collective/message_hops.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/text.hpp"
#include "group/fault_points.hpp"

namespace ferry::collective {
namespace {

constexpr std::int64_t kEntryBytes = sizeof(std::int64_t);

}  // namespace

int first_stop(const Topology& topology, cpu::Direction direction, int from, int to) {
  if (topology.node_of(from) == topology.node_of(to)) return to;
  return direction == cpu::Direction::to_experts ? topology.relay_of(from, topology.node_of(to))
                                                 : topology.relay_of(to, topology.node_of(from));
}

int relay_between(const Topology& topology, cpu::Direction direction, int from, int to) {
  const int stop = first_stop(topology, direction, from, to);
  return stop == from || stop == to ? -1 : stop;
}

bool is_relay(const Topology& topology, cpu::Direction direction, int relay, int to) {
  const bool within_node = topology.node_of(relay) == topology.node_of(to);
  if (direction == cpu::Direction::to_experts) return within_node;
  return !within_node && topology.relay_of(to, topology.node_of(relay)) == relay;
}

WaitRole role_towards(const Topology& topology, cpu::Direction direction, bool in_second_hop, int peer,
                      int me) {
  if (in_second_hop) return WaitRole::receiver;
  if (peer < 0) return WaitRole::none;
  const bool within_node = topology.node_of(peer) == topology.node_of(me);
  if (direction == cpu::Direction::to_experts) {
    if (within_node) return WaitRole::receiver;
    return topology.relay_of(peer, topology.node_of(me)) == me ? WaitRole::relay : WaitRole::sender;
  }
  if (within_node) return WaitRole::relay;
  return topology.relay_of(me, topology.node_of(peer)) == peer ? WaitRole::receiver : WaitRole::sender;
}

HopTables::HopTables(const Topology& topology, int rank)
    : topology_(topology), me_(rank), node_(topology.node_of(rank)) {
  const std::vector<int>& node_ranks = topology_.ranks_of(node_);
  behind_.resize(node_ranks.size());
  for (int other = 0; other < topology_.ranks(); ++other) {
    const int stop = topology_.node_of(other) == node_ ? other : topology_.relay_of(other, node_);
    behind_[static_cast<std::size_t>(topology_.local_rank_of(stop))].push_back(other);
  }
  // Sized for the direction of a call that has more entries.
  const auto bytes = [&](int from, int to) {
    const std::span<const int> ranks =
        topology_.node_of(from) == topology_.node_of(to) ? behind(to) : ranks_behind_relay(from, to);
    return kEntryBytes * static_cast<std::int64_t>(ranks.size());
  };
  for (int peer = 0; peer < topology_.ranks(); ++peer) {
    bytes_to_.push_back(bytes(me_, peer));
    bytes_from_.push_back(bytes(peer, me_));
  }
}

// `rank`: a rank of this node.
std::span<const int> HopTables::behind(int rank) const {
  return behind_[static_cast<std::size_t>(topology_.local_rank_of(rank))];
}

// If `relay` is the relay on its node of `source`, which is on another node: the ranks of that node.
std::span<const int> HopTables::ranks_behind_relay(int source, int relay) const {
  const int node = topology_.node_of(relay);
  if (topology_.relay_of(source, node) != relay) return {};
  return topology_.ranks_of(node);
}

std::span<const int> HopTables::receivers(cpu::Direction direction, int from, int to) const {
  const bool within_node = topology_.node_of(from) == topology_.node_of(to);
  if (direction == cpu::Direction::to_sources) return within_node ? behind(to) : std::span<const int>();
  if (!within_node) return ranks_behind_relay(from, to);
  const std::vector<int>& ranks = topology_.ranks_of(node_);  // restricted to `to`
  return std::span(ranks).subspan(static_cast<std::size_t>(topology_.local_rank_of(to)), 1);
}

std::span<const int> HopTables::origins(cpu::Direction direction, int relay, int to) const {
  const bool within_node = topology_.node_of(relay) == topology_.node_of(to);
  if (direction == cpu::Direction::to_experts) return within_node ? behind(relay) : std::span<const int>();
  return within_node ? std::span<const int>() : ranks_behind_relay(to, relay);
}

namespace {

// Stands in place of a message's last bytes until they arrive. That a message really ends with these bits is
// as unlikely as any value of 64 random bits.
std::uint64_t absence_mark(std::uint64_t call, std::int64_t round, int peer) {
  const std::uint64_t number = call << 24 ^ static_cast<std::uint64_t>(round) << 12 ^
                               static_cast<std::uint64_t>(peer) ^ 0x6A09E667F3BCC908u;
  return (number ^ number >> 29) * 0x9E3779B97F4A7C15u;
}

// The bytes of one round, of `total` bytes in rounds of `per_round`.
std::int64_t bytes_in_round(std::int64_t total, std::int64_t per_round, std::int64_t round) {
  return round == 0 ? std::min(total, per_round)
                    : std::clamp<std::int64_t>(total - round * per_round, 0, per_round);
}

// Bytes of a block of `bytes` that follow the messages which its table announces.
std::int64_t bytes_after(std::span<const std::int64_t> parts, std::int64_t bytes, int peer) {
  for (const std::int64_t part : parts) {
    if (part < 0 || part > bytes) throw UsageError(counts_fault(peer));
    bytes -= part;
  }
  return bytes;
}

PairBlocks<SecondHopHeader> make_second_headers(const TableBytes& tables) {
  return {tables.sent, tables.received};
}

}  // namespace

std::int64_t MessageHops::second_headers_bytes(const TableBytes& tables) {
  return PairBlocks<SecondHopHeader>::bytes(tables.sent, tables.received);
}

SentMessages::SentMessages(int ranks, std::int64_t bytes_of_message)
    : message_bytes(bytes_of_message),
      bytes(static_cast<std::size_t>(ranks), 0),
      stored(static_cast<std::size_t>(ranks), nullptr),
      first(ranks) {}

MessageHops::MessageHops(const Topology& topology, int rank, const HopOptions& options,
                         std::unique_ptr<HopMemory> memory)
    : topology_(topology),
      me_(rank),
      ranks_(topology.ranks()),
      relays_(options.relays),
      window_(options.window),
      memory_(std::move(memory)),
      tables_(topology, rank),
      second_headers_(make_second_headers(relays_ ? tables_.second_hop() : TableBytes())),
      sent_(ranks_, 1),
      delivered_(at(ranks_)),
      awaited_(at(ranks_)) {}

void MessageHops::clear() {
  has_messages_ = in_second_hop_ = exchanging_headers_ = false;
  sent_ = SentMessages(ranks_, 1);
  std::fill(delivered_.begin(), delivered_.end(), Delivered{});
  std::fill(awaited_.begin(), awaited_.end(), Awaited{});
  within_node_ = between_nodes_ = {};
}

void MessageHops::reserve(SentMessages messages) {
  has_messages_ = true;
  sent_ = std::move(messages);
  delivered_[at(me_)] = {sent_.stored[at(me_)], sent_.bytes[at(me_)]};
}

// The messages for one stop are contiguous, in ascending order of their ranks.
void MessageHops::reserve(const cpu::Reservation& messages) {
  SentMessages sent(ranks_, messages.message_bytes);
  sent.direction = messages.direction;
  sent.forwarder = messages.forwarder;
  sent.bytes.assign(messages.bytes.begin(), messages.bytes.end());
  const auto stop = [&](int final) {
    return relays_ ? first_stop(topology_, messages.direction, me_, final) : final;
  };
  for (int final = 0; final < ranks_; ++final) sent.first.bytes[at(stop(final))] += sent.bytes[at(final)];
  sent.first.place(*memory_, HopMemory::Part::first_outbox);
  std::vector<std::int64_t> next = sent.first.offsets;
  for (int final = 0; final < ranks_; ++final) {
    sent.stored[at(final)] = sent.first.base + next[at(stop(final))];
    next[at(stop(final))] += sent.bytes[at(final)];
  }
  reserve(std::move(sent));
}

FollowingMessages MessageHops::announce(int peer, std::int64_t* table) const {
  if (!has_messages_) return {};
  if (!straight()) {
    for (const int rank : tables_.receivers(sent_.direction, me_, peer)) *table++ = sent_.bytes[at(rank)];
  }
  return following_of(sent_.first, peer);
}

// What this rank announces of a block that it sends in a hop.
FollowingMessages MessageHops::following_of(const HopBlocks& sent, int peer) const {
  std::int64_t most = 0;  // bytes to any rank
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank != me_) most = std::max(most, sent.bytes[at(rank)]);
  }
  const std::int64_t per_round =
      window_ > 0 ? window_ * sent_.message_bytes : std::numeric_limits<std::int64_t>::max();
  return {.bytes = sent.bytes[at(peer)],
          .message_bytes = sent_.message_bytes,
          .round_bytes = per_round,
          // Without a window all of it is one round.
          .rounds = most > per_round ? (most + per_round - 1) / per_round : 1};
}

void MessageHops::count(int to, std::int64_t messages, std::int64_t bytes) {
  if (to == me_) return;
  Traffic& traffic = same_node(me_, to) ? within_node_ : between_nodes_;
  traffic.messages += messages;
  traffic.bytes += bytes;
}

void MessageHops::exchange(std::uint64_t call, const std::function<FollowingMessages(int peer)>& following,
                           const Tables& table, const Transfer& transfer) {
  if (sent_.agreed) sent_.agreed();
  if (!straight()) fault_point(FaultPoint::hop_begin, me_);
  Following first;
  for (int peer = 0; peer < ranks_; ++peer) {
    first.push_back(following(peer));
    const std::int64_t bytes = sent_.first.bytes[at(peer)];
    count(peer, sent_.messages.empty() ? bytes / sent_.message_bytes : sent_.messages[at(peer)], bytes);
  }
  const HopBlocks received = place_first(first);
  transfer_in_rounds(sent_.first, received, first, call, transfer);
  const std::vector<cpu::HeldMessages> held = hold(received, table);
  if (straight()) return;
  fault_point(FaultPoint::relay_holds, me_);
  second_hop(call, forward(held, first), transfer);
}

// Messages that need no relay arrive in their slots at once.
HopBlocks MessageHops::place_first(const Following& first) {
  HopBlocks received(ranks_);
  const auto has_slot = [&](int peer) {
    return sent_.slots != nullptr && (straight() || same_node(me_, peer));
  };
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != me_ && !has_slot(peer)) received.bytes[at(peer)] = first[at(peer)].bytes;
  }
  received.place(*memory_, HopMemory::Part::first_inbox);
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == me_ || !has_slot(peer)) continue;
    received.bytes[at(peer)] = first[at(peer)].bytes;
    received.offsets[at(peer)] = slot_of(peer, first[at(peer)].bytes) - received.base;
  }
  return received;
}

// Where `bytes` of messages from a rank must arrive.
std::byte* MessageHops::slot_of(int origin, std::int64_t bytes) const {
  if (bytes > sent_.slot_bytes) throw UsageError(counts_fault(origin));
  return sent_.slots + origin * sent_.slot_bytes;
}

// Hands out the messages from a rank. They lie where they have arrived.
void MessageHops::deliver(int origin, const std::byte* data, std::int64_t bytes) {
  if (sent_.slots != nullptr) {
    std::byte* const slot = slot_of(origin, bytes);
    if (data != slot) memory_->copy(slot, data, bytes);
    data = slot;
  }
  delivered_[at(origin)] = {data, bytes};
}

// One hop: calls `transfer` for each round.
void MessageHops::transfer_in_rounds(const HopBlocks& sent, const HopBlocks& received,
                                     const Following& following, std::uint64_t call,
                                     const Transfer& transfer) {
  std::int64_t rounds = 1;
  for (const FollowingMessages& each : following) rounds = std::max(rounds, each.rounds);
  HopBlocks out(ranks_), in(ranks_);  // of one round
  out.offsets = sent.offsets;
  in.offsets = received.offsets;
  for (std::int64_t round = 0; round < rounds; ++round) {
    for (int rank = 0; rank < ranks_; ++rank) {
      const std::size_t peer = at(rank);
      out.offsets[peer] += out.bytes[peer];
      in.offsets[peer] += in.bytes[peer];
      if (rank == me_) continue;
      out.bytes[peer] = bytes_in_round(sent.bytes[peer], following[at(me_)].round_bytes, round);
      in.bytes[peer] = bytes_in_round(received.bytes[peer], following[peer].round_bytes, round);
    }
    const AllToAllV each = {.send = sent.base,
                            .send_bytes = out.bytes,
                            .send_offsets = out.offsets,
                            .receive = received.base,
                            .receive_bytes = in.bytes,
                            .receive_offsets = in.offsets,
                            .device = memory_->on_device()};
    if (!each.device) mark_absent(each, call, round);
    transfer(each);
    for (int peer = 0; peer < ranks_; ++peer) {
      if (!has_arrived(peer)) throw UsageError(transfer_fault(peer, false, "messages"));
    }
  }
}

void MessageHops::mark_absent(const AllToAllV& round, std::uint64_t call, std::int64_t number) {
  constexpr auto kWord = static_cast<std::int64_t>(sizeof(std::uint64_t));  // no message is shorter
  for (int peer = 0; peer < ranks_; ++peer) {
    const std::int64_t bytes = round.receive_bytes[at(peer)];
    awaited_[at(peer)] = {};
    if (bytes < kWord) continue;
    std::byte* const last = round.receive + round.receive_offsets[at(peer)] + bytes - kWord;
    awaited_[at(peer)] = {last, absence_mark(call, number, peer)};
    std::memcpy(last, &awaited_[at(peer)].mark, sizeof(std::uint64_t));
  }
}

bool MessageHops::has_arrived(int peer) const {
  if (exchanging_headers_) return second_headers_.arrived(peer);
  const Awaited& awaited = awaited_[at(peer)];
  return awaited.last == nullptr || peek(awaited.last) != awaited.mark;
}

// Sorts the messages that have arrived: delivers those for this rank that came straight, and returns those
// that it forwards.
std::vector<cpu::HeldMessages> MessageHops::hold(const HopBlocks& received, const Tables& table) {
  std::vector<cpu::HeldMessages> held;
  for (int origin = 0; origin < ranks_; ++origin) {
    if (straight()) {
      if (origin != me_) deliver(origin, received.block(origin), received.bytes[at(origin)]);
      continue;
    }
    const std::span<const int> receivers = tables_.receivers(sent_.direction, origin, me_);
    if (origin == me_) {
      for (const int final : receivers) {
        const std::int64_t bytes = sent_.bytes[at(final)];
        if (final != me_ && bytes > 0) held.push_back({me_, final, sent_.stored[at(final)], bytes});
      }
      continue;
    }
    const std::span<const std::int64_t> parts(table(origin), receivers.size());
    const std::int64_t rest = bytes_after(parts, received.bytes[at(origin)], origin);
    const bool may_share = sent_.shares && !same_node(origin, me_) && !receivers.empty();
    if (rest != 0 && !may_share) throw UsageError(counts_fault(origin));
    const std::byte* data = received.block(origin);
    const std::byte* const shared = data + received.bytes[at(origin)] - rest;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (parts[i] == 0) continue;
      if (same_node(origin, receivers[i])) {
        deliver(origin, data, parts[i]);
      } else {
        held.push_back({.origin = origin,
                        .final = receivers[i],
                        .data = data,
                        .bytes = parts[i],
                        .shared = {shared, static_cast<std::size_t>(rest)}});
      }
      data += parts[i];
    }
  }
  return held;
}

// Makes the blocks of the second hop, and writes the tables that announce them.
HopBlocks MessageHops::forward(const std::vector<cpu::HeldMessages>& held, const Following& first) {
  const auto before = [](const auto& a, const auto& b) {
    return std::pair(a.final, a.origin) < std::pair(b.final, b.origin);
  };
  std::vector<cpu::ForwardedMessages> forwards;
  std::vector<cpu::HeldMessages> unchanged;
  if (sent_.forwarder != nullptr) {
    forwards = sent_.forwarder->plan(held);
    std::sort(forwards.begin(), forwards.end(), before);
  } else {
    unchanged = held;
    std::sort(unchanged.begin(), unchanged.end(), before);
    for (const cpu::HeldMessages& each : unchanged)
      forwards.push_back(
          {each.origin, each.final, each.bytes, each.bytes / first[at(each.origin)].message_bytes});
  }
  HopBlocks sent(ranks_);
  const auto to_slot = [&](const cpu::ForwardedMessages& each) {
    return each.final == me_ && sent_.slots != nullptr;
  };
  for (const cpu::ForwardedMessages& each : forwards) {
    if (!to_slot(each)) sent.bytes[at(each.final)] += each.bytes;
  }
  sent.place(*memory_, HopMemory::Part::second_outbox);
  std::vector<std::int64_t> next = sent.offsets;
  for (cpu::ForwardedMessages& each : forwards) {
    each.out = to_slot(each) ? slot_of(each.origin, each.bytes) : sent.base + next[at(each.final)];
    if (!to_slot(each)) next[at(each.final)] += each.bytes;
  }
  for (std::size_t i = 0; i < unchanged.size(); ++i)
    memory_->copy(forwards[i].out, unchanged[i].data, unchanged[i].bytes);
  if (sent_.forwarder != nullptr) sent_.forwarder->write(forwards);
  memory_->finish();

  const auto table_to = [&](int final) {
    return reinterpret_cast<std::int64_t*>(second_headers_.content_to(final));
  };
  for (int peer = 0; peer < ranks_; ++peer)
    std::fill_n(table_to(peer), tables_.origins(sent_.direction, me_, peer).size(), 0);
  std::fill(sent.bytes.begin(), sent.bytes.end(), 0);
  for (const cpu::ForwardedMessages& each : forwards) {
    count(each.final, each.messages, each.bytes);
    if (each.final == me_) {
      delivered_[at(each.origin)] = {each.out, each.bytes};
      continue;
    }
    sent.bytes[at(each.final)] += each.bytes;
    const std::span<const int> origins = tables_.origins(sent_.direction, me_, each.final);
    const auto entry = std::lower_bound(origins.begin(), origins.end(), each.origin) - origins.begin();
    table_to(each.final)[entry] = each.bytes;
  }
  return sent;
}

// Collective. Returns what every rank announces for the second hop; the tables from the others are then in
// second_headers_.
MessageHops::Following MessageHops::exchange_second_headers(std::uint64_t call, const HopBlocks& sent,
                                                            const Transfer& transfer) {
  PairBlocks<SecondHopHeader>& headers = second_headers_;
  HopBlocks out(ranks_), in(ranks_);
  for (int peer = 0; peer < ranks_; ++peer) {
    headers.header_to(peer) = {.call = call, .seal = 0, .messages = following_of(sent, peer)};
    headers.seal(me_, peer);
    headers.forget(peer);
    out.offsets[at(peer)] = headers.sent_offset(peer);
    in.offsets[at(peer)] = headers.received_offset(peer);
    if (peer == me_) continue;
    out.bytes[at(peer)] = headers.sent_bytes(peer);
    in.bytes[at(peer)] = headers.received_bytes(peer);
  }
  exchanging_headers_ = true;
  transfer({.send = headers.sent(),
            .send_bytes = out.bytes,
            .send_offsets = out.offsets,
            .receive = headers.received(),
            .receive_bytes = in.bytes,
            .receive_offsets = in.offsets});
  Following following;
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == me_) {
      following.push_back(headers.header_to(peer).messages);
      continue;
    }
    if (!headers.is_sealed(me_, peer)) {
      throw UsageError(transfer_fault(peer, headers.arrived_whole(peer),
                                      str("its block of ", headers.received_bytes(peer),
                                          " bytes, which holds the counts of the second hop")));
    }
    following.push_back(headers.header_from(peer).messages);
    if (const std::string fault = fault_of(following.back(), peer); !fault.empty()) throw UsageError(fault);
  }
  exchanging_headers_ = false;
  return following;
}

void MessageHops::second_hop(std::uint64_t call, const HopBlocks& sent, const Transfer& transfer) {
  in_second_hop_ = true;
  const Following following = exchange_second_headers(call, sent, transfer);
  HopBlocks received(ranks_);
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer != me_) received.bytes[at(peer)] = following[at(peer)].bytes;
  }
  received.place(*memory_, HopMemory::Part::second_inbox);
  transfer_in_rounds(sent, received, following, call, transfer);
  for (int relay = 0; relay < ranks_; ++relay) {
    if (relay == me_) continue;
    const std::span<const int> origins = tables_.origins(sent_.direction, relay, me_);
    const std::span<const std::int64_t> parts(
        reinterpret_cast<const std::int64_t*>(second_headers_.content_from(relay)), origins.size());
    if (bytes_after(parts, received.bytes[at(relay)], relay) != 0) throw UsageError(counts_fault(relay));
    const std::byte* data = received.block(relay);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (parts[i] == 0) continue;
      deliver(origins[i], data, parts[i]);
      data += parts[i];
    }
  }
  memory_->finish();
}

}  // namespace ferry::collective
