// The sending role of dispatch: tokens go once to every rank that has one of their experts.
//
// In each round a block takes some neighbouring tokens. Planning warps count what comes before them and find
// their places; moving warps bring rows and heads to the destinations' staging and announce each message by a
// flag of its own once its bytes have arrived. Planning runs ahead of moving by some rounds.
#pragma once

#include "cuda/encode.cuh"
#include "cuda/findings.cuh"
#include "cuda/places.cuh"
#include "cuda/routing.cuh"
#include "cuda/wait.cuh"

namespace ferry::cuda {

inline constexpr int kPlanWarps = 4;
inline constexpr int kPlanBarrier = 1, kMoveBarrier = 2, kReceiveBarrier = 3;
inline constexpr int kRoundsPlanned = 3;  // being planned, ready, and moved
inline constexpr int kMostHeadBytes = (8 + 12 * kMaxTopK + static_cast<int>(kLine) + 15) / 16 * 16;

// A round's tokens as the planning warps leave them for the moving warps; in shared memory.
struct Round {
  PlannedToken token[kPlanWarps];
  alignas(16) std::byte head[kPlanWarps][kMostHeadBytes];  // a message behind its row, the same for all ranks
  std::uint32_t shares_moved[kPlanWarps];
};

struct SendScratch {
  Round rounds[kRoundsPlanned];
  std::uint64_t planned[kRoundsPlanned];  // arrival words: every planning warp
  std::uint64_t moved[kRoundsPlanned];    // every moving warp

  // By one thread, before anybody uses it.
  __device__ void prepare(int moving_warps) {
    for (int i = 0; i < kRoundsPlanned; ++i) {
      arrival_init(&planned[i], kPlanWarps);
      arrival_init(&moved[i], static_cast<std::uint32_t>(moving_warps));
    }
  }
};

// A message behind its row, by one warp, to `head`: where the message's head begins. The receiver finds its
// position among the token's ranks from the ids.
__device__ inline void write_head(const DispatchArguments& call, std::byte* head, std::int32_t token,
                                  std::int32_t id, std::int32_t ordinal, float weight) {
  const int slot = threadIdx.x % 32;
  const std::int64_t begin = call.message.base.head_offset;
  if (slot == 0) *reinterpret_cast<MessageHead*>(head) = MessageHead{token, 0};
  if (slot >= call.lane.top_k) return;
  reinterpret_cast<std::int32_t*>(head + call.message.base.ids_offset - begin)[slot] = id;
  reinterpret_cast<float*>(head + call.message.base.weights_offset - begin)[slot] = weight;
  reinterpret_cast<std::int32_t*>(head + call.message.ordinals_offset - begin)[slot] = ordinal;
}

__device__ __forceinline__ std::uint32_t head_bytes(const DispatchArguments& call) {
  return static_cast<std::uint32_t>(call.message.bytes - call.message.base.head_offset);
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

  // First thread of a warp. Every rank begins with the next one, so that no rank is everybody's first.
  __device__ void store(std::int64_t offset, const std::byte* from_stage, std::uint32_t bytes) const {
    const LaneView& lane = call.lane;
    for (int step = 1, rank = lane.rank; step <= lane.ranks; ++step) {
      rank = rank + 1 == lane.ranks ? 0 : rank + 1;
      if ((ranks >> rank & 1) == 0) continue;
      bulk_store(lane.message(rank, generation, lane.rank, message[rank], call.message.bytes) + offset,
                 from_stage, bytes);
    }
  }
};

// By one warp: share `share` of `shares` of a token's row, quantised. What the last piece stores is the
// caller's to commit.
__device__ inline void send_encoded(const DispatchArguments& call, const Destinations& to,
                                    const std::byte* row, Stage& stage, int share, int shares) {
  const bool first_thread = threadIdx.x % 32 == 0;
  const int runs = runs_of(call.lane.hidden), last = runs * (share + 1) / shares;
  for (int first = runs * share / shares; first < last; first += kRunsAtOnce) {
    const EncodedRuns piece = encoded_runs(call, first, min(first + kRunsAtOnce, last));
    if (first_thread) {
      bulk_commit();
      bulk_wait_read();
    }
    __syncwarp();
    encode_runs(call, row, piece, stage.memory);
    if (!first_thread) continue;
    const std::int64_t* offset = call.message.base.part_offset;
    to.store(offset[0] + piece.first_column, stage.memory, piece.value_bytes);
    to.store(offset[1] + piece.scales_at, stage.memory + piece.scales_in_stage, piece.scale_bytes);
  }
}

// What fits a stage of a warp's share of a token's row.
struct Piece {
  int part;
  std::int64_t at;
  std::uint32_t bytes;  // 0: there is none
};

// The share's first piece at or after byte `at` of part `part`; at -1: from the part's beginning.
__device__ inline Piece piece_from(const DispatchArguments& call, int share, int shares, int part,
                                   std::int64_t at) {
  for (; part < call.parts.count; ++part, at = -1) {
    const std::int64_t units = call.parts.part[part].row_bytes / 16;
    const std::int64_t end = units * (share + 1) / shares * 16;
    if (at < 0) at = units * share / shares * 16;
    if (at < end) return {part, at, static_cast<std::uint32_t>(min(std::int64_t{kStageBytes}, end - at))};
  }
  return {0, 0, 0};
}

// By the first thread of a warp: the row's first piece is on its way to the stage; it and the rest to their
// destinations. What the last piece stores is the caller's to commit.
__device__ inline void send_moved(const DispatchArguments& call, const Destinations& to, std::int64_t token,
                                  Stage& stage, Piece piece, int share, int shares) {
  while (piece.bytes != 0) {
    stage.await_load();
    to.store(call.message.base.part_offset[piece.part] + piece.at, stage.memory, piece.bytes);
    piece = piece_from(call, share, shares, piece.part, piece.at + piece.bytes);
    if (piece.bytes == 0) return;
    bulk_commit();
    bulk_wait_read();
    stage.start_load(token_row(call, piece.part, token) + piece.at, piece.bytes);
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

// How tokens are shared out: block `index` of `blocks` sends `width` neighbouring tokens a round.
struct SendShare {
  int index, blocks, width;

  __device__ static SendShare of(int index, int blocks, std::int64_t tokens) {
    int width = 1;
    while (width < kPlanWarps && std::int64_t{blocks} * width < tokens) width *= 2;
    return {index, blocks, width};
  }
  __device__ std::int64_t first(std::int64_t round) const { return (round * blocks + index) * width; }
};

// By the planning warps: all the block's tokens, from ids. The running counts start at zero.
__device__ inline void plan_tokens(const DispatchArguments& call, std::int64_t tokens, const SendShare& share,
                                   const RoutingTables& tables, const PlanView& plan, SendScratch* scratch) {
  constexpr int kThreads = 32 * kPlanWarps;
  const LaneView& lane = call.lane;
  const int warp = threadIdx.x / 32, slot = threadIdx.x % 32;
  std::int64_t counted = 0;
  unsigned at = 0, parity = 1;  // the first turn of the ring is free
  for (std::int64_t round = 0; share.first(round) < tokens; ++round) {
    Round& here = scratch->rounds[at];
    PlannedToken& own = here.token[warp];
    const std::int64_t first = share.first(round), mine = first + warp;
    const bool plans = warp < share.width && mine < tokens;
    count_tokens(call, tables, counted, first, static_cast<int>(threadIdx.x), kThreads);
    counted = first;
    const bool weighted = plans && call.weights != nullptr && slot < lane.top_k;
    const float weight = weighted ? call.weights[mine * lane.top_k + slot] : 0.0f;
    arrival_wait(&scratch->moved[at], parity);
    own.id[slot] = -1;
    if (slot == 0) own.token = -1, own.ranks = 0, here.shares_moved[warp] = 0;
    __syncwarp();
    if (plans) plan_ids(call, tables, mine, &own);
    // Counts and ids of the round are complete.
    sync_threads_of(kPlanBarrier, kThreads);
    if (plans) {
      const std::int32_t ordinal = plan_places(lane, tables, plan, here.token, warp);
      write_head(call, here.head[warp], static_cast<std::int32_t>(mine), own.id[slot], ordinal, weight);
    }
    // The head before the copy engine's reads of it.
    fence_before_bulk();
    // Also: the running counts have been read by all before the next round adds to them.
    sync_threads_of(kPlanBarrier, kThreads);
    if (slot == 0) arrive(&scratch->planned[at]);
    at = at + 1 == kRoundsPlanned ? 0 : at + 1;
    if (at == 0) parity ^= 1;
  }
}

// A moving warp: while the row of one token is on its way to the ranks, the next is on its way to a stage.
template <bool kEncodes, int kWarps, int kStages>
struct Mover {
  const DispatchArguments& call;
  const std::uint64_t number;
  const std::int64_t tokens;
  const SendShare share;
  SendScratch* scratch;
  const int warp;  // among the moving ones
  Stage (&stages)[kStages];
  Sent sent{};

  __device__ bool first_thread() const { return threadIdx.x % 32 == 0; }
  __device__ int shares() const { return kWarps / share.width; }  // moving warps of a token
  __device__ int mine() const { return warp / shares(); }
  __device__ int part() const { return warp % shares(); }

  // The first thread: the row's first piece, before anybody knows where it goes.
  __device__ Piece start(std::int64_t round, Stage& stage) const {
    const std::int64_t token = share.first(round) + mine();
    if (kEncodes || share.first(round) >= tokens || token >= tokens) return {0, 0, 0};
    const Piece piece = piece_from(call, part(), shares(), 0, -1);
    if (piece.bytes == 0) return piece;
    bulk_wait_read_but_last();
    stage.start_load(token_row(call, piece.part, token) + piece.at, piece.bytes);
    return piece;
  }

  __device__ void move(const PlannedToken& token, const std::byte* head, const Piece& piece, Stage& stage) {
    const int generation = static_cast<int>(number & 1);
    std::uint32_t ranks = token.ranks;
    if (!call.own_staged) ranks &= ~(1u << call.lane.rank);
    const Destinations to{call, generation, ranks, token.message};
    jitter(call.lane);
    if constexpr (kEncodes) {
      if (ranks != 0) send_encoded(call, to, token_row(call, 0, token.token), stage, part(), shares());
    } else if (first_thread()) {
      send_moved(call, to, token.token, stage, piece, part(), shares());
    }
    if (!first_thread() || part() != 0) return;
    const Destinations all{call, generation, token.ranks, token.message};
    all.store(call.message.base.head_offset, head, head_bytes(call));
    sent.add(call.lane, token.ranks);
  }

  // The first thread, which has seen its bulk stores of the round written: the last of a token's warps
  // announces its messages.
  __device__ void finish(unsigned at) const {
    Round& round = scratch->rounds[at];
    const PlannedToken& token = round.token[mine()];
    const auto of = static_cast<std::uint32_t>(shares());
    if (token.token >= 0 && token.ranks != 0 &&
        (of == 1 || count_in_block(&round.shares_moved[mine()]) == of - 1)) {
      jitter(call.lane);
      // Release at system scope, once for all ranks: what the token's warps have seen written (ordered before
      // this thread by their counting) before the flags.
      fence_acq_rel_sys();
      for (std::uint32_t left = token.ranks; left != 0; left &= left - 1) {
        const int rank = __ffs(static_cast<int>(left)) - 1;
        store_relaxed_sys(
            call.lane.dispatch_flag(rank, static_cast<int>(number & 1), call.lane.rank, token.message[rank]),
            number);
      }
    }
    arrive(&scratch->moved[at]);
  }

  __device__ void move_all() {
    unsigned at = 0, parity = 0, before = 0;
    Piece piece{0, 0, 0};
    if (first_thread()) piece = start(0, stages[0]);
    for (std::int64_t round = 0; share.first(round) < tokens; ++round) {
      arrival_wait(&scratch->planned[at], parity);
      const PlannedToken& token = scratch->rounds[at].token[mine()];
      Stage& stage = stages[round % kStages];
      if (token.token >= 0) move(token, scratch->rounds[at].head[mine()], piece, stage);
      if (first_thread()) {
        // Also where nothing was sent: what is waited for is counted in rounds.
        bulk_commit();
        piece = start(round + 1, stages[(round + 1) % kStages]);
        bulk_wait_written_but_last();
        if (round > 0) finish(before);
      }
      __syncwarp();
      before = at;
      at = at + 1 == kRoundsPlanned ? 0 : at + 1;
      if (at == 0) parity ^= 1;
    }
    if (!first_thread() || share.first(0) >= tokens) return;
    bulk_wait_written();
    finish(before);
    sent.publish(call);
  }
};

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
    std::int32_t id = -1;
    float weight = 0;
    if (good && slot < lane.top_k) {
      const std::int64_t route = std::int64_t{token} * lane.top_k + slot;
      id = plan.route_expert[route];
      if (call.weights != nullptr) weight = call.weights[route];
    }
    write_head(
        call,
        lane.message(rank, generation, lane.rank, i, call.message.bytes) + call.message.base.head_offset,
        token, id, 0, weight);
    if (good && (rank != lane.rank || call.own_staged)) {
      std::int32_t message[kMaxRanks];
      message[rank] = static_cast<std::int32_t>(i);
      const Destinations to{call, generation, 1u << rank, message};
      jitter(lane);
      if (call.format == FormatKind::fp8_e4m3) {
        send_encoded(call, to, token_row(call, 0, token), stage, 0, 1);
      } else if (slot == 0) {
        const Piece piece = piece_from(call, 0, 1, 0, -1);
        bulk_wait_read();
        stage.start_load(token_row(call, piece.part, token) + piece.at, piece.bytes);
        send_moved(call, to, token, stage, piece, 0, 1);
      }
    }
    if (slot == 0) {
      sent.add(lane, 1u << rank);
      bulk_commit();
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
