// A fused call's rows in chunks: little staging, written and read in turn, stays in the caches.
//
// Every rank does this:
//
//   send chunk 0, post, wait for every peer
//   receive chunk c; send chunk c + 1, post it, wait for every peer's; c = c + 1
//
// Chunk c lies in half c & 1 of a window of two chunks. What p writes to r in chunk c + 2 overwrites chunk c:
// before that p has seen r's chunk c + 1, which r posts only after it has read chunk c.
//
// A send half waits for nobody, so it stages everything at once, each row at a place of its own. If any rank
// gives a call in halves there is no window: fused ranks send chunk 0, and after every peer's post all the
// rest.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

#include "group/channel.hpp"
#include "layout/exchange_layout.hpp"

namespace ferry::cpu {

// What the windows of all ranks take together: a share of a large cache, in which rows pass through as well.
// The same on every rank. Tests set less.
inline std::atomic<std::int64_t> chunk_budget{8 << 20};

// Chunks of a dispatch: messages to one rank.
inline std::int64_t messages_of_chunk(const ExchangeShape& shape) {
  const std::int64_t pairs = std::int64_t{shape.ranks} * std::max(1, shape.ranks - 1);
  return std::max<std::int64_t>(1, chunk_budget / (2 * pairs * shape.message_bytes));
}

// Chunks of a combine: tokens at home.
inline std::int64_t tokens_of_chunk(const ExchangeShape& shape) {
  const std::int64_t token_bytes = shape.combine_rows / shape.max_tokens * shape.combine_row_bytes;
  return std::max<std::int64_t>(1, chunk_budget / (2 * shape.ranks * token_bytes));
}

class Chunks {
 public:
  // A call starts: a chunk's rows, and whether this rank gives it in halves.
  void start(std::int64_t rows, bool split, int ranks) {
    rows_ = rows;
    split_ = any_split_ = split;
    any_fused_ = false;
    most_ = 0;
    fused_.assign(static_cast<std::size_t>(ranks), 0);
  }

  // What each rank, this one too, has said in its note: its form, and how many rows it has for a peer at
  // most.
  void note(int rank, bool split, std::int64_t rows) {
    fused_[static_cast<std::size_t>(rank)] = !split;
    any_split_ |= split;
    any_fused_ |= !split;
    most_ = std::max(most_, rows);
  }

  // Rows [begin, end) of a chunk. The last one takes all that is left.
  std::int64_t begin(std::int64_t chunk) const { return chunk * rows_; }
  std::int64_t end(std::int64_t chunk) const { return chunk + 1 < count() ? (chunk + 1) * rows_ : kAll; }
  // Of chunk 0, before the notes of others are here.
  std::int64_t first_end() const { return split_ ? kAll : rows_; }

  // Where a row lies: in the window, or at a place of its own.
  std::int64_t place(std::int64_t row) const { return any_split_ ? row : row % (2 * rows_); }

  // After chunk 0 has come from every rank and every note has been taken: calls receive(chunk) for all chunks
  // and send(chunk) for those after the first.
  template <class Receive, class Send>
  void play(Channel& channel, int me, Receive receive, Send send) const {
    const int ranks = static_cast<int>(fused_.size());
    for (std::int64_t chunk = 0; chunk < count(); ++chunk) {
      for (int step = 1; chunk > 0 && step < ranks; ++step) {
        const int peer = (me + step) % ranks;
        if (fused_[static_cast<std::size_t>(peer)]) channel.wait_chunk(peer, chunk);
      }
      receive(chunk);
      if (split_ || chunk + 1 == count()) continue;
      send(chunk + 1);
      for (int step = 1; step < ranks; ++step) channel.post_chunk((me + step) % ranks, chunk + 1);
    }
  }

 private:
  static constexpr std::int64_t kAll = std::numeric_limits<std::int64_t>::max();

  std::int64_t count() const {
    const std::int64_t full = std::max<std::int64_t>(1, (most_ + rows_ - 1) / rows_);
    if (!any_split_) return full;
    return any_fused_ ? std::min<std::int64_t>(2, full) : 1;
  }

  std::int64_t rows_ = 1;
  bool split_ = false;
  std::vector<char> fused_;  // [R] ranks that send in chunks
  std::int64_t most_ = 0;
  bool any_split_ = false, any_fused_ = false;
};

}  // namespace ferry::cpu
