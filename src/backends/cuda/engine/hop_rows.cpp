// Two hops of a combine's rows: to the relay of their source rank, which adds them if sums are by node.
#include <algorithm>

#include "backends/cuda/engine/device_hops.hpp"
#include "group/fault_points.hpp"

namespace ferry::cuda {

// The rows for one stop are contiguous, in ascending order of their source ranks. Rows that this rank sends
// in the second hop are not moved.
void DeviceHops::pack_rows() {
  first_ = empty_blocks(nullptr);
  table_ = sent_.bytes;
  for (int final = 0; final < ranks_; ++final) {
    if (first_stop(final) != me_) first_.bytes[at(first_stop(final))] += sent_.bytes[at(final)];
  }
  place(first_, first_outbox_);
  std::vector<std::int64_t> next = first_.offsets;
  for (int final = 0; final < ranks_; ++final) {
    const int stop = first_stop(final);
    if (stop == me_) continue;
    copy(first_.base + next[at(stop)], sent_.send + sent_.offsets[at(final)], sent_.bytes[at(final)]);
    next[at(stop)] += sent_.bytes[at(final)];
  }
}

void DeviceHops::exchange_rows(std::uint64_t call, const Following& first, const Tables& table,
                               const Wire& wire) {
  Blocks received = empty_blocks(nullptr);
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == me_) continue;
    received.bytes[at(peer)] = first[at(peer)].bytes;
    if (same_node(me_, peer))
      count(peer, first_.bytes[at(peer)] / sent_.message_bytes, first_.bytes[at(peer)]);
  }
  place(received, first_inbox_);
  transfer(first_, received, first, wire);
  fault_point(FaultPoint::relay_holds, me_);
  // By source rank: the rows that the ranks of this node, ascending, send to it.
  std::vector<std::vector<ArrivedRows>> held(at(ranks_));
  for (const int origin : topology_.ranks_of(node_)) {
    const std::byte* data = origin == me_ ? nullptr : received.block(origin);
    std::int64_t left = received.bytes[at(origin)];
    for (int final = 0; final < ranks_; ++final) {
      if (origin == me_) {
        if (relays_for(final))
          held[at(final)].push_back(
              {sent_.send + sent_.offsets[at(final)], sent_.bytes[at(final)] / sent_.message_bytes});
        continue;
      }
      const std::int64_t bytes = table(origin)[final];
      if (final != me_ && !relays_for(final)) continue;
      if (bytes < 0 || bytes > left) wire.fail(collective::counts_fault(origin));
      if (final == me_) {
        received_[at(origin)] = bytes;
        incoming_[at(origin)] = data;
      } else {
        held[at(final)].push_back({data, bytes / sent_.message_bytes});
      }
      data += bytes;
      left -= bytes;
    }
  }
  forward_rows(held);
  second_hop(call, wire);
  for (int relay = 0; relay < ranks_; ++relay) {
    if (same_node(me_, relay)) continue;
    received_[at(relay)] = second_received_.bytes[at(relay)];
    incoming_[at(relay)] = second_received_.block(relay);
  }
}

// Makes the rows for each source rank in the second outbox.
void DeviceHops::forward_rows(const std::vector<std::vector<ArrivedRows>>& held) {
  const LaneView& view = lane_.view();
  const std::int64_t row_bytes = sent_.message_bytes;
  for (int source = 0; source < ranks_; ++source) {
    std::int64_t rows = 0;
    for (const ArrivedRows& each : held[at(source)]) rows += each.count;
    second_.bytes[at(source)] =
        (kind_.adds ? std::min<std::int64_t>(rows, view.max_tokens) : rows) * row_bytes;
  }
  place(second_, second_outbox_);
  auto* const counts = reinterpret_cast<std::int32_t*>(counts_.data());
  for (int source = 0; source < ranks_; ++source) {
    if (second_.bytes[at(source)] == 0) continue;
    std::byte* out = second_.block(source);
    if (kind_.adds) {
      lane_.add_for_relay(held[at(source)], out, counts + source, stream_.get());
      continue;
    }
    for (const ArrivedRows& each : held[at(source)]) {
      copy(out, each.rows, each.count * row_bytes);
      out += each.count * row_bytes;
    }
  }
  stream_.synchronize();
  for (int source = 0; source < ranks_; ++source) {
    std::fill_n(reinterpret_cast<std::int64_t*>(second_headers_.content_to(source)), ranks_, 0);
    if (kind_.adds && second_.bytes[at(source)] != 0) second_.bytes[at(source)] = counts[source] * row_bytes;
    if (second_.bytes[at(source)] != 0)
      count(source, second_.bytes[at(source)] / row_bytes, second_.bytes[at(source)]);
  }
}

}  // namespace ferry::cuda
