// The receiving role of dispatch: messages are spread to the rows of their experts as they arrive.
#pragma once

#include "cuda/places.cuh"
#include "cuda/row_copy.cuh"
#include "cuda/values.cuh"

namespace ferry::cuda {

// The dot product of docs/contract.md from 32 threads' sums of 8 columns each.
__device__ inline float dot_of_sums(float (&sum)[8]) {
#pragma unroll
  for (int step = 4; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < step; ++i) sum[i] = __fadd_rn(sum[i], sum[i + step]);
  }
  float dot = sum[0];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) dot = __fadd_rn(dot, __shfl_down_sync(~0u, dot, step));
  return canonical(dot);
}

// By one warp: the row times its weight to arrived row `to`, and its dot product with the caller's row there.
static __device__ __noinline__ void compute_row(const DispatchArguments& call, const std::byte* row,
                                                std::int32_t to, float weight) {
  const int thread = threadIdx.x % 32;
  const std::int64_t hidden = call.lane.hidden;
  std::byte* arrived = call.arrived[0] + to * call.parts.part[0].row_bytes;
  const std::byte* other = nullptr;
  if (call.dot_rows != nullptr)
    other = static_cast<const std::byte*>(call.dot_rows) + to * hidden * value_bytes(call.dot_type);
  float sum[8] = {};
  for (std::int64_t column = 8 * thread; column < hidden; column += 256) {
#pragma unroll
    for (int four = 0; four < 8; four += 4) {
      if (column + four >= hidden) break;
      float x[4], v[4], weighed[4];
      load_four(call.type, row, column + four, x);
      if (call.weigh_rows) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weighed[i] = __fmul_rn(weight, x[i]);
        store_values(call.type, arrived, column + four, weighed);
      }
      if (other == nullptr) continue;
      load_four(call.dot_type, other, column + four, v);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[four + i] = __fmaf_rn(x[i], v[i], sum[four + i]);
    }
  }
  if (other == nullptr) return;
  const float dot = dot_of_sums(sum);
  if (thread == 0) call.dots[to] = dot;
}

__device__ __forceinline__ bool moves_whole(const PartLayout& part) {
  return !part.columns && part.row_bytes % 16 == 0;
}

// By one warp: some quarters of a part, from `from`, to the kept rows. `row`: of this thread's slot; `kept`:
// the slots that have one.
__device__ __forceinline__ void spread_part(const DispatchArguments& call, int p, const std::byte* from,
                                            std::int32_t row, std::uint32_t kept, const Quarters& quarters) {
  const PartLayout& part = call.parts.part[p];
  if (moves_whole(part)) {
    const ByteRange range = ByteRange::of(quarters, part.row_bytes, kGranule);
    copy_granules(from, range, [&](const Granules& granules, int at) {
#pragma unroll 1
      for (std::uint32_t left = kept; left != 0; left &= left - 1) {
        const std::int64_t to = __shfl_sync(~0u, row, __ffs(static_cast<int>(left)) - 1);
        granules.store(call.arrived[p] + to * part.row_bytes, at, range.end);
      }
    });
    return;
  }
  // Scales: words of their own, in a column or in rows that no copy of 16 bytes fits.
  const ByteRange range = ByteRange::of(quarters, part.row_bytes, 16);
  for (std::uint32_t left = kept; left != 0; left &= left - 1) {
    const std::int32_t to = __shfl_sync(~0u, row, __ffs(static_cast<int>(left)) - 1);
    const auto element_bytes = static_cast<int>(part.element_bytes);
    for (int byte = range.begin + 4 * static_cast<int>(threadIdx.x % 32); byte < range.end; byte += 128) {
      std::byte* address = call.arrived[p] + element_offset(part, to, byte / element_bytes, call.leading[p]) +
                           byte % element_bytes;
      *reinterpret_cast<std::uint32_t*>(address) = *reinterpret_cast<const std::uint32_t*>(from + byte);
    }
  }
}

// A message's head, and what of it this thread's slot is about.
struct MessageNotes {
  MessageHead head{-1, 0};
  std::int32_t id = -1, ordinal = 0;
  float weight = 0;
};

__device__ inline MessageNotes read_notes(const DispatchArguments& call, const std::byte* message, int slot) {
  const MessageLayout& layout = call.message.base;
  MessageNotes notes;
  notes.head = *reinterpret_cast<const MessageHead*>(message + layout.head_offset);
  if (slot < call.lane.top_k) {
    notes.id = reinterpret_cast<const std::int32_t*>(message + layout.ids_offset)[slot];
    notes.weight = reinterpret_cast<const float*>(message + layout.weights_offset)[slot];
    notes.ordinal = reinterpret_cast<const std::int32_t*>(message + call.message.ordinals_offset)[slot];
  }
  return notes;
}

// A message of a team: whose, which, and where its notes stand in the plan.
struct TeamMessage {
  bool has;
  int source, i;
  bool notes_it;  // this warp has its first quarter
};

// One warp that receives.
struct Receiver {
  const DispatchArguments& call;
  const RoutingTables& tables;
  const PlanView& plan;
  const Places& places;
  const std::int32_t* runs;  // [R] of messages, side by side
  std::uint64_t number;
  std::uint32_t placers;     // ranks that have stored rows where they stay
  std::uint32_t quarterers;  // ranks that announce the quarters of a row apart

  __device__ static int slot() { return static_cast<int>(threadIdx.x % 32); }
  __device__ int generation() const { return static_cast<int>(number & 1); }

  // The row of this thread's slot, or -1: elsewhere, masked, dropped. `local`: its expert here, or -1.
  __device__ std::int32_t row_of_slot(int source, std::int64_t i, int local, std::int32_t ordinal) const {
    const LaneView& lane = call.lane;
    if (local < 0) return -1;
    if (lane.layout == Layout::rank_major) {
      const std::int64_t at = std::int64_t{places.here[source]} + i;
      return at < lane.capacity ? static_cast<std::int32_t>(at) : -1;
    }
    const std::int64_t at = std::int64_t{places.here[local * lane.ranks + source]} + ordinal;
    if (at >= lane.capacity) return -1;
    const std::int64_t base = lane.layout == Layout::expert_padded ? local * lane.capacity : 0;
    return static_cast<std::int32_t>(base + at);
  }

  // What the plan and the arrivals' notes say of each team's message, each thread for its slot.
  __device__ void note_messages(const Team& team, const TeamMessage& message, const MessageNotes& notes,
                                int position, std::int32_t row, int local) const {
    const LaneView& lane = call.lane;
    const bool rank_major = lane.layout == Layout::rank_major;
    const std::int64_t where = std::int64_t{message.source} * lane.max_tokens + message.i;
    const int slot = team.slot();
    if (!call.replay) {
      if (slot < lane.top_k) plan.came_rows[where * lane.top_k + slot] = row;
      if (slot == 0) {
        plan.came_token[where] = notes.head.token;
        plan.came_position[where] = position;
      }
      if (row >= 0) plan.sources[row] = {message.source, notes.head.token, rank_major ? -1 : slot};
    }
    if (!rank_major) {
      if (row < 0) return;
      if (call.weight != nullptr) call.weight[row] = notes.weight;
      // A damaged plan may put a row where no expert of this rank is.
      if (call.group_of_row != nullptr) call.group_of_row[row] = max(local, 0);
      return;
    }
    const std::uint32_t threads = team.threads(team.mine()), kept = __ballot_sync(threads, row >= 0);
    if (kept == 0) return;
    const std::int64_t to = __shfl_sync(threads, row, __ffs(static_cast<int>(kept)) - 1);
    if (slot == 0 && call.group_of_row != nullptr) call.group_of_row[to] = message.source;
    if (slot >= lane.top_k) return;
    call.local_ids[to * lane.top_k + slot] = local;
    if (call.weight != nullptr) call.weight[to * lane.top_k + slot] = local >= 0 ? notes.weight : 0.0f;
  }

  __device__ const std::byte* message_of(int source, std::int64_t i) const {
    return call.lane.message(call.lane.rank, generation(), source, i, call.message.bytes);
  }

  // Each team's message, whose quarters are here; the share of its row that is this warp's.
  __device__ void take_together(const Team& team, const TeamMessage& message,
                                const Quarters& quarters) const {
    const LaneView& lane = call.lane;
    MessageNotes notes;
    if (message.has) notes = read_notes(call, message_of(message.source, message.i), team.slot());
    const int at = notes.id >= 0 && notes.id < lane.experts ? tables.position_of[notes.id] : -1;
    const int rank = at >= 0 ? tables.rank_of[at] : -1;
    const int local = rank == lane.rank ? at - tables.first_expert[rank] : -1;
    const std::uint32_t ranks = __reduce_or_sync(team.threads(team.mine()), rank >= 0 ? 1u << rank : 0);
    const int position = __popc(static_cast<int>(ranks & ((1u << lane.rank) - 1)));
    std::int32_t row = -1;
    const std::int64_t where = std::int64_t{message.source} * lane.max_tokens + message.i;
    if (message.has && !call.replay) {
      row = row_of_slot(message.source, message.i, local, notes.ordinal);
    } else if (message.has && team.slot() < lane.top_k) {
      const std::int64_t entry = where * lane.top_k + team.slot();
      row = plan.came_rows[entry];
      if (row != -1 && !usable(lane, row, places.begin[lane.groups], entry)) row = -1;
    }
    // Token -1: the sender's plan is damaged, and the sender says so.
    const bool good = notes.head.token >= 0 && notes.head.token < lane.max_tokens;
    if (!good) row = -1;
    const std::uint32_t all = __ballot_sync(~0u, row >= 0);
#pragma unroll 1
    for (int t = 0; t < team.count(); ++t) {
      std::uint32_t kept = all & team.threads(t);
      // All slots of a rank_major message name the token's one row.
      if (lane.layout == Layout::rank_major) kept &= ~kept + 1;
      if (kept == 0) continue;
      const int source = __shfl_sync(~0u, message.source, t * team.size),
                i = __shfl_sync(~0u, message.i, t * team.size);
      const std::int32_t token = __shfl_sync(~0u, notes.head.token, t * team.size);
      spread(
          source, token, message_of(source, i), notes.weight, row, kept,
          {__shfl_sync(~0u, quarters.first, t * team.size), __shfl_sync(~0u, quarters.last, t * team.size)});
    }
    if (message.has && message.notes_it) {
      if (good) {
        note_messages(team, message, notes, position, row, local);
      } else if (team.slot() == 0 && notes.head.token != -1) {
        note_bad_source(lane, where);
      }
    }
    __syncwarp();
  }

  // By the whole warp: a message to the rows of the threads in `kept`. `row`, `weight`: of this thread's
  // slot.
  __device__ void spread(int source, std::int32_t token, const std::byte* message, float weight,
                         std::int32_t row, std::uint32_t kept, const Quarters& quarters) const {
    const LaneView& lane = call.lane;
    const bool own = source == lane.rank && !call.own_staged;
    if (call.weigh_rows || call.dot_rows != nullptr) {
      const std::byte* from = own ? token_row(call, 0, token) : message;
      for (std::uint32_t left = kept; left != 0; left &= left - 1) {
        const int at = __ffs(static_cast<int>(left)) - 1;
        compute_row(call, from, __shfl_sync(~0u, row, at), __shfl_sync(~0u, weight, at));
      }
    }
    if (call.weigh_rows) return;
#pragma unroll 1
    for (int p = 0; p < call.parts.count; ++p) {
      const std::byte* from = own ? token_row(call, p, token) : message + call.message.base.part_offset[p];
      std::uint32_t to = kept;
      if (p == 0 && !own && (placers >> source & 1) != 0) {
        // The first row lies where it stays: the others are copies of it.
        const std::int32_t first = __shfl_sync(~0u, row, __ffs(static_cast<int>(kept)) - 1);
        from = call.arrived[0] + first * call.parts.part[0].row_bytes;
        to &= to - 1;
      }
      if (to != 0) spread_part(call, p, from, row, to, quarters);
    }
  }

  // By warp `worker` of `workers`: its messages, 32 in view at a time, as they come. False: the call has
  // ended early.
  __device__ bool take_all(int worker, int workers) const {
    const LaneView& lane = call.lane;
    const int messages = slot() < lane.ranks ? places.between[slot() * lane.ranks + lane.rank] : 0;
    // Computed rows are the work of one warp.
    const bool computes = call.weigh_rows || call.dot_rows != nullptr;
    const int splits = computes ? 0 : splits_of(__reduce_add_sync(~0u, messages), workers);
    const int turns = messages == 0 ? 0 : (messages + runs[slot()] - 1) / runs[slot()] * runs[slot()];
    const int units = __reduce_max_sync(~0u, turns) * lane.ranks << splits;
#pragma unroll 1
    for (int first = worker; first < units; first += 32 * workers) {
      // This thread's message: this rank's own first.
      const int unit = first + slot() * workers, turn = unit >> splits, of_rank = turn / lane.ranks,
                next = lane.rank + turn - of_rank * lane.ranks;
      const int source = next < lane.ranks ? next : next - lane.ranks;
      const int i = message_at(source, of_rank), share = unit - (turn << splits);
      if (!take_some(unit < units && i >= 0, source, i, share, splits)) return false;
    }
    return true;
  }

 private:
  // The message of `source` that comes in turn `at`, or -1. It is a guess where runs begin, as if all were
  // equally long: what comes earlier or later than thought is taken all the same.
  __device__ int message_at(int source, int at) const {
    const int messages = places.between[source * call.lane.ranks + call.lane.rank], count = runs[source];
    const int each = messages / count, more = messages - each * count, i = at / count, run = at - i * count;
    return i < each + (run < more) ? run * each + min(run, more) + i : -1;
  }

  // Each thread brings a message, if it `has` one: all of them, in whatever order they come.
  __device__ bool take_some(bool has, int source, int i, int share, int splits) const {
    const LaneView& lane = call.lane;
    const Quarters mine = Quarters::of(share, splits);
    // The head comes with the first quarter.
    const std::uint32_t wanted =
        (quarterers >> source & 1) != 0 ? 1u | ((1u << mine.last) - (1u << mine.first)) : 1u;
    const std::uint64_t* flags = lane.dispatch_flags(lane.rank, generation(), source, i);
    // Only a plan can promise messages that do not come.
    const std::uint64_t* last =
        call.replay ? lane.sent_flag(Phase::rows, lane.rank, generation(), source) : nullptr;
    std::uint32_t pending = __ballot_sync(~0u, has);
#pragma unroll 1
    while (pending != 0) {
      const bool waits = (pending >> slot() & 1) != 0;
      const CameFlags came =
          wait_for_some(lane, flags, waits ? wanted : 0, last, {Operation::dispatch, number, source});
      if ((came.here | came.late) == 0) return false;
      pending &= ~(came.here | came.late);
      if ((came.late >> slot() & 1) != 0 && mine.first == 0)
        note_bad_source(lane, std::int64_t{source} * lane.max_tokens + i);
      take_these(came.here, source, i, mine);
    }
    return true;
  }

  // The messages of the threads in `here`, whose flags have been acquired.
  __device__ void take_these(std::uint32_t here, int source, int i, const Quarters& mine) const {
    const Team team = Team::of(call.lane.top_k);
#pragma unroll 1
    while (here != 0) {
      int thread = -1;  // whose message is this team's
#pragma unroll 1
      for (int t = 0; t < team.count() && here != 0; ++t, here &= here - 1) {
        if (t == team.mine()) thread = __ffs(static_cast<int>(here)) - 1;
      }
      const int from = max(thread, 0);
      const Quarters quarters{__shfl_sync(~0u, mine.first, from), __shfl_sync(~0u, mine.last, from)};
      take_together(
          team, {thread >= 0, __shfl_sync(~0u, source, from), __shfl_sync(~0u, i, from), quarters.first == 0},
          quarters);
    }
  }
};

// By one warp of `workers`: rows between groups.
static __device__ __noinline__ void write_padding(const DispatchArguments& call, const Places& places,
                                                  int worker, int workers, const PlanView& plan) {
  const LaneView& lane = call.lane;
  if (lane.layout == Layout::rank_major) return;
  const int thread = threadIdx.x % 32;
  for (int group = worker; group < lane.groups; group += workers) {
    const std::int64_t begin = places.begin[group], count = places.count[group];
    const std::int64_t aligned = min(align_rows(count, lane.alignment), lane.capacity);
    const std::int64_t end = lane.layout == Layout::expert_padded ? begin + aligned : places.begin[group + 1];
    for (std::int64_t row = begin + count + thread; row < end; row += 32) {
      plan.sources[row] = Source{};
      if (call.weight != nullptr) call.weight[row] = 0;
      if (call.dots != nullptr) call.dots[row] = 0;
      if (call.group_of_row != nullptr) call.group_of_row[row] = -1;
    }
    if (!lane.zero_padding) continue;
    for (std::int64_t row = begin + count; row < end; ++row) {
      for (int p = 0; p < call.parts.count; ++p) {
        const PartLayout& part = call.parts.part[p];
        for (std::int64_t byte = 4 * thread; byte < part.row_bytes; byte += 128) {
          const std::int64_t element = byte / part.element_bytes;
          *reinterpret_cast<std::uint32_t*>(call.arrived[p] +
                                            element_offset(part, row, element, call.leading[p]) +
                                            byte % part.element_bytes) = 0;
        }
      }
    }
  }
}

}  // namespace ferry::cuda
