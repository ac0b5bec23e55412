// Small words shared by every header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ferry {

enum class DType : int { bf16 = 0, fp16 = 1, fp32 = 2 };
enum class IdType : int { int32 = 0, int64 = 1 };

constexpr std::int64_t bytes_of(DType type) {
  return type == DType::fp32 ? 4 : 2;
}
constexpr std::int64_t bytes_of(IdType type) {
  return type == IdType::int64 ? 8 : 4;
}

// How received rows are arranged.
//   expert_major   by local expert, then source rank, source token, slot; experts start aligned
//   expert_padded  [local experts, capacity, hidden], the same order inside an expert
//   rank_major     one row for each (source rank, token) with an expert here, by source rank, then token
enum class Layout : int { expert_major = 0, expert_padded = 1, rank_major = 2 };

// How combine adds the rows of a token (y = output, v = an expert's row, w = its weight).
//   partial    each rank adds its rows of the token in slot order, rounds once; home adds the ranks in order
//   exact      every row goes home; home adds them in slot order; independent of ranks and placement
//   unreduced  every row goes home and stays apart: [tokens, top_k, hidden]
enum class Reduction : int { partial = 0, exact = 1, unreduced = 2 };

enum class BackendKind : int { reference = 0, cpu = 1, cuda = 2 };

const char* to_string(DType type);
const char* to_string(Layout layout);
const char* to_string(Reduction reduction);
const char* to_string(BackendKind backend);

// A stream of the backend. The CPU backends run in the caller's thread and take none.
struct Stream {
  void* handle = nullptr;
};

inline constexpr int kMaxTopK = 32;
inline constexpr int kMaxParts = 4;

}  // namespace ferry
