// The home role of combine: a token's rows or sums are added in order, as they arrive.
#pragma once

#include "cuda/combine_send.cuh"

namespace ferry::cuda {

__device__ __forceinline__ std::byte* result_row(const CombineArguments& call, std::int64_t row) {
  return call.result + row * call.result_stride;
}

// By every thread of a warp, each for an entry of its own (`awaits`: it has one): waits for a row of staging.
// False for the entry: nothing came, which only a damaged plan makes happen. `ended`: the call, early.
__device__ inline bool await_row(const CombineArguments& call, std::uint64_t number, bool awaits, int from,
                                 std::int64_t row, bool* ended) {
  const LaneView& lane = call.lane;
  const int generation = static_cast<int>(number & 1);
  Came came = Came::no;
  if (awaits) {
    came = wait_for(lane, lane.combine_flag(lane.rank, generation, row),
                    lane.sent_flag(Phase::rows, lane.rank, generation, from),
                    {Operation::combine, number, from});
    if (came == Came::no) note_bad_source(lane, row);
  }
  // Also: each thread's acquire before all threads' reads of its row.
  *ended = __any_sync(~0u, came == Came::ended);
  __syncwarp();
  return came == Came::yes;
}

// A token as the plan has it, this thread's slot and position. `token` -1: none is left.
struct HomeToken {
  std::int32_t token, destination, row, rank;
};

// A token whose rows are here. The stream brings, piece by piece: sums of `before` ranks, the rows here of
// the slots in `kept`, sums of `after` ranks. Exact and unreduced have rows of slots only.
struct Incoming {
  std::int32_t token;
  int before, after;
  std::uint32_t kept;
  float weight;  // of this thread's slot
};

// One warp of those that bring rows home. Its tokens are those that `next_token`, which the block's warps
// share, gives it. What the plan says of each is read while those before it move.
template <DType kWire>
struct HomeBringer {
  static constexpr int kValues = kPerAccess<kWire>;

  const CombineArguments& call;
  const PlanView& plan;
  RowStream& stream;
  std::uint64_t number;
  std::int32_t tokens, total;
  unsigned* next_token;
  HomeToken ahead;

  __device__ static int slot() { return static_cast<int>(threadIdx.x % 32); }
  __device__ bool partial() const { return call.reduction == Reduction::partial; }

  __device__ HomeBringer(const CombineArguments& arguments, std::uint64_t call_number, unsigned* shared_next,
                         const PlanView& of, RowStream& rows)
      : call(arguments),
        plan(of),
        stream(rows),
        number(call_number),
        tokens(of.header->tokens),
        total(static_cast<std::int32_t>(of.header->total)),
        next_token(shared_next) {
    ahead = look_up();
  }

  __device__ HomeToken look_up() {
    const LaneView& lane = call.lane;
    unsigned mine = 0;
    if (slot() == 0) mine = atomicAdd(next_token, 1u);
    const std::int64_t token = blockIdx.x + std::int64_t{__shfl_sync(~0u, mine, 0)} * gridDim.x;
    if (token >= tokens) return {-1, -1, -1, -1};
    const std::int64_t route = token * lane.top_k + slot();
    const bool is_slot = slot() < lane.top_k, is_position = partial() && slot() < lane.most_ranks;
    return {static_cast<std::int32_t>(token), is_slot ? plan.route_rank[route] : -1,
            is_slot ? plan.route_row[route] : -1,
            is_position ? plan.token_ranks[token * lane.most_ranks + slot()] : -1};
  }

  __device__ const std::byte* staged_row(std::int64_t row) const {
    return call.lane.combine_row(call.lane.rank, static_cast<int>(number & 1), row);
  }

  // By ranks: waits for the sums of a token. False: the call has ended early.
  __device__ bool start_sums(const HomeToken& home, Incoming* next) {
    const LaneView& lane = call.lane;
    const std::int64_t entry = std::int64_t{home.token} * lane.most_ranks + slot(),
                       route = std::int64_t{home.token} * lane.top_k + slot();
    std::int32_t rank = home.rank;
    const std::uint32_t ends = __ballot_sync(~0u, rank == -1);
    if (ends != 0 && slot() > __ffs(static_cast<int>(ends)) - 1) rank = -1;
    if (rank != -1 && !usable(lane, rank, lane.ranks, entry)) rank = -1;
    const bool here = rank == lane.rank && !call.own_staged;
    bool ended = false;
    const bool came = await_row(call, number, rank >= 0 && !here, rank, entry, &ended);
    if (ended) return false;

    const std::uint32_t own = __ballot_sync(~0u, here), present = __ballot_sync(~0u, came);
    TokenRows rows{-1, 0, 1.0f};
    if (own != 0) {
      const bool mine = home.destination == lane.rank;
      if (home.destination != -1) usable(lane, home.destination, lane.ranks, route);
      rows = rows_of_token(call, mine ? home.row : -1, total, route);
      if (mine && call.weights_travel) rows.weight = call.home_weights[route];
    }
    const int own_position = own != 0 ? __ffs(static_cast<int>(own)) - 1 : -1;
    const std::uint32_t lower = own != 0 ? present & ((1u << own_position) - 1) : present;
    *next = {home.token, __popc(static_cast<int>(lower)), __popc(static_cast<int>(present & ~lower)),
             rows.kept, rows.weight};
    if (call.route_values != nullptr) bring_values(home, rank, present, own_position, rows.row);
    if (call.result == nullptr) return true;
    const std::byte** list = stream.rows_to_queue();
    const int of_slots = __popc(static_cast<int>(rows.kept));
    if (came) list[place_among(present) + (is_among(lower) ? 0 : of_slots)] = staged_row(entry);
    if (is_among(rows.kept)) list[next->before + place_among(rows.kept)] = output_row(call, rows.row);
    stream.queue(next->before + of_slots + next->after);
    return true;
  }

  // The values of a token's slots. `rank`: at this thread's position; `own_row`: of this thread's slot, here.
  __device__ void bring_values(const HomeToken& home, std::int32_t rank, std::uint32_t present,
                               int own_position, std::int32_t own_row) const {
    const LaneView& lane = call.lane;
    const std::int64_t route = std::int64_t{home.token} * lane.top_k + slot();
    int position = -1;  // of this slot's rank among the token's ranks
    for (int k = 0; k < lane.top_k; ++k) {
      const std::int32_t destination = __shfl_sync(~0u, home.destination, k);
      const std::uint32_t found = __ballot_sync(~0u, rank >= 0 && rank == destination);
      if (slot() == k) position = __ffs(static_cast<int>(found)) - 1;
    }
    if (slot() >= lane.top_k) return;
    float value = 0;
    if (home.row != -1 && position < 0) {
      note_bad_source(lane, route);
    } else if (home.row != -1 && position == own_position) {
      if (own_row >= 0) value = call.row_values[own_row];
    } else if (home.row != -1 && (present >> position & 1) != 0) {
      const std::byte* sum = staged_row(std::int64_t{home.token} * lane.most_ranks + position);
      value = reinterpret_cast<const float*>(sum + call.row.tail_offset)[slot()];
    }
    call.route_values[route] = value;
  }

  // By slots, exact and unreduced: waits for the rows of a token. False: the call has ended early.
  __device__ bool start_routes(const HomeToken& home, Incoming* next) {
    const LaneView& lane = call.lane;
    const std::int64_t route = std::int64_t{home.token} * lane.top_k + slot();
    std::int32_t row = home.row;
    if (row != -1 && !usable(lane, home.destination, lane.ranks, route)) row = -1;
    const bool here = row != -1 && home.destination == lane.rank && !call.own_staged;
    if (here && !usable(lane, row, total, route)) row = -1;
    bool ended = false;
    const bool came = await_row(call, number, row != -1 && !here, home.destination, route, &ended);
    if (ended) return false;

    const bool own = here && row != -1;
    float weight = 1, value = 0;
    if (own) {
      if (call.weights != nullptr) weight = call.weights[row];
      if (call.row_values != nullptr) value = call.row_values[row];
    } else if (came) {
      const auto tail = *reinterpret_cast<const RouteTail*>(staged_row(route) + call.row.tail_offset);
      weight = tail.weight;
      value = tail.value;
    }
    if (slot() < lane.top_k && call.home_weights != nullptr) weight = call.home_weights[route];
    if (slot() < lane.top_k && call.route_values != nullptr) call.route_values[route] = value;
    const std::uint32_t kept = __ballot_sync(~0u, own || came);
    *next = {home.token, 0, 0, kept, weight};
    if (call.result == nullptr) return true;
    if (is_among(kept))
      stream.rows_to_queue()[place_among(kept)] = own ? output_row(call, row) : staged_row(route);
    stream.queue(__popc(static_cast<int>(kept)));
    return true;
  }

  // The next token's rows are on their way. False: none is left, or the call has ended early.
  __device__ bool start(Incoming* next) {
    if (ahead.token < 0) return false;
    const HomeToken home = ahead;
    ahead = look_up();
    return partial() ? start_sums(home, next) : start_routes(home, next);
  }

  __device__ void add_staged(int count, int left, float (&sum)[kDeep][kValues]) {
    for (; count > 0; --count) {
      const uint4* piece = stream.await_piece();
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
        const int at = slot() + 32 * d;
        if (at >= left) continue;
        float value[kValues];
        unpack<kWire>(piece[at], value);
#pragma unroll
        for (int i = 0; i < kValues; ++i) sum[d][i] = __fadd_rn(sum[d][i], value[i]);
      }
      stream.release_piece();
    }
  }

  // Ranks ascending; this rank's own sum is made here, and rounded like those that traveled.
  __device__ void add_sums(const Incoming& token, int left, float (&sum)[kDeep][kValues]) {
    add_staged(token.before, left, sum);
    if (token.kept != 0) {
      float mine[kDeep][kValues] = {};
      add_pieces<kWire>(stream, token.kept, token.weight, kWire, left, mine);
#pragma unroll
      for (int d = 0; d < kDeep; ++d) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) sum[d][i] = __fadd_rn(sum[d][i], rounded(kWire, mine[d][i]));
      }
    }
    add_staged(token.after, left, sum);
  }

  __device__ void copy_slots(const Incoming& token, int first, int left) {
    for (std::uint32_t slots = token.kept; slots != 0; slots &= slots - 1) {
      const std::int64_t row =
          std::int64_t{token.token} * call.lane.top_k + __ffs(static_cast<int>(slots)) - 1;
      copy_piece<kWire>(stream, call.result_type, result_row(call, row), first, left);
    }
  }

  __device__ void clear_slots(const Incoming& token) const {
    const std::int64_t bytes = call.lane.hidden * value_bytes(call.result_type);
    for (int k = 0; k < call.lane.top_k; ++k) {
      if ((token.kept >> k & 1) != 0) continue;
      std::byte* to = result_row(call, std::int64_t{token.token} * call.lane.top_k + k);
      for (std::int64_t at = 16 * slot(); at < bytes; at += 512)
        *reinterpret_cast<uint4*>(to + at) = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ void bring(const Incoming& token) {
    const bool unreduced = call.reduction == Reduction::unreduced;
    if (unreduced) clear_slots(token);
    const int accesses = call.lane.hidden / kValues;
    for (int first = 0; first < accesses; first += kAccessesOfPiece) {
      const int left = accesses - first;
      if (unreduced) {
        copy_slots(token, first, left);
        continue;
      }
      float sum[kDeep][kValues] = {};
      if (partial()) {
        add_sums(token, left, sum);
      } else {
        add_pieces<kWire>(stream, token.kept, token.weight, kWire, left, sum);
      }
      store_sums<kWire>(call.result_type, result_row(call, token.token), first, left, sum);
    }
  }

  __device__ void bring_all() {
    Incoming next{};
    for (bool more = start(&next); more;) {
      const Incoming now = next;
      more = start(&next);
      if (call.result != nullptr) bring(now);
    }
  }
};

// By one warp. `next_token`: 0 at first, shared by the block's warps; a block's tokens are those that leave
// its number when divided by the number of blocks.
__device__ __forceinline__ void bring_home(const CombineArguments& call, std::uint64_t number,
                                           unsigned* next_token, const PlanView& plan, RowStream& stream) {
  stream.set_row_bytes(call.lane.hidden * value_bytes(call.wire));
  switch (call.wire) {
    case DType::bf16:
      return HomeBringer<DType::bf16>(call, number, next_token, plan, stream).bring_all();
    case DType::fp16:
      return HomeBringer<DType::fp16>(call, number, next_token, plan, stream).bring_all();
    case DType::fp32:
      return HomeBringer<DType::fp32>(call, number, next_token, plan, stream).bring_all();
  }
}

}  // namespace ferry::cuda
