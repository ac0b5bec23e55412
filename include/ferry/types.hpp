// Enumerations and limits that every other header uses, and the symbols in which shapes are written.
//
// Shapes of arrays are written in brackets, the slowest dimension first: [N, K].
//
//   N  tokens of this rank in this call              R  ranks of the group
//   T  most tokens of a rank in a call (max_tokens)  E  experts of the layer, on all ranks together
//   K  experts that a token chooses (top_k)          L  experts of one rank (local experts)
//   H  columns of a token (hidden)                   S  shared experts, which every rank holds
//   G  groups of received rows: S + L, or R with rank_major
//
// A slot is one of a token's K choices. A route is a slot that holds an expert: (token, slot) -> expert.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ferry {

/// Type of floating-point values.
enum class DType : int { bf16 = 0, fp16 = 1, fp32 = 2 };

/// Type of expert ids.
enum class IdType : int { int32 = 0, int64 = 1 };

/// Bytes of one value.
constexpr std::int64_t bytes_of(DType type) {
  return type == DType::fp32 ? 4 : 2;
}
/// Bytes of one id.
constexpr std::int64_t bytes_of(IdType type) {
  return type == IdType::int64 ? 8 : 4;
}

/// How dispatch arranges the rows that a rank receives. docs/contract.md gives the position of every row.
///
/// - `expert_major`: one array of rows, sorted by local expert, then source rank, source token and slot. The
///   rows of an expert start at a multiple of `Config::alignment`.
/// - `expert_padded`: [G, capacity, H], with the same order inside each expert.
/// - `rank_major`: one row for each (source rank, token) that has an expert on this rank, sorted by source
///   rank, then token. The caller sums a token's local experts before combine.
/// - `expert_indexed`: positions are numbered as the rows of `expert_major`, but each token is stored once,
///   in the order of `rank_major`: position p holds row DispatchResult::index[p]. Combine takes outputs by
///   position. Host memory only.
enum class Layout : int { expert_major = 0, expert_padded = 1, rank_major = 2, expert_indexed = 3 };

/// How combine adds a token's rows: y = sum of w * v over its slots, with v an expert's row and w its weight.
///
/// - `partial`: each rank adds its rows of the token in slot order and rounds once; the token's source rank
///   adds these partial sums as ReductionLevel says. Transfers the least.
/// - `exact`: every row returns to the source rank, which adds them in slot order. The result does not depend
///   on the number of ranks or the placement.
/// - `unreduced`: every row returns and is not added: the result is [N, K, H].
enum class Reduction : int { partial = 0, exact = 1, unreduced = 2 };

/// In which steps `partial` adds the sums of the ranks. `exact` and `unreduced` ignore it.
///
/// - `rank`: the source rank adds the sums of all ranks, in rank order.
/// - `node`: the sums of a node's ranks are added first, in rank order, and rounded once to
///   Config::combine_type. This holds for the source rank's own node too. The source rank then adds these
///   node sums in node order.
/// - `automatic`: `node` if the group has several nodes, else `rank`; `rank` with replicated input and with
///   Transfer::gather.
enum class ReductionLevel : int { automatic = 0, rank = 1, node = 2 };

/// Whose tokens the ranks pass to dispatch.
///
/// - `own`: each rank has tokens of its own.
/// - `replicated`: every rank passes the same tokens and ids. Each keeps the routes to its own experts and
///   nothing travels. Combine gives each rank its own sum, for an all-reduce of the caller's.
enum class Input : int { own = 0, replicated = 1 };

/// To which ranks dispatch sends a token. Received rows and results do not depend on it.
///
/// - `routed`: to the ranks that hold its experts.
/// - `gather`: to every rank. Each rank returns one sum for every token, +0 where it holds none of its
///   experts.
enum class Transfer : int { routed = 0, gather = 1 };

/// The implementation that carries out an exchange.
///
/// - `reference`: reserved. Records of earlier versions name it; a configuration that asks for it is refused.
/// - `cpu`: ranks of one host, which share memory.
/// - `cuda`: GPUs of one host.
/// - `collective`: ranks of any hosts; an engine carries the messages (EngineKind).
/// - `nvshmem`: GPUs of any hosts; kernels put the messages across hosts.
/// - `automatic`: by Config::memory and the hosts of the ranks, the same on every rank, and never by an
/// array:
///   host memory takes `cpu` on one host and `collective` on several; device memory takes `cuda` on one host,
///   and on several `nvshmem` if every rank can load it, else `collective` with the engine `nccl`. A named
///   Config::engine takes `collective`. Nodes that a group of threads or processes simulates are one host.
enum class BackendKind : int {
  automatic = -1,
  reference = 0,
  cpu = 1,
  cuda = 2,
  collective = 3,
  nvshmem = 4
};

/// Whether the kernels of `backend` work on the arrays of a call, which lie in device memory: `cuda` and
/// `nvshmem`. `collective` has either memory.
constexpr bool has_kernels(BackendKind backend) {
  return backend == BackendKind::cuda || backend == BackendKind::nvshmem;
}

/// The transport between ranks that the backend `collective` uses: `mpi` is MPI, `custom` functions of the
/// caller, `automatic` the group's own engine. `nccl` is NCCL on device memory, in any group;
/// it needs a GPU for each rank.
enum class EngineKind : int { automatic = 0, mpi = 1, custom = 2, nccl = 3 };

/// Where an exchange takes and leaves its arrays: in host memory, or in the memory of the rank's CUDA device.
/// `automatic` is `device` with the backends `cuda` and `nvshmem` and with the engine `nccl`, else `host`,
/// also with the backend `automatic`. With that backend it decides which one that is. Only `collective` has
/// both.
enum class MemoryKind : int { automatic = 0, host = 1, device = 2 };

/// How messages reach ranks of other nodes.
///
/// - `one`: straight to each rank.
/// - `two`: once for each token and node, to a relay that forwards them there.
/// - `automatic`: `two` with `nvshmem` on several nodes if max_tokens * hidden > 14,336; `two` with
///   `collective` on host memory if one of several nodes has several ranks; else, and with gather, `one`.
enum class Hops : int { automatic = 0, one = 1, two = 2 };

/// Names as they are written above; "unknown" for a value that is not an enumerator. Static strings.
const char* to_string(DType type);
const char* to_string(Layout layout);
const char* to_string(Reduction reduction);
const char* to_string(ReductionLevel level);
const char* to_string(Input input);
const char* to_string(Transfer transfer);
const char* to_string(BackendKind backend);
const char* to_string(EngineKind engine);
const char* to_string(Hops hops);
const char* to_string(MemoryKind memory);

/// A stream of a device backend (cuda: a `cudaStream_t`; null is the default stream). Host backends use none.
struct Stream {
  void* handle = nullptr;
};

inline constexpr int kMaxTopK = 32;           ///< largest K
inline constexpr int kMaxSharedExperts = 16;  ///< largest S
inline constexpr int kMaxParts = 4;           ///< most parts of a row, see Format

}  // namespace ferry
