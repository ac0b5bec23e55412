// The receiving role of dispatch: messages are spread to the rows of their experts as they arrive.
#pragma once

#include "cuda/dispatch_send.cuh"

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
__device__ inline void compute_row(const DispatchArguments& call, const std::byte* row, std::int32_t to,
                                   float weight) {
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

// A message, or this rank's own token in its place.
struct ArrivingRow {
  const std::byte* part[kMaxParts];
  bool together;  // the parts follow one another as in a message
};

__device__ __forceinline__ bool moves_whole(const PartLayout& part) {
  return !part.columns && part.row_bytes % 16 == 0;
}

// By one warp: bytes [at, at + bytes) of a part, which lie in the stage, to the kept rows.
__device__ inline void store_piece(const DispatchArguments& call, int p, std::int64_t at, std::uint32_t bytes,
                                   const std::byte* from_stage, std::int32_t row, std::uint32_t kept) {
  const PartLayout& part = call.parts.part[p];
  const int thread = threadIdx.x % 32;
  for (std::uint32_t left = kept; left != 0; left &= left - 1) {
    const std::int32_t to = __shfl_sync(~0u, row, __ffs(static_cast<int>(left)) - 1);
    if (moves_whole(part)) {
      if (thread == 0) bulk_store(call.arrived[p] + to * part.row_bytes + at, from_stage, bytes);
      continue;
    }
    // Scales: words of their own, in a column or in rows that no copy of 16 bytes fits.
    const std::int64_t end = min(at + bytes, part.row_bytes);
    for (std::int64_t byte = at + 4 * thread; byte < end; byte += 128) {
      const std::int64_t element = byte / part.element_bytes;
      std::byte* address =
          call.arrived[p] + element_offset(part, to, element, call.leading[p]) + byte % part.element_bytes;
      *reinterpret_cast<std::uint32_t*>(address) =
          *reinterpret_cast<const std::uint32_t*>(from_stage + (byte - at));
    }
  }
}

// Whether a row passes through the stage in one go, so that its load can start before its places are known.
__device__ __forceinline__ bool fits_stage(const DispatchArguments& call) {
  return !call.weigh_rows && wire_bytes(call.parts) <= kStageBytes;
}

// By one warp: starts the load of a row that fits.
__device__ inline void start_row(const DispatchArguments& call, const ArrivingRow& from, Stage& stage) {
  __syncwarp();  // all threads have read what the stage held
  if (threadIdx.x % 32 != 0) return;
  bulk_wait_read();
  // The row, acquired with its flag, before the copy engine's reads of it.
  fence_before_bulk();
  std::uint32_t bytes = 0;
  for (int p = 0; p < call.parts.count; ++p)
    bytes += static_cast<std::uint32_t>(from.together ? call.parts.part[p].wire_bytes
                                                      : call.parts.part[p].row_bytes);
  arrival_expect(stage.arrival, bytes);
  if (from.together) {
    bulk_load(stage.memory, from.part[0], bytes, stage.arrival);
    return;
  }
  for (int p = 0; p < call.parts.count; ++p)
    bulk_load(stage.memory + call.message.base.part_offset[p], from.part[p],
              static_cast<std::uint32_t>(call.parts.part[p].row_bytes), stage.arrival);
}

// By one warp: a row that has been started, to the kept rows. `row` is this thread's slot's, `kept` the slots
// that have one.
__device__ inline void spread_started(const DispatchArguments& call, std::int32_t row, std::uint32_t kept,
                                      Stage& stage) {
  stage.await_load();
  for (int p = 0; p < call.parts.count; ++p) {
    store_piece(call, p, 0, static_cast<std::uint32_t>(call.parts.part[p].row_bytes),
                stage.memory + call.message.base.part_offset[p], row, kept);
  }
  if (threadIdx.x % 32 == 0) bulk_commit();
}

// The same for a row of any size, piece by piece.
__device__ inline void spread_row(const DispatchArguments& call, const ArrivingRow& from, std::int32_t row,
                                  std::uint32_t kept, Stage& stage) {
  const bool first = threadIdx.x % 32 == 0;
  for (int p = 0; p < call.parts.count; ++p) {
    const std::int64_t end = from.together ? call.parts.part[p].wire_bytes : call.parts.part[p].row_bytes;
    for (std::int64_t at = 0; at < end; at += kStageBytes) {
      const auto bytes = static_cast<std::uint32_t>(min(std::int64_t{kStageBytes}, end - at));
      __syncwarp();
      if (first) {
        bulk_wait_read();
        fence_before_bulk();
        stage.start_load(from.part[p] + at, bytes);
      }
      stage.await_load();
      store_piece(call, p, at, bytes, stage.memory, row, kept);
      if (first) bulk_commit();
    }
  }
}

// By one warp: the notes of a token's row in rank_major, each thread for its slot. `local`: the expert here,
// or -1.
__device__ inline void note_token_row(const DispatchArguments& call, std::int32_t to, int local,
                                      float weight) {
  const int slot = threadIdx.x % 32;
  if (slot >= call.lane.top_k) return;
  const std::int64_t at = std::int64_t{to} * call.lane.top_k + slot;
  call.local_ids[at] = local;
  if (call.weight != nullptr) call.weight[at] = local >= 0 ? weight : 0.0f;
}

// A message's head, and what of it this thread's slot is about.
struct MessageNotes {
  MessageHead head;
  std::int32_t id = -1, ordinal = 0;
  float weight = 0;
};

__device__ inline MessageNotes read_notes(const DispatchArguments& call, const std::byte* message) {
  const int slot = threadIdx.x % 32;
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

// The row of this thread's slot by the first rows of this rank's experts, or -1: elsewhere, masked, dropped.
// `local`: its expert here, or -1.
__device__ inline std::int32_t row_of_slot(const DispatchArguments& call, const std::int32_t* first_rows,
                                           int source, std::int64_t i, int local, std::int32_t ordinal) {
  const LaneView& lane = call.lane;
  if (local < 0) return -1;
  if (lane.layout == Layout::rank_major) {
    const std::int64_t at = std::int64_t{first_rows[source]} + i;
    return at < lane.capacity ? static_cast<std::int32_t>(at) : -1;
  }
  const std::int64_t at = std::int64_t{first_rows[local * lane.ranks + source]} + ordinal;
  if (at >= lane.capacity) return -1;
  const std::int64_t base = lane.layout == Layout::expert_padded ? local * lane.capacity : 0;
  return static_cast<std::int32_t>(base + at);
}

// By one warp: what the plan and the arrivals' notes say of a message, each thread for its slot.
__device__ inline void note_message(const DispatchArguments& call, int source, std::int64_t where,
                                    const MessageNotes& notes, int position, std::int32_t row, int local,
                                    const PlanView& plan) {
  const LaneView& lane = call.lane;
  const int slot = threadIdx.x % 32;
  const bool rank_major = lane.layout == Layout::rank_major;
  if (!call.replay) {
    if (slot < lane.top_k) plan.came_rows[where * lane.top_k + slot] = row;
    if (slot == 0) {
      plan.came_token[where] = notes.head.token;
      plan.came_position[where] = position;
    }
    if (row >= 0) plan.sources[row] = {source, notes.head.token, rank_major ? -1 : slot};
  }
  if (rank_major) {
    const std::uint32_t kept = __ballot_sync(~0u, row >= 0);
    if (kept == 0) return;
    const std::int32_t to = __shfl_sync(~0u, row, __ffs(static_cast<int>(kept)) - 1);
    note_token_row(call, to, local, notes.weight);
    if (slot == 0 && call.group_of_row != nullptr) call.group_of_row[to] = source;
  } else if (row >= 0) {
    if (call.weight != nullptr) call.weight[row] = notes.weight;
    // A damaged plan may put a row where no expert of this rank is.
    if (call.group_of_row != nullptr) call.group_of_row[row] = max(local, 0);
  }
}

// By one warp: message i of `source` is here. `total`: rows of this rank.
__device__ inline void take_message(const DispatchArguments& call, const RoutingTables& tables,
                                    const std::int32_t* first_rows, std::uint64_t number, int source,
                                    std::int64_t i, std::int64_t total, const PlanView& plan, Stage& stage) {
  const LaneView& lane = call.lane;
  const int slot = threadIdx.x % 32;
  const std::byte* message =
      lane.message(lane.rank, static_cast<int>(number & 1), source, i, call.message.bytes);
  const std::int64_t where = std::int64_t{source} * lane.max_tokens + i;
  ArrivingRow from{};
  from.together = source != lane.rank || call.own_staged;
  for (int p = 0; p < call.parts.count && from.together; ++p)
    from.part[p] = message + call.message.base.part_offset[p];
  const bool early = from.together && fits_stage(call);
  if (early) start_row(call, from, stage);

  const MessageNotes notes = read_notes(call, message);
  const int rank_of_id = notes.id >= 0 && notes.id < lane.experts ? tables.rank_of[notes.id] : -1;
  const int local = rank_of_id == lane.rank ? tables.local_of[notes.id] : -1;
  const std::uint32_t ranks = __reduce_or_sync(~0u, rank_of_id >= 0 ? 1u << rank_of_id : 0);
  const int position = __popc(static_cast<int>(ranks & ((1u << lane.rank) - 1)));
  std::int32_t row = -1;
  if (!call.replay) {
    row = row_of_slot(call, first_rows, source, i, local, notes.ordinal);
  } else if (slot < lane.top_k) {
    row = plan.came_rows[where * lane.top_k + slot];
    if (row != -1 && !usable(lane, row, total, where * lane.top_k + slot)) row = -1;
  }
  // Token -1: the sender's plan is damaged, and the sender says so.
  if (notes.head.token >= 0 && notes.head.token < lane.max_tokens) {
    note_message(call, source, where, notes, position, row, local, plan);
  } else {
    if (slot == 0 && notes.head.token != -1) note_bad_source(lane, where);
    row = -1;
  }
  std::uint32_t kept = __ballot_sync(~0u, row >= 0);
  // All slots of a rank_major message name the token's one row.
  if (lane.layout == Layout::rank_major) kept &= ~kept + 1;
  if (early) spread_started(call, row, kept, stage);
  if (kept == 0) return;
  for (int p = 0; p < call.parts.count && !from.together; ++p)
    from.part[p] = token_row(call, p, notes.head.token);
  if (call.weigh_rows || call.dot_rows != nullptr) {
    for (std::uint32_t left = kept; left != 0; left &= left - 1) {
      const int at = __ffs(static_cast<int>(left)) - 1;
      compute_row(call, from.part[0], __shfl_sync(~0u, row, at), __shfl_sync(~0u, notes.weight, at));
    }
  }
  if (early || call.weigh_rows) return;
  if (fits_stage(call)) {
    start_row(call, from, stage);
    spread_started(call, row, kept, stage);
  } else {
    spread_row(call, from, row, kept, stage);
  }
}

// By one warp of `workers`: messages of all sources in turn, this rank's own first.
__device__ inline void take_messages(const DispatchArguments& call, const RoutingTables& tables,
                                     const std::int32_t* first_rows, std::uint64_t number, std::int64_t total,
                                     int worker, int workers, const PlanView& plan, Stage& stage) {
  const LaneView& lane = call.lane;
  const int thread = threadIdx.x % 32, generation = static_cast<int>(number & 1);
  const auto mine =
      static_cast<int>(thread < lane.ranks ? messages_between(lane, plan, thread, lane.rank) : 0);
  const std::int64_t most = __reduce_max_sync(~0u, mine);
  for (std::int64_t unit = worker; unit < most * lane.ranks; unit += workers) {
    const int source = static_cast<int>((lane.rank + unit) % lane.ranks);
    const std::int64_t i = unit / lane.ranks;
    if (i >= __shfl_sync(~0u, mine, source)) continue;
    // Acquire: the message before its flag. Only a plan can promise messages that do not come.
    const Came came =
        wait_together(lane, lane.dispatch_flag(lane.rank, generation, source, i),
                      call.replay ? lane.sent_flag(Phase::rows, lane.rank, generation, source) : nullptr,
                      {Operation::dispatch, number, source});
    if (came == Came::ended) return;
    if (came == Came::no) {
      if (thread == 0) note_bad_source(lane, std::int64_t{source} * lane.max_tokens + i);
      continue;
    }
    take_message(call, tables, first_rows, number, source, i, total, plan, stage);
  }
}

// By one warp of `workers`: rows between groups.
__device__ inline void write_padding(const DispatchArguments& call, int worker, int workers,
                                     const PlanView& plan) {
  const LaneView& lane = call.lane;
  if (lane.layout == Layout::rank_major) return;
  const int thread = threadIdx.x % 32;
  const int groups = lane.first_expert[lane.rank + 1] - lane.first_expert[lane.rank];
  for (int group = worker; group < groups; group += workers) {
    const std::int64_t begin = call.row_offsets[group], count = call.counts[group];
    const std::int64_t aligned = min(align_rows(count, lane.alignment), lane.capacity);
    const std::int64_t end =
        lane.layout == Layout::expert_padded ? begin + aligned : call.row_offsets[group + 1];
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
