// The home role of combine: a token's rows or sums are added in order, as they arrive.
#pragma once

#include "backends/cuda/combine/combine_send.cuh"
#include "backends/cuda/combine/ll_sums.cuh"

namespace ferry::cuda {

__device__ __forceinline__ std::byte* result_row(const CombineArguments& call, std::int64_t row) {
  return call.result + row * call.result_stride;
}

// A token as the plan has it, this thread's slot and position. `token` -1: none is left.
struct HomeToken {
  std::int32_t token, share, destination, row, rank;
};

inline constexpr int kMostSplits = kQuarterSplits + 3;  // of a token of few

// What a warp brings of a token: some columns, which are in some quarters, and with the first of the shares
// what goes beside them. Of few tokens shares are parts of a quarter, whose flag all of them wait for where
// sums do not come in units.
struct HomeShare {
  Quarters quarters;
  Columns columns;
  bool first;

  // Share `share` of 1 << splits.
  __device__ __forceinline__ static HomeShare of(int share, int splits, int hidden) {
    const int finer = max(splits - kQuarterSplits, 0);
    const Quarters quarters = Quarters::of(share >> finer, splits - finer);
    const Columns all = columns_of(quarters, hidden);
    if (finer == 0) return {quarters, all, share == 0};
    const int part = share & ((1 << finer) - 1), unit = 256 << finer,
              columns = (all.end - all.begin + unit - 1) / unit * 256;
    return {quarters,
            {min(all.begin + part * columns, all.end), min(all.begin + (part + 1) * columns, all.end)},
            share == 0};
  }
};

// Rows of a token: this thread's slot's here, and its position's (partial) or slot's in staging.
struct HomeRows {
  TokenRows own;
  std::uint32_t staged = 0;  // threads whose row of staging is awaited, then is here
};

// One warp of those that bring rows home. Its tokens are `step` apart; what
// the plan says of the next is read while one is brought.
template <class Traits, DType kWire>
struct TokenReducer {
  const CombineArguments& call;
  const PlanView& plan;
  std::byte* memory;  // of a stream
  std::uint64_t number;
  std::int32_t tokens, total;
  std::int32_t gone;  // messages to the rank that is this thread's
  int splits;         // a token is shared by 1 << splits warps
  int unit, step;
  HomeToken ahead;

  __device__ static int slot() { return static_cast<int>(threadIdx.x % 32); }
  __device__ bool partial() const { return reduction_of<Traits>(call) == Reduction::partial; }
  __device__ DType result_type() const { return Traits::kSpecialised ? kWire : call.result_type; }
  __device__ int parity() const { return static_cast<int>(number & 1); }

  // `messages`: to the rank that is this thread's, as the plan has it.
  __device__ TokenReducer(const CombineArguments& arguments, std::uint64_t call_number, int worker,
                          int workers, std::int32_t messages, std::byte* stream_memory)
      : call(arguments),
        plan(arguments.plan),
        memory(stream_memory),
        number(call_number),
        tokens(plan.header->tokens),
        total(static_cast<std::int32_t>(plan.header->total)),
        gone(slot() < call.lane.ranks ? usable_messages(call.lane, messages, call.lane.rank, slot()) : 0),
        splits(splits_of(plan.header->tokens, workers)),
        unit(worker),
        step(workers) {
    // Down to an access or two a share, of which several ranks' sums are on their way at once.
    if (partial()) {
      while (splits >= kQuarterSplits && splits < kMostSplits && tokens << (splits + 1) <= workers) ++splits;
    }
    ahead = look_up();
  }

  __device__ HomeToken look_up() {
    const LaneView& lane = call.lane;
    const std::int64_t token = unit >> splits;
    if (token >= tokens) return {-1, 0, -1, -1, -1};
    const int share = unit - (static_cast<int>(token) << splits);
    unit += step;
    const std::int64_t route = token * lane.top_k + slot();
    const bool is_slot = slot() < lane.top_k, is_position = partial() && slot() < lane.most_ranks;
    return {static_cast<std::int32_t>(token), share, is_slot ? plan.route_rank[route] : -1,
            is_slot ? plan.route_row[route] : -1,
            is_position ? plan.token_ranks[token * lane.most_ranks + slot()] : -1};
  }

  // First row of staging of a token.
  __device__ std::int64_t first_row(const HomeToken& home) const {
    return std::int64_t{home.token} * (partial() ? call.lane.most_ranks : call.lane.top_k);
  }
  __device__ const std::byte* staged_row(const HomeToken& home) const {
    return call.lane.combine_row(call.lane.rank, parity(), first_row(home) + slot());
  }

  // Waits for the quarters of the rows of staging that `rows` names, and takes out those that do not come,
  // which only a damaged plan makes happen. `from`: the rank of this thread's. False: the call has ended
  // early.
  __device__ bool await_staged(const HomeToken& home, const HomeShare& share, std::int32_t from,
                               HomeRows* rows) const {
    const Quarters& quarters = share.quarters;
    const LaneView& lane = call.lane;
    std::uint32_t missing = 0;
    bool ended = false;
    const int highest = 32 - __clz(static_cast<int>(rows->staged));
    // A route's weight comes with its first quarter.
    const int each = quarters.count() + (!partial() && quarters.first > 0 ? 1 : 0);
#pragma unroll 1
    for (int base = 0; base < highest * each; base += 32) {
      const int of = (base + slot()) / each, turn = (base + slot()) % each;
      const int quarter = turn < quarters.count() ? quarters.first + turn : 0;
      const int peer = __shfl_sync(~0u, from, of % 32);
      if (of >= highest || (rows->staged >> of & 1) == 0) continue;
      // Acquire, by a thread for each flag: the quarter before its flag.
      const WaitResult came =
          wait_for(lane, lane.combine_flags(lane.rank, parity(), first_row(home) + of) + quarter,
                   lane.end_of_stream_flag(Payload::rows, lane.rank, parity(), peer),
                   {Operation::combine, number, peer});
      ended = ended || came == WaitResult::ended;
      if (came != WaitResult::no) continue;
      missing |= 1u << of;
      if (quarter == 0 && share.first) record_bad_source(lane, first_row(home) + of);
    }
    __syncwarp();
    // Also: each thread's acquire before all threads' reads.
    rows->staged &= ~__reduce_or_sync(~0u, missing);
    return !__any_sync(~0u, ended);
  }

  // By ranks: a token's rows here and, in `rank`, who sends the sum of this thread's position.
  __device__ HomeRows rows_of_sums(const HomeToken& home, std::int32_t* rank, int* own_position) const {
    const LaneView& lane = call.lane;
    const std::int64_t entry = first_row(home) + slot(),
                       route = std::int64_t{home.token} * lane.top_k + slot();
    *rank = home.rank;
    const std::uint32_t ends = __ballot_sync(~0u, *rank == -1);
    if (ends != 0 && slot() > __ffs(static_cast<int>(ends)) - 1) *rank = -1;
    if (*rank != -1 && !usable(lane, *rank, lane.ranks, entry)) *rank = -1;
    const bool here = *rank == lane.rank && !call.own_staged;
    const std::uint32_t own = __ballot_sync(~0u, here);
    HomeRows rows{{-1, 0, 1.0f}, __ballot_sync(~0u, *rank >= 0 && !here)};
    *own_position = own != 0 ? __ffs(static_cast<int>(own)) - 1 : -1;
    if (own == 0) return rows;
    const bool mine = home.destination == lane.rank;
    if (home.destination != -1) usable(lane, home.destination, lane.ranks, route);
    rows.own = rows_of_token(call, mine ? home.row : -1, total, route);
    if (mine && weights_travel<Traits>(call)) rows.own.weight = call.topk_weights[route];
    return rows;
  }

  // The values of a token's slots. `rank`: at this thread's position.
  __device__ void bring_values(const HomeToken& home, const HomeRows& rows, std::int32_t rank,
                               int own_position) const {
    const LaneView& lane = call.lane;
    const std::int64_t route = std::int64_t{home.token} * lane.top_k + slot();
    int position = -1;  // of this slot's rank among the token's ranks
#pragma unroll 1
    for (int k = 0; k < lane.top_k; ++k) {
      const std::int32_t destination = __shfl_sync(~0u, home.destination, k);
      const std::uint32_t found = __ballot_sync(~0u, rank >= 0 && rank == destination);
      if (slot() == k) position = __ffs(static_cast<int>(found)) - 1;
    }
    if (slot() >= lane.top_k) return;
    float value = 0;
    if (home.row != -1 && position < 0) {
      record_bad_source(lane, route);
    } else if (home.row != -1 && position == own_position) {
      if (rows.own.row >= 0) value = call.row_values[rows.own.row];
    } else if (home.row != -1 && (rows.staged >> position & 1) != 0) {
      const std::byte* sum = lane.combine_row(lane.rank, parity(), first_row(home) + position);
      value = reinterpret_cast<const float*>(sum + call.row.tail_offset)[slot()];
    }
    call.route_values[route] = value;
  }

  // Positions of `staged` whose sums come in units. `rank`: of this thread's position.
  __device__ std::uint32_t units_of(const HomeToken& home, std::int32_t rank, std::uint32_t staged) const {
    if (call.result == nullptr || (!Traits::kSpecialised && call.route_values != nullptr)) return 0;
    const std::int32_t messages = __shfl_sync(~0u, gone, max(rank, 0));
    return __ballot_sync(~0u, is_among(staged) && goes_as_packets(call.lane, messages, home.token));
  }

  __device__ std::byte* unit_row(const HomeToken& home, int of) const {
    return call.lane.unit_row(call.lane.rank, parity(), static_cast<std::int32_t>(first_row(home)) + of);
  }
  // Waits for the sums in units that `units` names, and takes out those that do not come, which only a
  // damaged plan makes happen. False: the call has ended early.
  __device__ bool await_units(const HomeToken& home, const HomeShare& share, std::int32_t rank,
                              std::uint32_t* units) const {
    const LaneView& lane = call.lane;
    const Columns& columns = share.columns;
    constexpr int kWidth = static_cast<int>(value_bytes(kWire));
#pragma unroll 1
    for (std::uint32_t left = *units; left != 0; left &= left - 1) {
      const int of = __ffs(static_cast<int>(left)) - 1, peer = __shfl_sync(~0u, rank, of);
      const WaitResult came =
          wait_for_units(lane, unit_row(home, of), columns.begin * kWidth, columns.end * kWidth,
                         lane.end_of_stream_flag(Payload::rows, lane.rank, parity(), peer),
                         {Operation::combine, number, peer});
      if (came == WaitResult::ended) return false;
      if (came == WaitResult::yes) continue;
      *units &= ~(1u << of);
      if (slot() == 0 && share.first) record_bad_source(lane, first_row(home) + of);
    }
    return true;
  }

  // Adds up and stores some columns of a token: its own rows, and the sums of others, which are here.
  __device__ __forceinline__ void add_up(const HomeToken& home, const Columns& columns, const HomeRows& rows,
                                         int own_position) const {
    const std::byte *own = rows.own.row >= 0 ? output_row(call, rows.own.row) : nullptr,
                    *staged = staged_row(home);
    const std::uint32_t lower = own_position >= 0 ? rows.staged & ((1u << own_position) - 1) : rows.staged;
    SumStream stream =
        stream_of(memory, columns, value_bytes(kWire), own, rows.own.kept, staged, rows.staged);
#pragma unroll 1
    for (int first = columns.begin; first < columns.end; first += PieceColumns<kWire>::kColumns) {
      const PackedPiece mine = sum_weighed<kWire>(stream, rows.own.kept, rows.own.weight);
      Sums<kWire> sum = {};
      add_rows<kWire>(stream, lower, sum);
      if (rows.own.kept != 0) add_piece<kWire>(mine, sum);
      add_rows<kWire>(stream, rows.staged & ~lower, sum);
      store_sums<kWire>(result_type(), result_row(call, home.token), first, columns.end, sum);
    }
  }

  __device__ LLSums ll_sums(const HomeToken& home, const Columns& columns, const HomeRows& rows,
                            int own_position, std::uint32_t units) const {
    return {.token = home.token,
            .columns = columns,
            .own = rows.own.row >= 0 ? output_row(call, rows.own.row) : nullptr,
            .kept = rows.own.kept,
            .weight = rows.own.weight,
            .own_position = own_position,
            .staged = rows.staged,
            .units = units};
  }

  // Ranks ascending; this rank's own sum is made here, and rounded like those that traveled.
  __device__ bool bring_sums(const HomeToken& home, const HomeShare& share) const {
    std::int32_t rank = -1;
    int own_position = -1;
    HomeRows rows = rows_of_sums(home, &rank, &own_position);
    std::uint32_t units = units_of(home, rank, rows.staged);
    rows.staged &= ~units;
    if (!await_staged(home, share, rank, &rows)) return false;
    if (!Traits::kSpecialised && call.route_values != nullptr && share.first)
      bring_values(home, rows, rank, own_position);
    if (call.result == nullptr) return true;
#pragma unroll 1
    while (units != 0) {
      if (add_up_units<kWire>(call, memory, ll_sums(home, share.columns, rows, own_position, units), number))
        return true;
      if (!await_units(home, share, rank, &units)) return false;
    }
    add_up(home, share.columns, rows, own_position);
    return true;
  }

  // By slots, exact and unreduced: where this thread's slot has its row, and what travels beside it.
  __device__ bool bring_routes(const HomeToken& home, const HomeShare& share) const {
    const LaneView& lane = call.lane;
    const std::int64_t route = std::int64_t{home.token} * lane.top_k + slot();
    std::int32_t row = home.row;
    if (row != -1 && !usable(lane, home.destination, lane.ranks, route)) row = -1;
    const bool here = row != -1 && home.destination == lane.rank && !call.own_staged;
    if (here && !usable(lane, row, total, route)) row = -1;
    HomeRows rows{{-1, 0, 1.0f}, __ballot_sync(~0u, row != -1 && !here)};
    if (!await_staged(home, share, home.destination, &rows)) return false;

    const bool own = here && row != -1, came = is_among(rows.staged);
    const std::byte* from = own ? output_row(call, row) : staged_row(home);
    float weight = 1, value = 0;
    if (own) {
      if (call.weights != nullptr) weight = call.weights[row];
      if (!Traits::kSpecialised && call.row_values != nullptr) value = call.row_values[row];
    } else if (came) {
      const auto tail = *reinterpret_cast<const RouteTail*>(from + call.row.tail_offset);
      weight = tail.weight;
      value = tail.value;
    }
    if (slot() < lane.top_k && call.topk_weights != nullptr) weight = call.topk_weights[route];
    if (!Traits::kSpecialised && slot() < lane.top_k && call.route_values != nullptr && share.first)
      call.route_values[route] = value;
    if (call.result == nullptr) return true;
    const std::uint32_t kept = __ballot_sync(~0u, own || came);
    const Columns& columns = share.columns;
    if (reduction_of<Traits>(call) == Reduction::unreduced) {
      copy_slots(home, from, kept, columns);
      return true;
    }
    SumStream stream = stream_of(memory, columns, value_bytes(kWire), from, kept);
#pragma unroll 1
    for (int first = columns.begin; first < columns.end; first += PieceColumns<kWire>::kColumns) {
      Sums<kWire> sum = {};
      add_weighed<kWire>(stream, kept, weight, kWire, sum);
      store_sums<kWire>(result_type(), result_row(call, home.token), first, columns.end, sum);
    }
    return true;
  }

  __device__ void copy_slots(const HomeToken& home, const std::byte* from, std::uint32_t kept,
                             const Columns& columns) const {
    const std::int64_t first_slot = std::int64_t{home.token} * call.lane.top_k;
    SumStream stream = stream_of(memory, columns, value_bytes(kWire), from, kept);
#pragma unroll 1
    for (int first = columns.begin; first < columns.end; first += PieceColumns<kWire>::kColumns) {
      each_piece(stream, kept, [&](const LoadedPiece& piece, int k) {
        store_piece<kWire>(piece, call.result_type, result_row(call, first_slot + k), first, columns.end);
      });
    }
    const int width = static_cast<int>(value_bytes(call.result_type));
    for (int k = 0; k < call.lane.top_k; ++k) {
      if ((kept >> k & 1) != 0) continue;
      std::byte* to = result_row(call, first_slot + k);
      for (int at = columns.begin * width + 16 * slot(); at < columns.end * width; at += 512)
        *reinterpret_cast<uint4*>(to + at) = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ void bring_all() {
    while (ahead.token >= 0) {
      const HomeToken home = ahead;
      ahead = look_up();
      const HomeShare share = HomeShare::of(home.share, splits, call.lane.hidden);
      const bool goes_on = partial() ? bring_sums(home, share) : bring_routes(home, share);
      if (!goes_on) return;
    }
  }
};

// By one warp of `workers`. `gone`: messages to the rank that is this thread's, as the plan has it; `memory`:
// of its streams.
template <class Traits>
__device__ __forceinline__ void bring_home(const CombineArguments& call, std::uint64_t number, int worker,
                                           int workers, std::int32_t gone, std::byte* memory) {
  with_type<Traits>(call.wire, [&](auto type) {
    TokenReducer<Traits, type.value>(call, number, worker, workers, gone, memory).bring_all();
  });
}

}  // namespace ferry::cuda
