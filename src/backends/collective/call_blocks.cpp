#include "backends/collective/call_blocks.hpp"

#include <algorithm>

#include "base/text.hpp"

namespace ferry::collective {
namespace {

using Blocks = PairBlocks<BlockHeader>;

static_assert(Blocks::kSmallestBlock <= Communicator::kFirstBytes);

constexpr std::int64_t align_summary(std::int64_t bytes) {
  return (bytes + 7) / 8 * 8;
}

// Bytes in the blocks to each rank and from each rank. [R]
TableBytes content_bytes(std::int64_t summary_bytes, int ranks, const TableBytes& tables,
                         std::int64_t first_bytes) {
  // At least so many that all blocks have a first transfer.
  const std::int64_t least = first_bytes - Blocks::kSmallestBlock;
  const std::int64_t summary = align_summary(summary_bytes);
  TableBytes contents;
  for (int peer = 0; peer < ranks; ++peer) {
    contents.sent.push_back(std::max(least, summary + tables.sent_to(peer)));
    contents.received.push_back(std::max(least, summary + tables.received_from(peer)));
  }
  return contents;
}

Blocks make_blocks(const TableBytes& contents) {
  return {contents.sent, contents.received};
}

}  // namespace

std::int64_t CallBlocks::bytes(std::int64_t summary_bytes, int ranks, const TableBytes& tables) {
  const TableBytes contents = content_bytes(summary_bytes, ranks, tables, Communicator::kFirstBytes);
  return Blocks::bytes(contents.sent, contents.received);
}

CallBlocks::CallBlocks(int me, int ranks, std::int64_t summary_bytes, const TableBytes& tables,
                       std::int64_t first_bytes)
    : me_(me),
      ranks_(ranks),
      summary_bytes_(align_summary(summary_bytes)),
      has_tables_(!tables.sent.empty()),
      blocks_(make_blocks(content_bytes(summary_bytes, ranks, tables, first_bytes))) {}

// Null without tables.
std::int64_t* CallBlocks::table_in(const std::byte* content) const {
  if (!has_tables_) return nullptr;
  return reinterpret_cast<std::int64_t*>(const_cast<std::byte*>(content) + summary_bytes_);
}

void CallBlocks::write(const Call& call, const MessageHops& messages) {
  const CallTerms& terms = call.terms;
  for (int peer = 0; peer < ranks_; ++peer) {
    BlockHeader& header = blocks_.header_to(peer);
    header.lane = call.lane;
    header.lane_number = call.lane_number;
    header.operation = terms.operation;
    header.epoch = terms.epoch;
    header.call = terms.call;
    header.messages = messages.announce(peer, table_to(peer));
    header.refused = call.refusal != nullptr ? 1 : 0;
    header.option_count = static_cast<std::int32_t>(terms.options.size());
    for (std::size_t i = 0; i < terms.options.size(); ++i) header.options[i] = terms.options[i].value;
    if (call.refusal != nullptr) header.refusal = *call.refusal;
    blocks_.seal(me_, peer);
    blocks_.forget(peer);
  }
}

void CallBlocks::transfer(std::int64_t begin, std::optional<std::int64_t> end,
                          const std::function<void(const AllToAllV&)>& transfer) const {
  std::vector<std::int64_t> sent_bytes, sent_offsets, received_bytes, received_offsets;
  for (int peer = 0; peer < ranks_; ++peer) {
    sent_bytes.push_back(peer == me_ ? 0 : end.value_or(blocks_.sent_bytes(peer)) - begin);
    received_bytes.push_back(peer == me_ ? 0 : end.value_or(blocks_.received_bytes(peer)) - begin);
    sent_offsets.push_back(blocks_.sent_offset(peer) + begin);
    received_offsets.push_back(blocks_.received_offset(peer) + begin);
  }
  transfer({.send = blocks_.sent(),
            .send_bytes = sent_bytes,
            .send_offsets = sent_offsets,
            .receive = blocks_.received(),
            .receive_bytes = received_bytes,
            .receive_offsets = received_offsets});
}

std::string CallBlocks::fault_of_header(int peer) const {
  return fault(peer, blocks_.is_sealed_header(me_, peer), blocks_.arrived(peer));
}

std::string CallBlocks::fault_of_block(int peer) const {
  return fault(peer, blocks_.is_sealed(me_, peer), blocks_.arrived_whole(peer));
}

std::string CallBlocks::fault(int peer, bool sealed, bool arrived) const {
  if (peer == me_) return {};
  if (sealed) {
    const BlockHeader& header = blocks_.header_from(peer);
    const bool options_fit = header.option_count >= 0 && header.option_count <= kMaxComparedOptions;
    return options_fit ? fault_of(header.messages, peer) : counts_fault(peer);
  }
  return transfer_fault(peer, arrived,
                        str("its block of ", blocks_.received_bytes(peer),
                            " bytes, which holds the call header and the counts"));
}

bool CallBlocks::is_same_call(int peer, const Call& call) const {
  const BlockHeader& header = blocks_.header_from(peer);
  return header.lane_number == call.lane_number && header.call == call.terms.call;
}

void CallBlocks::require_same_order(const Call& call) const {
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == me_ || is_same_call(peer, call)) continue;
    const BlockHeader& header = blocks_.header_from(peer);
    const bool other_exchange = header.lane_number - header.lane != call.lane_number - call.lane;
    throw UsageError(str("call ", call.terms.call, " of lane ", call.lane, " on rank ", me_, " meets call ",
                         header.call, " of lane ", header.lane, other_exchange ? " of another exchange" : "",
                         " on rank ", peer,
                         ": this engine needs the calls of all lanes and exchanges in the same order on all "
                         "ranks"));
  }
}

void CallBlocks::require_agreement(const Call& call) const {
  for (int peer = 0; peer < ranks_; ++peer) {
    const BlockHeader& header = blocks_.header_from(peer);
    if (peer != me_ && header.refused != 0)
      throw_refusal(peer, header.operation, header.call, header.refusal);
  }
  for (int peer = 0; peer < ranks_; ++peer) {
    if (peer == me_) continue;
    const BlockHeader& header = blocks_.header_from(peer);
    require_same_call(call.terms, {peer,
                                   header.epoch,
                                   header.operation,
                                   {header.options.data(), static_cast<std::size_t>(header.option_count)}});
  }
}

}  // namespace ferry::collective
