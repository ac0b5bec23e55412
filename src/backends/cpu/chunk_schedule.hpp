// Splits the rows of a fused call into chunks that ranks send and receive alternately, so that the staging in
// use is small and stays in the caches.
//
// Every rank runs:
//
//   send chunk 0; post the call; wait for every peer's post
//   for c = 0, 1, ...: receive chunk c; send chunk c + 1; post it; wait for every peer's chunk c + 1
//
// Chunk c occupies slot c & 1 of a window of two chunks. Chunk c + 2 of rank p to rank r overwrites p's chunk
// c. p may do that safely:
//
//   1. Before sending c + 2, p has seen r's post of chunk c + 1.
//   2. r posts chunk c + 1 only after it has read chunk c.
//
// A separate send phase must not wait for its peers, so it stages all rows at once, without a window. If any
// rank splits a call, no rank uses the window: fused ranks send chunk 0, and after every peer's post all the
// rest.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "backends/cpu/link/peer_link.hpp"
#include "layout/exchange_layout.hpp"

namespace ferry::cpu {

// The windows of all ranks together occupy about `budget` bytes. Every rank must pass the same budget.

// Dispatch: messages from one rank to another in a chunk.
inline std::int64_t messages_per_chunk(const ExchangeShape& shape, std::int64_t budget) {
  const std::int64_t pairs = std::int64_t{shape.ranks} * std::max(1, shape.ranks - 1);
  return std::max<std::int64_t>(1, budget / (2 * pairs * shape.message_bytes));
}

// Combine: tokens of the source rank in a chunk.
inline std::int64_t tokens_per_chunk(const ExchangeShape& shape, std::int64_t budget) {
  const std::int64_t token_bytes = shape.combine_rows / shape.max_tokens * shape.combine_row_bytes;
  return std::max<std::int64_t>(1, budget / (2 * shape.ranks * token_bytes));
}

// Here a "row" is what the schedule counts: a message (dispatch) or a token (combine).
class ChunkSchedule {
 public:
  // Starts a call. `split`: this rank calls the send phase and the receive phase separately.
  void start(std::int64_t rows_per_chunk, bool split, int ranks) {
    rows_per_chunk_ = rows_per_chunk;
    split_ = any_split_ = split;
    any_fused_ = false;
    max_rows_ = 0;
    fused_.assign(static_cast<std::size_t>(ranks), 0);
  }

  // Adds what a rank (this one too) sent in its call summary: whether it splits the call, and how many rows
  // its chunks cover.
  void add_rank(int rank, bool split, std::int64_t max_rows) {
    fused_[static_cast<std::size_t>(rank)] = !split;
    any_split_ |= split;
    any_fused_ |= !split;
    max_rows_ = std::max(max_rows_, max_rows);
  }

  // Rows [begin, end) of a chunk. The last chunk has no upper bound.
  std::int64_t begin(std::int64_t chunk) const { return chunk * rows_per_chunk_; }
  std::int64_t end(std::int64_t chunk) const {
    return chunk + 1 < chunks() ? (chunk + 1) * rows_per_chunk_ : kNoBound;
  }
  // End of chunk 0, which is sent before the peers' summaries are known.
  std::int64_t first_end() const { return split_ ? kNoBound : rows_per_chunk_; }

  // Index of a row in the staging: within the window, or, if any rank splits the call, its own index.
  std::int64_t staging_index(std::int64_t row) const {
    return any_split_ ? row : row % (2 * rows_per_chunk_);
  }

  // Call after every rank has posted the call and add_rank() has been called for each. Calls receive(chunk)
  // for every chunk, and send(chunk) for every chunk after the first.
  template <class Receive, class Send>
  void run(PeerLink& link, int rank, Receive receive, Send send) const {
    const int ranks = static_cast<int>(fused_.size());
    for (std::int64_t chunk = 0; chunk < chunks(); ++chunk) {
      for (int step = 1; chunk > 0 && step < ranks; ++step) {
        const int peer = (rank + step) % ranks;
        if (fused_[static_cast<std::size_t>(peer)]) link.wait_chunk(peer, chunk);
      }
      receive(chunk);
      if (split_ || chunk + 1 == chunks()) continue;
      send(chunk + 1);
      link.post_chunk(chunk + 1);
    }
  }

 private:
  static constexpr std::int64_t kNoBound = std::numeric_limits<std::int64_t>::max();

  std::int64_t chunks() const {
    const std::int64_t all = std::max<std::int64_t>(1, (max_rows_ + rows_per_chunk_ - 1) / rows_per_chunk_);
    if (!any_split_) return all;
    return any_fused_ ? std::min<std::int64_t>(2, all) : 1;
  }

  std::int64_t rows_per_chunk_ = 1;
  bool split_ = false;
  std::vector<char> fused_;  // [R] 1: the rank sends in chunks
  std::int64_t max_rows_ = 0;
  bool any_split_ = false, any_fused_ = false;
};

}  // namespace ferry::cpu
