// The block of fixed size that every rank sends to every other one in each call: its call header and summary.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/error_record.hpp"
#include "group/call_agreement.hpp"
#include "memory/local_memory.hpp"

namespace ferry::collective {

// Zero bytes in all but the summary of a rank that has not called yet.
struct BlockHeader {
  std::int32_t lane;
  Operation operation;
  std::uint64_t call;
  std::int64_t message_bytes;  // that follow for the receiver of the block
  std::int32_t refused;        // 1: `refusal` holds the error
  std::int32_t option_count;
  std::array<std::int64_t, kMaxCallOptions> options;
  ErrorRecord refusal;
};

// The blocks to and from all ranks. A block is a BlockHeader, then the summary, aligned to 64 bytes.
class PairBlocks {
 public:
  static constexpr std::int64_t block_bytes(std::int64_t summary_bytes) {
    return kHeaderBytes + (summary_bytes + 63) / 64 * 64;
  }
  static constexpr std::int64_t bytes(int ranks, std::int64_t summary_bytes) {
    return 2 * ranks * block_bytes(summary_bytes);
  }

  PairBlocks(int ranks, std::int64_t summary_bytes)
      : ranks_(ranks), block_(block_bytes(summary_bytes)), memory_(bytes(ranks, summary_bytes)) {}

  std::int64_t block_bytes() const { return block_; }
  std::int64_t offset(int peer) const { return peer * block_; }
  std::byte* sent() const { return memory_.data(); }
  std::byte* received() const { return memory_.data() + ranks_ * block_; }

  BlockHeader& header_to(int peer) const { return *reinterpret_cast<BlockHeader*>(sent() + offset(peer)); }
  const BlockHeader& header_from(int peer) const {
    return *reinterpret_cast<const BlockHeader*>(received() + offset(peer));
  }
  // A received block has not arrived() from forget() until it is received: calls are numbered from 1.
  void forget(int peer) const { reinterpret_cast<BlockHeader*>(received() + offset(peer))->call = 0; }
  bool arrived(int peer) const { return header_from(peer).call != 0; }

  std::byte* summary_to(int peer) const { return sent() + offset(peer) + kHeaderBytes; }
  const std::byte* summary_from(int peer) const { return received() + offset(peer) + kHeaderBytes; }

 private:
  static constexpr std::int64_t kHeaderBytes = (sizeof(BlockHeader) + 63) / 64 * 64;

  int ranks_;
  std::int64_t block_;
  LocalMemory memory_;
};

}  // namespace ferry::collective
