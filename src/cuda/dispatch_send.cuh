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

inline constexpr int kSendBarrier = 1;
inline constexpr int kMaxSendWarps = 8;
inline constexpr int kRoundsInFlight = 3;  // planned, sent, and on its way

// What the sending warps of a block share.
struct SendScratch {
  PlannedToken planned[kRoundsInFlight][kMaxSendWarps];
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

// By one warp: share `share` of `shares` of a token's row, quantised.
__device__ inline void send_encoded(const DispatchArguments& call, const Destinations& to,
                                    const std::byte* row, Stage& stage, int share, int shares) {
  const bool first_thread = threadIdx.x % 32 == 0;
  const int runs = runs_of(call.lane.hidden), last = runs * (share + 1) / shares;
  for (int first = runs * share / shares; first < last; first += kRunsAtOnce) {
    const EncodedRuns piece = encoded_runs(call, first, min(first + kRunsAtOnce, last));
    if (first_thread) bulk_wait_read();
    __syncwarp();
    encode_runs(call, row, piece, stage.memory);
    if (!first_thread) continue;
    const std::int64_t* offset = call.message.base.part_offset;
    to.store(offset[0] + piece.first_column, stage.memory, piece.value_bytes);
    to.store(offset[1] + piece.scales_at, stage.memory + piece.scales_in_stage, piece.scale_bytes);
    bulk_commit();
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
// destinations.
__device__ inline void send_moved(const DispatchArguments& call, const Destinations& to, std::int64_t token,
                                  Stage& stage, Piece piece, int share, int shares) {
  while (piece.bytes != 0) {
    stage.await_load();
    to.store(call.message.base.part_offset[piece.part] + piece.at, stage.memory, piece.bytes);
    bulk_commit();
    piece = piece_from(call, share, shares, piece.part, piece.at + piece.bytes);
    if (piece.bytes == 0) return;
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
// warps / width warps.
struct SendShare {
  int index, blocks, width;

  __device__ static SendShare of(int index, int blocks, int warps, std::int64_t tokens) {
    int width = 1;
    while (width < warps && std::int64_t{blocks} * width < tokens) width *= 2;
    return {index, blocks, width};
  }
  __device__ std::int64_t first(std::int64_t round) const { return (round * blocks + index) * width; }
};

// By the sending warps of a block: all its tokens, planned from ids. The running counts start at zero. While
// a round is planned, its rows are on their way to the stages and the rows of the round before to their
// ranks.
template <bool kEncodes, int kWarps, int kStages>
struct TokenSender {
  static constexpr int kThreads = 32 * kWarps;

  const DispatchArguments& call;
  const std::uint64_t number;
  const std::int64_t tokens;
  const SendShare share;
  const RoutingTables& tables;
  const PlanView& plan;
  SendScratch* scratch;
  Stage (&stages)[kStages];
  Sent sent{};

  __device__ int warp() const { return threadIdx.x / 32; }
  __device__ int slot() const { return threadIdx.x % 32; }
  __device__ bool plans() const { return warp() < share.width; }  // warp w plans the round's token w
  __device__ int warps_of_token() const { return kWarps / share.width; }
  __device__ PlannedToken* planned(std::int64_t round) const {
    return scratch->planned[round % kRoundsInFlight];
  }

  // The first thread: the row's first piece, before anybody knows where it goes.
  __device__ Piece start(std::int64_t round, Stage& stage) const {
    const std::int64_t token = share.first(round) + warp() / warps_of_token();
    if (kEncodes || token >= tokens || slot() != 0) return {0, 0, 0};
    const Piece piece = piece_from(call, warp() % warps_of_token(), warps_of_token(), 0, -1);
    if (piece.bytes == 0) return piece;
    if (kStages > 1) {
      bulk_wait_read_but_last();
    } else {
      bulk_wait_read();
    }
    stage.start_load(token_row(call, piece.part, token) + piece.at, piece.bytes);
    return piece;
  }

  __device__ void write_heads(const PlannedToken& own, std::int32_t ordinal) {
    const LaneView& lane = call.lane;
    const bool weighted = call.weights != nullptr && slot() < lane.top_k;
    const float weight = weighted ? call.weights[own.token * lane.top_k + slot()] : 0.0f;
    for (std::uint32_t left = own.ranks; left != 0; left &= left - 1) {
      const int rank = __ffs(static_cast<int>(left)) - 1;
      const int position = __popc(static_cast<int>(own.ranks & ((1u << rank) - 1)));
      std::byte* message =
          lane.message(rank, static_cast<int>(number & 1), lane.rank, own.message[rank], call.message.bytes);
      write_message_head(call, message, static_cast<std::int32_t>(own.token), position, own.id[slot()],
                         ordinal, weight);
    }
    if (slot() == 0) sent.add(lane, own.ranks);
  }

  __device__ void send_row(const PlannedToken& token, const Piece& piece, Stage& stage) const {
    std::uint32_t ranks = token.ranks;
    if (!call.own_staged) ranks &= ~(1u << call.lane.rank);
    const Destinations to{call, static_cast<int>(number & 1), ranks, token.message};
    const int at = warp() % warps_of_token(), of = warps_of_token();
    jitter(call.lane);
    if constexpr (kEncodes) {
      if (ranks != 0) send_encoded(call, to, token_row(call, 0, token.token), stage, at, of);
    } else if (slot() == 0) {
      send_moved(call, to, token.token, stage, piece, at, of);
    }
  }

  __device__ void announce_round(std::int64_t round) const {
    if (round < 0 || !plans()) return;
    const PlannedToken& token = planned(round)[warp()];
    if (token.token >= 0) announce(call, number, token);
  }

  __device__ void plan_round(std::int64_t round, std::int64_t counted) {
    const std::int64_t first = share.first(round);
    PlannedToken* here = planned(round);
    count_tokens(call, tables, counted, first, static_cast<int>(threadIdx.x), kThreads);
    if (plans()) {
      if (slot() == 0) here[warp()].token = -1, here[warp()].ranks = 0;
      here[warp()].id[slot()] = -1;
      __syncwarp();
      if (first + warp() < tokens) plan_ids(call, tables, first + warp(), &here[warp()]);
    }
    // Counts and ids of the round are complete.
    sync_threads_of(kSendBarrier, kThreads);
    if (plans() && here[warp()].token >= 0)
      write_heads(here[warp()], plan_places(call.lane, tables, plan, here, warp()));
  }

  __device__ void send_all() {
    std::int64_t counted = 0, round = 0;
    for (; share.first(round) < tokens; ++round) {
      Stage& stage = stages[round % kStages];
      const Piece piece = start(round, stage);
      plan_round(round, counted);
      counted = share.first(round);
      // Rows sent two rounds ago: each first thread has seen its own bulk stores written, then all may be
      // announced.
      if (slot() == 0) bulk_wait_written_but_last();
      sync_threads_of(kSendBarrier, kThreads);
      announce_round(round - 2);
      const PlannedToken& token = planned(round)[warp() / warps_of_token()];
      if (token.token >= 0) send_row(token, piece, stage);
      // Also where nothing was sent: what is waited for is counted in rounds.
      if (slot() == 0) bulk_commit();
      __syncwarp();
    }
    if (slot() == 0) bulk_wait_written();
    sync_threads_of(kSendBarrier, kThreads);
    announce_round(round - 2);
    announce_round(round - 1);
    if (slot() == 0) sent.publish(call);
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
