#include "backends/collective/message_hops.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backends/collective/message_rounds.hpp"
#include "backends/collective/second_hop.hpp"
#include "group/fault_points.hpp"

namespace ferry::collective {
namespace {

std::size_t at(int rank) {
  return static_cast<std::size_t>(rank);
}

// Makes sure that the memory has at least `bytes`. It is mapped for what undamaged plans need.
void grow(LocalMemory& memory, std::int64_t bytes) {
  if (memory.bytes() < bytes) memory = LocalMemory(bytes);
}

// Stands in place of a message's last bytes until they arrive. That a message really ends with these bits is
// as unlikely as any value of 64 random bits.
std::uint64_t absence_mark(std::uint64_t call, std::int64_t round, int peer) {
  const std::uint64_t number = call << 24 ^ static_cast<std::uint64_t>(round) << 12 ^
                               static_cast<std::uint64_t>(peer) ^ 0x6A09E667F3BCC908u;
  return (number ^ number >> 29) * 0x9E3779B97F4A7C15u;
}

// A block of `bytes` consists of the messages that its table announces.
void require_parts(const std::int64_t* parts, std::size_t count, std::int64_t bytes, int peer,
                   const MessageCarrier::Wire& wire) {
  for (std::size_t i = 0; i < count; ++i) {
    if (parts[i] < 0 || parts[i] > bytes) wire.fail(counts_fault(peer));
    bytes -= parts[i];
  }
  if (bytes != 0) wire.fail(counts_fault(peer));
}

PairBlocks<SecondHopHeader> make_second_headers(const TableBytes& tables) {
  return {tables.sent, tables.received};
}

}  // namespace

std::int64_t MessageHops::second_headers_bytes(const TableBytes& tables) {
  return PairBlocks<SecondHopHeader>::bytes(tables.sent, tables.received);
}

void MessageHops::Blocks::place() {
  std::int64_t end = 0;
  for (std::size_t rank = 0; rank < bytes.size(); ++rank) {
    offsets[rank] = end;
    end += (bytes[rank] + kPairAlign - 1) / kPairAlign * kPairAlign;
  }
  grow(memory, end);
}

MessageHops::MessageHops(const Topology& topology, int rank, const HopOptions& options,
                         const MessageMemory& bytes)
    : topology_(topology),
      me_(rank),
      ranks_(topology.ranks()),
      options_(options),
      outbox_{.memory = LocalMemory(bytes.outbox), .bytes = {}, .offsets = {}},
      inbox_{.memory = LocalMemory(bytes.inbox), .bytes = {}, .offsets = {}},
      second_outbox_{.memory = LocalMemory(bytes.second_outbox), .bytes = {}, .offsets = {}},
      second_inbox_{.memory = LocalMemory(bytes.second_inbox), .bytes = {}, .offsets = {}},
      tables_(topology, rank),
      second_headers_(make_second_headers(options.relays ? tables_.second_hop() : TableBytes())),
      bytes_to_(at(ranks_), 0),
      offset_to_(at(ranks_), 0),
      delivered_(at(ranks_)),
      awaited_(at(ranks_)) {
  for (Blocks* blocks : {&outbox_, &inbox_, &second_outbox_, &second_inbox_}) {
    blocks->bytes.assign(at(ranks_), 0);
    blocks->offsets.assign(at(ranks_), 0);
  }
}

void MessageHops::clear() {
  has_messages_ = in_second_hop_ = exchanging_headers_ = false;
  std::fill(bytes_to_.begin(), bytes_to_.end(), 0);
  std::fill(outbox_.bytes.begin(), outbox_.bytes.end(), 0);
  std::fill(delivered_.begin(), delivered_.end(), Delivered{});
  std::fill(awaited_.begin(), awaited_.end(), Awaited{});
  within_node_ = between_nodes_ = {};
}

// Where the messages to `final` go in the first hop.
int MessageHops::first_stop(int final) const {
  if (!options_.relays || same_node(me_, final)) return final;
  return direction_ == cpu::Direction::to_experts ? topology_.relay_of(me_, topology_.node_of(final))
                                                  : topology_.relay_of(final, topology_.node_of(me_));
}

void MessageHops::reserve(const cpu::Reservation& messages) {
  has_messages_ = true;
  direction_ = messages.direction;
  forwarder_ = messages.forwarder;
  message_bytes_ = messages.message_bytes;
  std::copy(messages.bytes.begin(), messages.bytes.end(), bytes_to_.begin());
  std::fill(outbox_.bytes.begin(), outbox_.bytes.end(), 0);
  for (int final = 0; final < ranks_; ++final) {
    std::int64_t& end = outbox_.bytes[at(first_stop(final))];
    offset_to_[at(final)] = end;
    end += bytes_to_[at(final)];
  }
  outbox_.place();
}

std::byte* MessageHops::outgoing(int rank) const {
  return outbox_.block(first_stop(rank)) + offset_to_[at(rank)];
}

FollowingMessages MessageHops::announce(int peer, std::int64_t* table) const {
  std::int64_t most = 0;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank != me_) most = std::max(most, outbox_.bytes[at(rank)]);
  }
  if (options_.relays) {
    for (const int rank : tables_.receivers(direction_, me_, peer)) *table++ = bytes_to_[at(rank)];
  }
  return following_of(outbox_.bytes[at(peer)], most, message_bytes_, options_.window);
}

void MessageHops::count(int to, std::int64_t messages, std::int64_t bytes) {
  if (to == me_) return;
  Traffic& traffic = same_node(me_, to) ? within_node_ : between_nodes_;
  traffic.messages += messages;
  traffic.bytes += bytes;
}

void MessageHops::exchange(std::uint64_t call, const std::function<FollowingMessages(int peer)>& following,
                           const std::function<const std::int64_t*(int peer)>& table, const Wire& wire) {
  if (options_.relays) fault_point(FaultPoint::hop_begin, me_);
  std::vector<FollowingMessages> first;
  for (int peer = 0; peer < ranks_; ++peer) {
    first.push_back(following(peer));
    inbox_.bytes[at(peer)] = peer == me_ ? 0 : first.back().bytes;
    count(peer, outbox_.bytes[at(peer)] / message_bytes_, outbox_.bytes[at(peer)]);
  }
  inbox_.place();
  transfer(outbox_, inbox_, first, call, wire);
  const std::vector<cpu::HeldMessages> held = hold(table, wire);
  if (!options_.relays) return;
  fault_point(FaultPoint::relay_holds, me_);
  const std::vector<Forward> forwards = plan_forwards(held, first);
  write_forwards(forwards);
  exchange_second(call, forwards, wire);
}

// One hop, in rounds. `following`: of each rank, this one included.
void MessageHops::transfer(const Blocks& sent, const Blocks& received,
                           const std::vector<FollowingMessages>& following, std::uint64_t call,
                           const Wire& wire) {
  const HopMemory hop = {.send = sent.memory.data(),
                         .send_bytes = sent.bytes,
                         .send_offsets = sent.offsets,
                         .receive = received.memory.data(),
                         .receive_bytes = received.bytes,
                         .receive_offsets = received.offsets};
  std::int64_t round = 0;
  transfer_in_rounds(hop, me_, following, [&](const AllToAllV& each) {
    constexpr auto kWord = static_cast<std::int64_t>(sizeof(std::uint64_t));  // no message is shorter
    for (int peer = 0; peer < ranks_; ++peer) {
      const std::int64_t bytes = each.receive_bytes[at(peer)];
      awaited_[at(peer)] = {};
      if (bytes < kWord) continue;
      std::byte* const last = each.receive + each.receive_offsets[at(peer)] + bytes - kWord;
      awaited_[at(peer)] = {last, absence_mark(call, round, peer)};
      std::memcpy(last, &awaited_[at(peer)].mark, sizeof(std::uint64_t));
    }
    wire.transfer(each);
    for (int peer = 0; peer < ranks_; ++peer) {
      if (!has_arrived(peer)) wire.fail(transfer_fault(peer, false, "messages"));
    }
    ++round;
  });
}

bool MessageHops::has_arrived(int peer) const {
  if (exchanging_headers_) return second_headers_.arrived(peer);
  const Awaited& awaited = awaited_[at(peer)];
  return awaited.last == nullptr || peek(awaited.last) != awaited.mark;
}

// Sorts the messages that have arrived: keeps those for this rank, and returns those that it forwards.
std::vector<cpu::HeldMessages> MessageHops::hold(const std::function<const std::int64_t*(int peer)>& table,
                                                 const Wire& wire) {
  std::vector<cpu::HeldMessages> held;
  for (int origin = 0; origin < ranks_; ++origin) {
    const std::byte* data = origin == me_ ? outbox_.block(me_) : inbox_.block(origin);
    if (!options_.relays) {
      delivered_[at(origin)] = {data, origin == me_ ? outbox_.bytes[at(me_)] : inbox_.bytes[at(origin)]};
      continue;
    }
    const std::int64_t* entry = table(origin);
    const std::span<const int> receivers = tables_.receivers(direction_, origin, me_);
    if (origin != me_) require_parts(entry, receivers.size(), inbox_.bytes[at(origin)], origin, wire);
    for (const int final : receivers) {
      const std::int64_t bytes = *entry++;
      if (bytes == 0) continue;
      if (same_node(origin, final)) {
        delivered_[at(origin)] = {data, bytes};
      } else {
        held.push_back({.origin = origin, .final = final, .data = data, .bytes = bytes});
      }
      data += bytes;
    }
  }
  return held;
}

// In the order in which they are placed: by receiver, then by origin.
std::vector<MessageHops::Forward> MessageHops::plan_forwards(
    const std::vector<cpu::HeldMessages>& held, const std::vector<FollowingMessages>& following) {
  std::vector<Forward> forwards;
  if (forwarder_ != nullptr) {
    for (const cpu::ForwardedMessages& messages : forwarder_->plan(held))
      forwards.push_back({messages, nullptr});
  } else {
    for (const cpu::HeldMessages& each : held) {
      const std::int64_t messages = each.bytes / following[at(each.origin)].message_bytes;
      forwards.push_back({{each.origin, each.final, each.bytes, messages}, each.data});
    }
  }
  std::sort(forwards.begin(), forwards.end(), [](const Forward& a, const Forward& b) {
    return std::pair(a.messages.final, a.messages.origin) < std::pair(b.messages.final, b.messages.origin);
  });
  return forwards;
}

void MessageHops::write_forwards(const std::vector<Forward>& forwards) {
  std::fill(second_outbox_.bytes.begin(), second_outbox_.bytes.end(), 0);
  for (const auto& [messages, data] : forwards) second_outbox_.bytes[at(messages.final)] += messages.bytes;
  second_outbox_.place();
  std::vector<std::int64_t> next = second_outbox_.offsets;
  for (const auto& [messages, data] : forwards) {
    std::byte* out = second_outbox_.memory.data() + next[at(messages.final)];
    next[at(messages.final)] += messages.bytes;
    if (data != nullptr) {
      std::memcpy(out, data, static_cast<std::size_t>(messages.bytes));
    } else {
      forwarder_->write(messages, out);
    }
    count(messages.final, messages.messages, messages.bytes);
    if (messages.final == me_) delivered_[at(messages.origin)] = {out, messages.bytes};
  }
}

// Writes the tables that announce what this rank forwards to each rank.
void MessageHops::write_second_tables(const std::vector<Forward>& forwards) const {
  const auto table_to = [&](int final) {
    return reinterpret_cast<std::int64_t*>(second_headers_.content_to(final));
  };
  for (int peer = 0; peer < ranks_; ++peer)
    std::fill_n(table_to(peer), tables_.origins(direction_, me_, peer).size(), 0);
  for (const auto& [messages, data] : forwards) {
    if (messages.final == me_) continue;
    const std::span<const int> origins = tables_.origins(direction_, me_, messages.final);
    const auto entry = std::lower_bound(origins.begin(), origins.end(), messages.origin) - origins.begin();
    table_to(messages.final)[entry] = messages.bytes;
  }
}

void MessageHops::exchange_second(std::uint64_t call, const std::vector<Forward>& forwards,
                                  const Wire& wire) {
  in_second_hop_ = exchanging_headers_ = true;
  write_second_tables(forwards);
  const std::vector<FollowingMessages> following = exchange_second_headers(
      second_headers_, {call, me_, second_outbox_.bytes, message_bytes_, options_.window}, wire);
  exchanging_headers_ = false;
  for (int peer = 0; peer < ranks_; ++peer)
    second_inbox_.bytes[at(peer)] = peer == me_ ? 0 : following[at(peer)].bytes;
  second_inbox_.place();
  transfer(second_outbox_, second_inbox_, following, call, wire);
  for (int relay = 0; relay < ranks_; ++relay) {
    if (relay == me_) continue;
    const auto* entry = reinterpret_cast<const std::int64_t*>(second_headers_.content_from(relay));
    const std::byte* data = second_inbox_.block(relay);
    const std::span<const int> origins = tables_.origins(direction_, relay, me_);
    require_parts(entry, origins.size(), second_inbox_.bytes[at(relay)], relay, wire);
    for (const int origin : origins) {
      const std::int64_t bytes = *entry++;
      if (bytes == 0) continue;
      delivered_[at(origin)] = {data, bytes};
      data += bytes;
    }
  }
}

}  // namespace ferry::collective
