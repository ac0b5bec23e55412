// The sending role of dispatch: tokens go once to every rank that has one of their experts.
//
// A warp loads a piece of a token's row and stores it at every destination: where the row will stay, if the
// destination lets this rank place rows and this rank waits for the counts of all first; else in the
// destination's staging. What the receiver must know of the token, and all that is not moved as it is, goes
// to staging always.
#pragma once

#include "cuda/encode.cuh"
#include "cuda/places.cuh"
#include "cuda/row_stream.cuh"

namespace ferry::cuda {

// Quarters of encoded rows begin at whole words of packed scales.
inline constexpr int kEncodedUnit = 4 * static_cast<int>(kFp8Block);

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
    const std::int64_t bytes = device_message_bytes(call.message, call.lane.top_k);
    add_wire(&call.lane.state->wire.dispatch_bytes, messages * static_cast<unsigned long long>(bytes));
  }
};

// Where a token goes, as one warp sees it: each thread knows the rank of its number.
struct Destinations {
  std::uint32_t ranks;   // one bit each
  std::byte* message;    // in the rank's staging
  LetterUnit* notes;     // of the message
  std::byte* row;        // of part 0: in that message, or where it stays; null: it does not travel
  std::uint64_t* flags;  // of the message

  // Calls store(message or row of a rank) for all that have one, the next rank first, so that no rank is
  // everybody's first.
  template <class Store>
  __device__ __forceinline__ static void each(std::uint32_t ranks, int own, std::byte* mine, Store store) {
    // The ranks from the next one on, as one turn: this rank's own is the last.
    const int turn = (own + 1) % 32;
#pragma unroll 1
    for (std::uint32_t left = __funnelshift_r(ranks, ranks, turn); left != 0; left &= left - 1) {
      const int rank = (__ffs(static_cast<int>(left)) - 1 + turn) % 32;
      store(reinterpret_cast<std::byte*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(mine), rank)));
    }
  }
};

// By one warp: columns of part 0 quantised, values to rows from `to_row` and scales to `to_scales`. `own`:
// this rank.
template <DType kType>
__device__ __noinline__ void send_encoded(const std::byte* row, std::byte* to_row, std::byte* to_scales,
                                          std::uint32_t rows, int own, ByteRange columns,
                                          Fp8Options options) {
  constexpr int kDeep = 8;  // accesses of 256 columns
  const int thread = threadIdx.x % 32;
#pragma unroll 1
  for (int first = columns.begin; first < columns.end; first += kDeep * 256) {
    RawEight raw[kDeep] = {};
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int column = first + 256 * d + 8 * thread;
      if (column < columns.end) raw[d] = load_eight(kType, row, column);
    }
    // One division serves all blocks.
    const float largest = largest_of_block<kType, kDeep>(raw);
    const Fp8Scale mine = fp8_scale(largest, options.power_of_two);
    uint2 values[kDeep];
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      float x[8];
      unpack(kType, raw[d], x);
      values[d] = encode_eight(x, __shfl_sync(~0u, mine.factor, 2 * d + thread / 16));
    }
    Destinations::each(rows, own, to_row, [&](std::byte* at) {
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
        const int column = first + 256 * d + 8 * thread;
        if (column < columns.end) *reinterpret_cast<uint2*>(at + column) = values[d];
      }
    });
    const int block = first / static_cast<int>(kFp8Block) + thread;
    const bool has = thread < 2 * kDeep && block * kFp8Block < columns.end;
    const std::uint32_t word = scale_word(options, has, mine.scale);
    const bool stores = options.packed ? has && thread % 4 == 0 : has;
    const std::int64_t offset = options.packed ? block : 4 * block;
    Destinations::each(rows, own, to_scales, [&](std::byte* at) {
      if (stores) *reinterpret_cast<std::uint32_t*>(at + offset) = word;
    });
  }
}

// Part 0 of tokens [token, end), for a stream. Nothing where it is quantised, or where warps share a row:
// what is left of it for one is soon here.
struct TokenParts {
  const DispatchArguments* call;
  std::int32_t token, end;

  __device__ static TokenParts of(const DispatchArguments& call, int splits, std::int32_t begin,
                                  std::int32_t end) {
    const bool streams = call.format != FormatKind::fp8_e4m3 && splits == 0;
    return {&call, begin, streams ? end : begin};
  }
  __device__ __forceinline__ bool open(const std::byte** row, ByteRange* range) {
    if (token >= end) return false;
    *row = token_row(*call, 0, token++);
    *range = {0, static_cast<int>(call->parts.part[0].row_bytes)};
    return true;
  }
};

// What a warp asks for before it counts: rows and ids of its first units.
struct FirstUnit {
  SlotRoute route;
  RowStream<TokenParts> rows;
};

// By one warp: the quarters of all parts as they are. `stream`: brings part 0 of whole rows.
__device__ __forceinline__ void send_moved(const DispatchArguments& call, std::int64_t token,
                                           const Destinations& to, std::uint32_t rows,
                                           const Quarters& quarters, RowStream<TokenParts>& stream) {
  const bool streams = quarters.count() == kQuarters;
  const auto bytes = static_cast<int>(call.parts.part[0].row_bytes);
#pragma unroll 1
  for (int at = 0; streams && at < bytes; at += kPiece) {
    const StreamPiece piece = stream.take();
    Destinations::each(rows, call.lane.rank, to.row, [&](std::byte* row) { piece.store(row, at, bytes); });
  }
#pragma unroll 1
  for (int p = streams ? 1 : 0; p < call.parts.count; ++p) {
    const ByteRange range = ByteRange::of(quarters, call.parts.part[p].row_bytes, kGranule);
    std::byte* mine = p == 0 ? to.row : to.message + call.message.part_offset[p];
    copy_granules(token_row(call, p, token), range, [&](const auto& granules, int at) {
      Destinations::each(rows, call.lane.rank, mine,
                         [&](std::byte* row) { granules.store(row, at, range.end); });
    });
  }
}

// By one warp: what the receivers must know of a token, each thread for its slot. `rank`, `local`: of the
// slot's expert, -1 if it has none.
__device__ __forceinline__ void send_notes(const DispatchArguments& call, const Destinations& to,
                                           std::uint64_t number, std::int32_t token, std::int32_t rank,
                                           std::int32_t local, std::int32_t ordinal, float weight) {
  const std::uint32_t same = __match_any_sync(~0u, rank);
  const bool first = rank >= 0 && (same & ((1u << threadIdx.x % 32) - 1)) == 0;
  // Each team of threads writes the notes of a rank.
  const Team team = Team::of(call.lane.top_k);
  const int slot = team.slot();
  const std::int32_t of_slot = __shfl_sync(~0u, rank, slot);
  SlotNote note{.token = token,
                .local = __shfl_sync(~0u, local, slot),
                .first_of_lower = __shfl_sync(~0u, static_cast<int>(first), slot) != 0,
                .ordinal = __shfl_sync(~0u, ordinal, slot),
                .weight = __shfl_sync(~0u, weight, slot)};
#pragma unroll 1
  for (std::uint32_t left = to.ranks; left != 0;) {
    const std::uint32_t nth = team.nth_of(left);
    auto* notes = reinterpret_cast<LetterUnit*>(
        __shfl_sync(~0u, reinterpret_cast<unsigned long long>(to.notes), static_cast<int>(nth % 32)));
    for (int t = 0; t < team.count(); ++t) left &= left - 1;
    if (nth >= 32 || slot >= call.lane.top_k) continue;
    const auto receiver = static_cast<int>(nth);
    SlotNote theirs = note;
    if (of_slot != receiver) theirs.local = SlotNote::kElsewhere;
    theirs.first_of_lower = note.first_of_lower && of_slot < receiver;
    store_unit_relaxed_sys(notes + slot, theirs.unit(number));
  }
}

// One warp that sends. Its messages are announced by the block's announcing warp.
struct Sender {
  const DispatchArguments& call;
  BlockTables tables;
  Places places;
  bool waits;            // for places; otherwise all rows are staged
  std::uint32_t takers;  // ranks that let this one place rows
  Announcer<kWorkWarps>* announcer;
  std::uint64_t number;
  Sent sent{};

  __device__ static int slot() { return static_cast<int>(threadIdx.x % 32); }
  __device__ int generation() const { return static_cast<int>(number & 1); }

  // `row`: where this thread's slot has its row, or -1; `rank`: there.
  __device__ Destinations destinations(std::uint32_t ranks, std::int32_t message, std::int32_t row,
                                       std::int32_t rank) const {
    const LaneView& lane = call.lane;
    const bool mine = (ranks >> slot() & 1) != 0;
    Destinations to{ranks, nullptr, nullptr, nullptr, nullptr};
    if (mine) {
      to.notes = lane.slot_notes(slot(), generation(), lane.rank, message);
      to.message = lane.message(slot(), generation(), lane.rank, message, call.message.bytes);
      to.flags = lane.dispatch_flags(slot(), generation(), lane.rank, message);
      if (slot() != lane.rank || call.own_staged) to.row = to.message;
    }
    const std::uint32_t placed = ranks & takers & (call.own_staged ? ~0u : ~(1u << lane.rank));
    for (std::uint32_t left = placed; left != 0; left &= left - 1) {
      const int taker = __ffs(static_cast<int>(left)) - 1;
      // The first of the token's rows there; its receiver copies the others from it.
      const std::uint32_t kept = __ballot_sync(~0u, rank == taker && row >= 0);
      const int first = __ffs(static_cast<int>(kept)) - 1;
      const std::int32_t at = __shfl_sync(~0u, row, max(first, 0));
      if (slot() == taker)
        to.row = first < 0 ? nullptr : lane.arrived_row(taker, at, call.parts.part[0].row_bytes);
    }
    return to;
  }

  // A share of a token's row, then its flags: by the announcing warp, unless this warp has nothing `else` to
  // do than wait for its stores.
  __device__ void send_share(std::int64_t token, const Destinations& to, const Quarters& quarters,
                             RowStream<TokenParts>& stream, int flags, bool last) {
    jitter(call.lane);
    send_row(token, to, quarters, stream);
    std::uint64_t* first = to.flags + quarters.first;
    if (!last) return announcer->ask(to.flags != nullptr, first, flags);
    // All threads' stores before the fence, by the barrier.
    __syncwarp();
    jitter(call.lane);
    if (to.flags != nullptr) announce_now(first, flags, number);
  }

  __device__ void send_row(std::int64_t token, const Destinations& to, const Quarters& quarters,
                           RowStream<TokenParts>& stream) const {
    const std::uint32_t rows = __ballot_sync(~0u, to.row != nullptr);
    if (call.format != FormatKind::fp8_e4m3) return send_moved(call, token, to, rows, quarters, stream);
    const std::byte* row = token_row(call, 0, token);
    std::byte* scales = to.message + call.message.part_offset[1];
    const int own = call.lane.rank;
    const ByteRange columns = ByteRange::of(quarters, call.lane.hidden, kEncodedUnit);
    switch (call.type) {
      case DType::bf16:
        return send_encoded<DType::bf16>(row, to.row, scales, rows, own, columns, call.fp8);
      case DType::fp16:
        return send_encoded<DType::fp16>(row, to.row, scales, rows, own, columns, call.fp8);
      case DType::fp32:
        return send_encoded<DType::fp32>(row, to.row, scales, rows, own, columns, call.fp8);
    }
  }

  // From ids: this warp's units. `counts`: of the warp; `first`: asked for ahead.
  __device__ void send_units(const SendShare& share, int worker, std::int32_t* counts, FirstUnit& first) {
    const LaneView& lane = call.lane;
    const std::int32_t begin = share.unit_begin(worker), end = share.unit_begin(worker + 1);
    std::int32_t messages =
        begin < end && slot() < lane.ranks ? counts[lane.signals.first_messages + slot()] : 0;
    std::int32_t planned = -1, kept_row = -1;
    SlotRoute ahead = first.route;
    PlannedToken token;
    Destinations to{};
#pragma unroll 1
    for (std::int32_t unit = begin; unit < end; ++unit) {
      const std::int32_t now = unit >> share.splits;
      const int part = unit - (now << share.splits);
      if (now != planned) {
        const SlotRoute route = ahead;
        token = plan_token(lane, tables, counts, route.id.value(call), &messages);
        // The next token's, while this one's row is on its way.
        ahead = SlotRoute::of(call, now + 1, share.tokens);
        planned = now;
        kept_row = of_layout(token);
        if (waits) kept_row = row_of_route(lane, tables, places, token.position, token.rank, kept_row);
        to = destinations(token.ranks, token.message, kept_row, token.rank);
        if (part == 0) {
          jitter(lane);
          const int local = token.position - tables.first_expert[max(token.rank, 0)];
          send_notes(call, to, number, now, token.rank, local, token.ordinal, route.weight);
          sent.add(lane, to.ranks);
        }
      }
      const Quarters quarters = Quarters::of(part, share.splits);
      send_share(now, to, quarters, first.rows, share.splits == 0 ? 1 : quarters.count(), unit + 1 == end);
      // Nobody waits for the plan.
      if (part == 0) note_token(now, token, kept_row);
    }
    announcer->close();
    if (slot() == 0) sent.publish(call);
  }

  // What row_of_route adds to a first row.
  __device__ std::int32_t of_layout(const PlannedToken& token) const {
    if (call.lane.layout != Layout::rank_major) return token.position < 0 ? -1 : token.ordinal;
    const std::int32_t message = __shfl_sync(~0u, token.message, max(token.rank, 0));
    return token.position < 0 ? -1 : message;
  }

  // The plan's entries of a token. `row`: of the slot; what comes before its rows are known: of_layout().
  __device__ void note_token(std::int64_t now, const PlannedToken& token, std::int32_t row) const {
    const LaneView& lane = call.lane;
    const std::int64_t route = now * lane.top_k + slot();
    if (slot() < lane.top_k) {
      call.plan.route_expert[route] = token.id;
      call.plan.route_rank[route] = token.rank;
      call.plan.route_row[route] = row;
    }
    if (slot() < lane.ranks && (token.ranks >> slot() & 1) != 0) {
      const int position = __popc(static_cast<int>(token.ranks & ((1u << slot()) - 1)));
      call.plan.token_ranks[now * lane.most_ranks + position] = slot();
      call.plan.sent_tokens[std::int64_t{slot()} * lane.max_tokens + token.message] =
          static_cast<std::int32_t>(now);
    }
    const int reached = __popc(static_cast<int>(token.ranks));
    if (slot() >= reached && slot() < lane.most_ranks)
      call.plan.token_ranks[now * lane.most_ranks + slot()] = -1;
  }

  // By a plan that exists already: message by message.
  __device__ void send_planned(std::int64_t tokens, int worker, int workers, std::byte* memory) {
    const LaneView& lane = call.lane;
    const int messages =
        slot() < lane.ranks ? static_cast<int>(messages_between(lane, call.plan, lane.rank, slot())) : 0;
    const int units = __reduce_max_sync(~0u, messages) * lane.ranks;
#pragma unroll 1
    for (int unit = worker; unit < units; unit += workers) {
      const int rank = (lane.rank + 1 + unit) % lane.ranks;
      const std::int64_t i = unit / lane.ranks;
      if (i >= __shfl_sync(~0u, messages, rank)) continue;
      const std::int64_t where = std::int64_t{rank} * lane.max_tokens + i;
      std::int32_t token = call.plan.sent_tokens[where];
      // A damaged plan: the message stays empty, its token -1.
      const bool good = token >= 0 && token < tokens;
      if (!good) {
        if (slot() == 0) note_bad_source(lane, where);
        token = -1;
      }
      std::int32_t row = -1, local = -1;
      float weight = 0;
      if (good && slot() < lane.top_k) {
        const std::int64_t route = std::int64_t{token} * lane.top_k + slot();
        if (call.plan.route_rank[route] == rank) {
          local = local_at(rank, call.plan.route_expert[route]);
          row = row_at(rank, call.plan.route_row[route], route);
        }
        if (call.weights != nullptr) weight = call.weights[route];
      }
      const Destinations to = destinations(1u << rank, static_cast<std::int32_t>(i), row, rank);
      jitter(lane);
      send_notes(call, to, number, token, local >= 0 ? rank : -1, local, 0, weight);
      sent.add(lane, to.ranks);
      if (good) {
        RowStream<TokenParts> stream{memory, TokenParts::of(call, 0, token, token + 1)};
        stream.start();
        send_row(token, to, {0, kQuarters}, stream);
      }
      announcer->ask(to.flags != nullptr, to.flags, 1);
    }
    announcer->close();
    if (slot() == 0) sent.publish(call);
  }

  // A planned expert's number at its rank, or -1: none that the rank has.
  __device__ std::int32_t local_at(int rank, std::int32_t expert) const {
    if (!is_expert(call.lane, expert)) return -1;
    const int position = tables.position_of[expert];
    return tables.rank_of[position] == rank ? position - tables.first_expert[rank] : -1;
  }

  // A planned row at another rank, or -1: dropped, or none that the rank has.
  __device__ std::int32_t row_at(int rank, std::int32_t row, std::int64_t route) const {
    const LaneView& lane = call.lane;
    if (row == -1 || (takers >> rank & 1) == 0) return -1;
    const std::int64_t groups =
        lane.layout == Layout::expert_padded ? tables.first_expert[rank + 1] - tables.first_expert[rank] : 1;
    return usable(lane, row, groups * tables.capacity[rank], route) ? row : -1;
  }
};

// By warps `worker` of `workers`, once places are known: rows of the routes whose tokens were sent before.
__device__ inline void finish_routes(const LaneView& lane, const BlockTables& tables, const Places& places,
                                     const PlanView& plan, std::int64_t begin, std::int64_t end) {
  const int slot = threadIdx.x % 32;
  for (std::int64_t token = begin; token < end; ++token) {
    if (slot >= lane.top_k) continue;
    const std::int64_t route = token * lane.top_k + slot;
    const std::int32_t expert = plan.route_expert[route];
    if (expert < 0) continue;
    const int position = tables.position_of[expert];
    plan.route_row[route] =
        row_of_route(lane, tables, places, position, tables.rank_of[position], plan.route_row[route]);
  }
}

}  // namespace ferry::cuda
