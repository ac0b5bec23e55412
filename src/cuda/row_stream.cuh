// Rows on their way to one warp: a ring of stages in shared memory that bulk copies fill ahead of the reads.
//
// The rows of a job (a token's rows that are added, or that are copied) have the same size and are walked in
// pieces: the first piece of every row, in the order given, then the second of every row, and so on. The ring
// is filled across jobs: while the last pieces of one are read, the first of the next are on their way.
#pragma once

#include "cuda/ptx.cuh"

namespace ferry::cuda {

inline constexpr int kPieceBytes = 2048;  // four accesses of 16 bytes by each thread of a warp
inline constexpr int kPiecesInFlight = 6;
inline constexpr int kMaxRowsOfJob = 64;  // sums of up to 32 ranks, rows of up to 32 slots

// Which piece is copied next. The first thread's alone, in shared memory because registers are scarce.
struct alignas(16) StreamFill {
  std::int32_t row, rows, queued_rows;  // of the job, and of the job after it; no rows: no job
  std::int32_t at;                      // byte of the rows
  std::int32_t list, to_fill, in_flight, row_bytes;
};

// Shared memory of a warp's stream; the pieces first, for their alignment.
struct alignas(128) StreamMemory {
  std::byte piece[kPiecesInFlight][kPieceBytes];
  const std::byte* row[2][kMaxRowsOfJob];  // of the job that is read and of the one after it
  std::uint64_t arrival[kPiecesInFlight];
  StreamFill fill;
};

// All threads of the warp call everything; the first does the copying.
class RowStream {
 public:
  // By one thread of each warp, once a launch; the block synchronises before anything is queued.
  __device__ static void init() {
    for (std::uint64_t& arrival : memory()->arrival) arrival_init(&arrival);
    fence_arrival_init();
    memory()->fill = StreamFill{};
  }

  // Of all jobs from here on. Nothing is queued.
  __device__ __forceinline__ void set_row_bytes(std::int64_t bytes) {
    if (threadIdx.x % 32 == 0) memory()->fill.row_bytes = static_cast<std::int32_t>(bytes);
  }

  // Threads write the rows of the job they queue next here. At most two jobs are queued and not yet finished,
  // those without rows not counted.
  __device__ __forceinline__ const std::byte** rows_to_queue() const { return memory()->row[to_queue_]; }

  // `rows`: of the job; what makes them readable to any of the warp's threads comes before.
  __device__ __forceinline__ void queue(int rows) {
    if (rows == 0) return;
    // Orders the rows' addresses, and what the threads have acquired, before the first thread's copies.
    __syncwarp();
    to_queue_ ^= 1;
    if (threadIdx.x % 32 != 0) return;
    StreamFill fill = memory()->fill;
    if (fill.rows == 0) {
      fill.rows = rows;
    } else {
      fill.queued_rows = rows;
    }
    while (fill.rows != 0 && fill.in_flight < kPiecesInFlight) start_copy(fill);
    memory()->fill = fill;
  }

  // The next piece, when it is here.
  __device__ __forceinline__ const uint4* await_piece() {
    __syncwarp();  // the first thread is back from its copies: all go on as one
    arrival_wait(&memory()->arrival[read_], parity_);
    return reinterpret_cast<const uint4*>(memory()->piece[read_]);
  }

  // This thread has read what it needs of the piece.
  __device__ __forceinline__ void release_piece() {
    if (++read_ == kPiecesInFlight) {
      read_ = 0;
      parity_ ^= 1;
    }
    // All threads' reads before the copy that overwrites them.
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    StreamFill fill = memory()->fill;
    --fill.in_flight;
    // The ring was full, or there was nothing to fill it with: at most one copy can start.
    if (fill.rows != 0) start_copy(fill);
    memory()->fill = fill;
  }

 private:
  // A launch's dynamic shared memory is the streams of its warps.
  __device__ __forceinline__ static StreamMemory* memory() {
    extern __shared__ __align__(128) std::byte memory_of_streams[];
    return reinterpret_cast<StreamMemory*>(memory_of_streams) + threadIdx.x / 32;
  }

  __device__ __forceinline__ void start_copy(StreamFill& fill) const {
    const auto bytes = static_cast<std::uint32_t>(min(kPieceBytes, fill.row_bytes - fill.at));
    std::uint64_t* arrival = &memory()->arrival[fill.to_fill];
    // What this thread is ordered after, by the barriers above, before the copy engine's accesses.
    fence_before_bulk();
    arrival_expect(arrival, bytes);
    bulk_load(memory()->piece[fill.to_fill], memory()->row[fill.list][fill.row] + fill.at, bytes, arrival);
    ++fill.in_flight;
    if (++fill.to_fill == kPiecesInFlight) fill.to_fill = 0;
    if (++fill.row < fill.rows) return;
    fill.row = 0;
    fill.at += kPieceBytes;
    if (fill.at < fill.row_bytes) return;
    fill.at = 0;
    fill.list ^= 1;
    fill.rows = fill.queued_rows;
    fill.queued_rows = 0;
  }

  int to_queue_ = 0;  // which of the two lists of rows
  int read_ = 0;      // the piece that is read
  std::uint32_t parity_ = 0;
};

}  // namespace ferry::cuda
