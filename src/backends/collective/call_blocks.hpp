// The blocks that the ranks exchange at the beginning of every call: what each rank calls, its summary, and
// what messages follow.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backends/collective/message_hops.hpp"
#include "backends/collective/pair_blocks.hpp"
#include "engine/engine.hpp"
#include "group/agreement.hpp"

namespace ferry::collective {

class CallBlocks {
 public:
  // `summary_bytes`: of a block's content that the user of a call fills in. A table for the messages follows
  // (`tables`: MessageHops::tables()). `first_bytes`: of Communicator; no block is smaller.
  CallBlocks(int me, int ranks, std::int64_t summary_bytes, const TableBytes& tables,
             std::int64_t first_bytes);
  // Bytes of all blocks with Communicator::kFirstBytes.
  static std::int64_t bytes(std::int64_t summary_bytes, int ranks, const TableBytes& tables);

  std::byte* summary_to(int peer) const { return blocks_.content_to(peer); }
  // summary_from(me) is this rank's own block.
  const std::byte* summary_from(int peer) const {
    return peer == me_ ? blocks_.content_to(me_) : blocks_.content_from(peer);
  }
  std::int64_t* table_to(int peer) const { return table_in(blocks_.content_to(peer)); }
  const std::int64_t* table_from(int peer) const { return table_in(summary_from(peer)); }
  FollowingMessages following(int peer) const {
    return peer == me_ ? blocks_.header_to(me_).messages : blocks_.header_from(peer).messages;
  }

  // What this rank calls. `refusal`: null if it does not refuse.
  struct Call {
    int lane, lane_number;
    CallTerms terms;
    const ErrorRecord* refusal;
  };
  // Writes the headers, and closes the blocks. Nothing may have arrived yet.
  void write(const Call& call, const MessageHops& messages);

  // True if a block is larger than `first_bytes`, so that a second transfer follows. The same on all ranks:
  // without tables all blocks have one size.
  bool have_more_than(std::int64_t first_bytes) const {
    return has_tables_ || blocks_.sent_bytes(0) > first_bytes;
  }
  // Transfers the bytes of all blocks from `begin` on, up to `end`. Empty: up to their end.
  void transfer(std::int64_t begin, std::optional<std::int64_t> end,
                const std::function<void(const AllToAllV&)>& transfer) const;

  bool arrived(int peer) const { return blocks_.arrived(peer); }
  // After transfers: what is wrong with the header, or the whole block, of a peer; empty: nothing.
  std::string fault_of_header(int peer) const;
  std::string fault_of_block(int peer) const;

  // True if the peer's header belongs to the same call of the same lane.
  bool is_same_call(int peer, const Call& call) const;
  // Every rank has the headers of all, so all ranks throw if two have made different calls.
  void require_same_order(const Call& call) const;
  // Throws if some rank has refused the call, or has made another one. Every rank has all blocks, and all
  // ranks throw if two blocks differ.
  void require_agreement(const Call& call) const;

 private:
  std::int64_t* table_in(const std::byte* content) const;
  std::string fault(int peer, bool sealed, bool arrived) const;

  const int me_, ranks_;
  const std::int64_t summary_bytes_;
  const bool has_tables_;
  PairBlocks<BlockHeader> blocks_;
};

}  // namespace ferry::collective
