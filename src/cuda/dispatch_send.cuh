// The sending role of dispatch: tokens go once to every rank that has one of their experts.
//
// Some warps of a block send together. In each round the block takes as many tokens as it has warps to give,
// or fewer with several warps a token; first it counts what comes before them, then it plans and sends them.
// A message is announced by a flag of its own, one round later, when its bytes have arrived.
#pragma once

#include "cuda/encode.cuh"
#include "cuda/findings.cuh"
#include "cuda/places.cuh"
#include "cuda/routing.cuh"
#include "cuda/wait.cuh"

namespace ferry::cuda {

inline constexpr int kSendWarps = 4;
inline constexpr int kSendBarrier = 1;

// What the sending warps of a block share.
struct SendScratch {
  PlannedToken planned[2][kSendWarps];  // of two rounds: one is sent while the next is planned
};

// A message's bytes without its row, by one warp.
__device__ inline void write_message_head(const DispatchArguments& call, std::byte* message,
                                          std::int32_t token, int position, std::int32_t id,
                                          std::int32_t ordinal, float weight) {
  const int slot = threadIdx.x % 32;
  const MessageLayout& layout = call.message.base;
  if (slot == 0) {
    *reinterpret_cast<MessageHead*>(message + layout.head_offset) = MessageHead{token, position};
  }
  if (slot >= call.lane.top_k) return;
  reinterpret_cast<std::int32_t*>(message + layout.ids_offset)[slot] = id;
  reinterpret_cast<float*>(message + layout.weights_offset)[slot] = weight;
  reinterpret_cast<std::int32_t*>(message + call.message.ordinals_offset)[slot] = ordinal;
}

__device__ __forceinline__ const std::byte* token_row(const DispatchArguments& call, int part,
                                                      std::int64_t token) {
  return call.part[part] + token * call.stride[part];
}

// Where a row's bytes go: the stage's content from `offset` of the message, to each destination.
struct Destinations {
  const DispatchArguments& call;
  int generation;
  std::uint32_t ranks;
  const std::int32_t* message;  // by rank

  // First thread of a warp.
  __device__ void store(std::int64_t offset, const std::byte* from_stage, std::uint32_t bytes) const {
    for (std::uint32_t left = ranks; left != 0; left &= left - 1) {
      const int rank = __ffs(static_cast<int>(left)) - 1;
      bulk_store(
          call.lane.message(rank, generation, call.lane.rank, message[rank], call.message.bytes) + offset,
          from_stage, bytes);
    }
  }
};

// By one warp: share `share` of `shares` of a token's row, quantised.
__device__ inline void send_encoded(const DispatchArguments& call, const Destinations& to,
                                    const std::byte* row, Stage& stage, int share, int shares) {
  const int runs = runs_of(call.lane.hidden), last = runs * (share + 1) / shares;
  for (int first = runs * share / shares; first < last; first += kRunsAtOnce) {
    const EncodedRuns piece = encoded_runs(call, first, min(first + kRunsAtOnce, last));
    if (threadIdx.x % 32 == 0) stage.reuse();
    __syncwarp();
    encode_runs(call, row, piece, stage.memory);
    if (threadIdx.x % 32 != 0) continue;
    const std::int64_t* offset = call.message.base.part_offset;
    to.store(offset[0] + piece.first_column, stage.memory, piece.value_bytes);
    to.store(offset[1] + piece.scales_at, stage.memory + piece.scales_in_stage, piece.scale_bytes);
    bulk_commit();
  }
}

// By the first thread of a warp: share `share` of `shares` of a token's row, as it is.
__device__ inline void send_moved(const DispatchArguments& call, const Destinations& to, std::int64_t token,
                                  Stage& stage, int share, int shares) {
  for (int p = 0; p < call.parts.count; ++p) {
    const std::int64_t units = call.parts.part[p].row_bytes / 16;
    const std::int64_t end = units * (share + 1) / shares * 16;
    for (std::int64_t at = units * share / shares * 16; at < end; at += kStageBytes) {
      const auto bytes = static_cast<std::uint32_t>(min(std::int64_t{kStageBytes}, end - at));
      stage.reuse();
      stage.load(token_row(call, p, token) + at, bytes);
      to.store(call.message.base.part_offset[p] + at, stage.memory, bytes);
      bulk_commit();
    }
  }
}

__device__ inline void send_row(const DispatchArguments& call, int generation, std::uint32_t ranks,
                                const std::int32_t* message, std::int64_t token, Stage& stage, int share,
                                int shares) {
  if (!call.own_staged) ranks &= ~(1u << call.lane.rank);
  if (ranks == 0) return;
  const Destinations to{call, generation, ranks, message};
  jitter(call.lane);
  if (call.format == FormatKind::fp8_e4m3) {
    send_encoded(call, to, token_row(call, 0, token), stage, share, shares);
  } else if (threadIdx.x % 32 == 0) {
    send_moved(call, to, token, stage, share, shares);
  }
}

// Bytes and messages to other ranks, for Exchange::wire.
struct Sent {
  unsigned long long messages = 0;

  __device__ void add(const LaneView& lane, std::uint32_t ranks) {
    messages += static_cast<unsigned>(__popc(static_cast<int>(ranks & ~(1u << lane.rank))));
  }
  // By the thread that counted.
  __device__ void publish(const DispatchArguments& call) const {
    if (messages == 0) return;
    add_wire(&call.lane.state->wire.dispatch_messages, messages);
    add_wire(&call.lane.state->wire.dispatch_bytes,
             messages * static_cast<unsigned long long>(call.message.bytes));
  }
};

// By one warp: the flags of a planned token's messages.
__device__ inline void announce(const DispatchArguments& call, std::uint64_t number,
                                const PlannedToken& planned) {
  const int rank = threadIdx.x % 32;
  jitter(call.lane);
  if (rank >= call.lane.ranks || (planned.ranks >> rank & 1) == 0) return;
  // Release at system scope: the message (head by the planning warp, row by the warps' bulk stores, which
  // each issuing thread has seen written; all ordered before this thread by the barrier) before its flag.
  store_release_sys(
      call.lane.dispatch_flag(rank, static_cast<int>(number & 1), call.lane.rank, planned.message[rank]),
      number);
}

// How tokens are shared out: block `index` of `blocks` sends `width` neighbouring tokens a round, each with
// kSendWarps / width warps.
struct SendShare {
  int index, blocks, width;

  __device__ static SendShare of(int index, int blocks, std::int64_t tokens) {
    const std::int64_t each = (tokens + blocks - 1) / blocks;
    return {index, blocks, each <= 1 ? 1 : each <= 2 ? 2 : kSendWarps};
  }
  __device__ std::int64_t first(std::int64_t round) const { return (round * blocks + index) * width; }
};

// By the sending warps of a block: all its tokens, planned from ids. The running counts start at zero.
__device__ inline void send_tokens(const DispatchArguments& call, std::uint64_t number, std::int64_t tokens,
                                   const SendShare& share, const RoutingTables& tables, const PlanView& plan,
                                   SendScratch* scratch, Stage& stage) {
  constexpr int kThreads = 32 * kSendWarps;
  const LaneView& lane = call.lane;
  const int warp = threadIdx.x / 32, slot = threadIdx.x % 32, generation = static_cast<int>(number & 1);
  const int warps_of_token = kSendWarps / share.width, mine = warp / warps_of_token;
  const bool plans = warp < share.width;  // warp w plans the round's token w
  Sent sent;
  std::int64_t counted = 0;
  bool in_flight = false;
  for (std::int64_t round = 0; share.first(round) < tokens; ++round) {
    PlannedToken* planned = scratch->planned[round & 1];
    PlannedToken* before = scratch->planned[~round & 1];
    const std::int64_t first = share.first(round);
    count_tokens(call, tables, counted, first, static_cast<int>(threadIdx.x), kThreads);
    counted = first;
    if (plans) {
      planned[warp].token = -1;
      planned[warp].ranks = 0;
      planned[warp].id[slot] = -1;
      __syncwarp();
      if (first + warp < tokens) plan_ids(call, tables, first + warp, &planned[warp]);
    }
    // Counts and ids of the round are complete.
    sync_threads_of(kSendBarrier, kThreads);
    if (plans && planned[warp].token >= 0) {
      const PlannedToken& own = planned[warp];
      const std::int32_t ordinal = plan_places(lane, tables, plan, planned, warp);
      const bool weighted = call.weights != nullptr && slot < lane.top_k;
      const float weight = weighted ? call.weights[own.token * lane.top_k + slot] : 0.0f;
      for (std::uint32_t left = own.ranks; left != 0; left &= left - 1) {
        const int rank = __ffs(static_cast<int>(left)) - 1;
        const int position = __popc(static_cast<int>(own.ranks & ((1u << rank) - 1)));
        write_message_head(call,
                           lane.message(rank, generation, lane.rank, own.message[rank], call.message.bytes),
                           static_cast<std::int32_t>(own.token), position, own.id[slot], ordinal, weight);
      }
      if (slot == 0) sent.add(lane, own.ranks);
    }
    // The round before: each first thread has seen its own bulk stores written, then all may be announced.
    if (slot == 0) bulk_wait_written();
    sync_threads_of(kSendBarrier, kThreads);
    if (in_flight && plans && before[warp].token >= 0) announce(call, number, before[warp]);
    const PlannedToken& token = planned[mine];
    if (token.token >= 0) {
      send_row(call, generation, token.ranks, token.message, token.token, stage, warp % warps_of_token,
               warps_of_token);
    }
    in_flight = true;
    __syncwarp();
  }
  if (!in_flight) return;
  if (slot == 0) bulk_wait_written();
  sync_threads_of(kSendBarrier, kThreads);
  if (!plans) return;
  for (int round = 0; round < 2; ++round) {
    // Of the last round only; the one before it has been announced.
    const PlannedToken& last = scratch->planned[round][warp];
    if (last.token >= 0 && last.token >= counted) announce(call, number, last);
  }
  if (slot == 0) sent.publish(call);
}

// By one warp of `workers`: its messages by a plan that exists already.
__device__ inline void send_by_plan(const DispatchArguments& call, std::uint64_t number, std::int64_t tokens,
                                    int worker, int workers, const PlanView& plan, Stage& stage) {
  const LaneView& lane = call.lane;
  const int slot = threadIdx.x % 32, generation = static_cast<int>(number & 1);
  std::int64_t most = 0;
  for (int rank = 0; rank < lane.ranks; ++rank)
    most = max(most, messages_between(lane, plan, lane.rank, rank));
  Sent sent;
  for (std::int64_t unit = worker; unit < most * lane.ranks; unit += workers) {
    const int rank = static_cast<int>((lane.rank + 1 + unit) % lane.ranks);
    const std::int64_t i = unit / lane.ranks;
    if (i >= messages_between(lane, plan, lane.rank, rank)) continue;
    const std::int64_t where = std::int64_t{rank} * lane.max_tokens + i;
    std::int32_t token = plan.sent_tokens[where];
    // A damaged plan: the message stays empty, its token -1.
    const bool good = token >= 0 && token < tokens;
    if (!good) {
      if (slot == 0) note_bad_source(lane, where);
      token = -1;
    }
    int position = -1;
    std::int32_t id = -1;
    float weight = 0;
    if (good) {
      const int at =
          slot < lane.most_ranks && plan.token_ranks[std::int64_t{token} * lane.most_ranks + slot] == rank;
      position = __ffs(static_cast<int>(__ballot_sync(~0u, at))) - 1;
      const std::int64_t route = std::int64_t{token} * lane.top_k + slot;
      if (slot < lane.top_k) id = plan.route_expert[route];
      if (slot < lane.top_k && call.weights != nullptr) weight = call.weights[route];
    }
    write_message_head(call, lane.message(rank, generation, lane.rank, i, call.message.bytes), token,
                       position, id, 0, weight);
    std::int32_t message[kMaxRanks];
    message[rank] = static_cast<std::int32_t>(i);
    if (good) send_row(call, generation, 1u << rank, message, token, stage, 0, 1);
    if (slot == 0) {
      sent.add(lane, 1u << rank);
      bulk_wait_written();
    }
    __syncwarp();
    jitter(lane);
    // Release: the head by all threads (ordered by the barrier) and the row's bulk stores, which this thread
    // issued and has seen written, before the flag.
    if (slot == 0) store_release_sys(lane.dispatch_flag(rank, generation, lane.rank, i), number);
  }
  if (slot == 0) sent.publish(call);
}

// By the warps of a block that have sent its tokens, once places are known: rows of their routes at home.
__device__ inline void finish_routes(const LaneView& lane, const PlanView& plan, std::int64_t tokens,
                                     int worker, int workers) {
  const int slot = threadIdx.x % 32;
  for (std::int64_t token = worker; token < tokens; token += workers) {
    if (slot >= lane.top_k) continue;
    const std::int64_t route = token * lane.top_k + slot;
    const std::int32_t expert = plan.route_expert[route];
    if (expert >= 0) plan.route_row[route] = row_of_route(lane, expert, plan.route_row[route]);
  }
}

}  // namespace ferry::cuda
