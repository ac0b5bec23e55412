// The configuration of an exchange (sizes of the layer, layout of received rows, formats, backend), and
// functions that compute the memory it takes.
#pragma once

#include <cstdint>

#include "ferry/format.hpp"
#include "ferry/placement.hpp"
#include "ferry/topology.hpp"
#include "ferry/types.hpp"

namespace ferry {

/// The configuration of an exchange. It must be the same on every rank: construction compares the
/// configurations and names the first field that differs. Symbols such as T and K are explained in
/// ferry/types.hpp.
struct Config {
  int experts = 0;  ///< E, 1 to 2^20
  int top_k = 0;    ///< K, 1 to kMaxTopK
  int hidden =
      0;  ///< H, 1 to 2^24; a row of combine_type is a multiple of 16 bytes. Not used by raw dispatches
  int max_tokens = 0;  ///< T, 1 to 2^24: most tokens of a rank in a call

  BackendKind backend = BackendKind::automatic;  ///< Exchange::config() says which it is
  EngineKind engine =
      EngineKind::automatic;  ///< collective: `nccl`, or the engine that the group must have brought
  /// Where all arrays lie. `automatic`: see MemoryKind; with no backend and engine named, host memory.
  /// Python's `automatic` asks the group first (Group.torch() with NCCL, Group.custom(default_memory=...)).
  MemoryKind memory = MemoryKind::automatic;
  Hops hops = Hops::automatic;  ///< received rows do not depend on it
  /// Bounds what one rank has on its way to another. Results do not depend on it.
  /// collective: most messages of a round of a call; every round costs a round trip. 0: a hop is one round.
  /// cpu, cuda and nvshmem in two hops: for how many of the largest messages a pair of ranks has staging, at
  /// most. 0: 4 MiB a rank and lane (cuda, nvshmem: up to 24 MiB for each hop), and at least one message a
  /// pair.
  int window = 0;
  Placement placement{};  ///< of E experts on R ranks; empty: Placement::blocks(experts, ranks)
  /// Places for experts on every rank, which fix groups, capacities and sizes whatever the placement: at
  /// least the most experts of a rank. Groups without an expert come last, have no rows, and their
  /// `group_expert` is -1. 0: each rank has as many as the placement gives it experts. Not with experts in
  /// slices.
  int local_slots = 0;

  /// S, 0 to kMaxSharedExperts: experts that every rank holds and every token goes to. Their rows never
  /// travel and come first: groups 0 to S - 1 hold this rank's tokens in order. Combine adds their outputs
  /// with weight 1. Not with rank_major.
  int shared_experts = 0;

  /// `replicated` takes the reduction `partial` at level rank only.
  Input input = Input::own;
  /// W, 0 to R; with replicated input and shared experts. Ranks r < W take tokens [r*N/W, (r+1)*N/W) as their
  /// shared rows and the others none, so that the sum over all ranks holds the shared experts once. 0: every
  /// rank takes all tokens.
  int shared_split = 0;
  /// `gather` takes the reduction `partial` at level rank only, expert layouts, own input and one hop; not
  /// the backend `nvshmem`.
  Transfer transfer = Transfer::routed;

  Layout layout = Layout::expert_major;
  /// expert_major, expert_indexed: each expert's rows start at a multiple of it. expert_padded: each expert's
  /// rows are padded to a multiple of it. rank_major: must be 1.
  int alignment = 1;
  /// Rows that a rank can receive in a call, a multiple of `alignment`: with expert_major all rows of its
  /// experts, shared ones and the padding between them included; with expert_indexed the same of positions,
  /// while no row is ever dropped; with expert_padded the rows of each expert;
  /// with rank_major one row for each token that has an expert here. Rows beyond it are dropped and reported
  /// by an OverflowError. 0: enough for any routing in which no token lists an expert more than once; with
  /// `repeats`, enough for any routing. docs/contract.md has the formulas.
  std::int64_t capacity = 0;
  bool repeats = false;       ///< the default capacity has room for tokens that list an expert more than once
  bool zero_padding = false;  ///< padding rows are zeroed instead of left untouched

  Format format = Format::bf16();    ///< default of each dispatch; no dispatch may have larger messages
  DType combine_type = DType::bf16;  ///< type of the rows that combine transfers
  /// Default of each combine. `partial` takes T*min(K, R) rows of staging and then allows no other reduction;
  /// `exact` and `unreduced` take T*K rows and allow all three. rank_major: must be partial.
  Reduction reduction = Reduction::partial;
  /// How `partial` adds. Construction replaces `automatic` by what it stands for in the group. cuda in one
  /// hop: `rank`.
  ReductionLevel reduction_level = ReductionLevel::automatic;

  /// Layers of a model that share the exchange, 1 to 4096: load_counts() counts the dispatches of each apart.
  int layers = 1;
  int lanes = 1;           ///< independent sequences of calls, each with its own staging memory: 1 to 64
  double deadline = 30.0;  ///< longest wait for a peer, in seconds; positive and finite
  /// true: the exchange owns memory for the rows it receives. false: every dispatch passes ReceiveBuffers.
  bool own_receive_buffers = true;
  bool check_calls = true;   ///< host backends: every call ends with Exchange::check()
  bool count_waits = false;  ///< host memory: Exchange::wait_times() adds up the waits for every peer

  friend bool operator==(const Config&, const Config&) = default;
};

/// Bytes that an exchange takes on one rank, by purpose. all_gather_v and reduce_scatter_v use the dispatch
/// staging, in rounds where it is too small, and take nothing more.
struct Sizes {
  // Symmetric memory, which peers write. `collective` has none. In two hops dispatch_staging is
  // the windows of all lanes, which dispatch and combine share and which do not grow with T.
  std::int64_t dispatch_staging = 0;  ///< 2 * lanes * R*T messages
  std::int64_t combine_staging = 0;   ///< 2 * lanes * T*min(K, R) rows, or T*K; Transfer::gather: T*R
  std::int64_t signals = 0;           ///< flags, counts and refusals
  std::int64_t results = 0;           ///< received rows and their arrays, all lanes
  std::int64_t plans = 0;             ///< plans and working memory, all lanes
  /// collective; cpu, cuda and nvshmem in two hops: what a rank packs, forwards and receives in own memory.
  /// About lanes * (R*T + T*min(K, R)) messages, with two hops also what it passes on and receives by relays.
  std::int64_t messages = 0;
  std::int64_t total() const {
    return dispatch_staging + combine_staging + signals + results + plans + messages;
  }
};

/// The exact bytes that an exchange of this configuration maps on rank `rank` of `ranks`, which are on one
/// node. Local; needs no group and allocates nothing. Builds without CUDA know the sizes of GPU backends too.
/// @throws UsageError, UnsupportedError  whatever construction would refuse; a rank outside [0, ranks)
Sizes size_of(const Config& config, int ranks, int rank = 0);

/// The bytes for ranks on several nodes, each a host unless Topology::simulated(). They differ where messages
/// take two hops. BackendKind::automatic: as if every rank could load what this process can.
Sizes size_of(const Config& config, const Topology& topology, int rank = 0);

/// Rows that `rank` can receive under this configuration (expert_padded: rows of one expert). Local.
/// @throws as size_of()
std::int64_t capacity_of(const Config& config, int ranks, int rank = 0);

/// Bytes of a plan's storage, the same on every rank. Local.
/// @throws as size_of()
std::int64_t plan_bytes(const Config& config, int ranks);

}  // namespace ferry
