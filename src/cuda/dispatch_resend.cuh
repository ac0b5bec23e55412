// Sending by a plan that exists already: message by message.
#pragma once

#include "cuda/dispatch_send.cuh"

namespace ferry::cuda {

// Part 0 of the tokens of threads in `left` (one bit each), for a stream.
struct PlannedRows {
  RowsToRead rows;
  std::uint32_t left;
  std::int32_t token;  // of this thread's message

  __device__ __forceinline__ bool open(const std::byte** row, ByteRange* range) {
    if (left == 0) return false;
    rows.open(__shfl_sync(~0u, token, __ffs(static_cast<int>(left)) - 1), row, range);
    left &= left - 1;
    return true;
  }
};

// A message of a team, and what the plan says of this thread's slot of its token.
struct PlannedMessage {
  bool has = false;
  int rank = 0;
  std::int32_t i = 0, token = -1;  // -1: the message is empty
  std::int32_t slot_rank = -1, expert = -1, row = -1;
  float weight = 0;
};

// One warp that sends by a plan.
struct Resender {
  const SendState& state;
  const DispatchArguments& call;
  Team team;
  Sent sent{};

  __device__ Resender(const SendState& of) : state(of), call(of.call), team(Team::of(of.call.lane.top_k)) {}

  // Messages worker, worker + workers, ...: 32 in view at a time, one for each thread, then one for each
  // team.
  __device__ __forceinline__ void send_all(std::int64_t tokens, int worker, int workers, std::byte* memory) {
    const LaneView& lane = call.lane;
    const int me = static_cast<int>(threadIdx.x % 32);
    const int messages =
        me < lane.ranks ? static_cast<int>(messages_between(lane, call.plan, lane.rank, me)) : 0;
    const int units = __reduce_max_sync(~0u, messages) * lane.ranks;
    const bool streams = goes_by_stream(call, 0);
#pragma unroll 1
    for (int first = worker; first < units; first += 32 * workers) {
      const int unit = first + me * workers, i = lane.by_ranks.quotient(unit),
                next = lane.rank + 1 + unit - i * lane.ranks;
      const int rank = next < lane.ranks ? next : next - lane.ranks;
      const bool has = i < __shfl_sync(~0u, messages, rank);
      const std::int64_t where = std::int64_t{rank} * lane.max_tokens + i;
      std::int32_t token = has ? call.plan.sent_tokens[where] : 0;
      // A damaged plan: the message stays empty, its token -1.
      if (token < 0 || token >= tokens) {
        if (has) note_bad_source(lane, where);
        token = -1;
      }
      std::uint32_t left = __ballot_sync(~0u, has);
      const bool moves = has && token >= 0 && state.travels(rank);
      RowStream<PlannedRows> stream{memory,
                                    {RowsToRead::of(call), streams ? __ballot_sync(~0u, moves) : 0, token}};
      stream.start();
      PlannedMessage ahead = look_up(left, rank, i, token);
#pragma unroll 1
      while (left != 0) {
        const PlannedMessage now = ahead;
        const int count = min(__popc(static_cast<int>(left)), team.count());
        for (int t = 0; t < count; ++t) left &= left - 1;
        ahead = look_up(left, rank, i, token);
        send_messages(now, count, streams, stream);
      }
    }
    state.announcer->close();
    if (me == 0) sent.publish(call);
  }

 private:
  // The messages of the first threads in `left`, one for each team.
  __device__ __forceinline__ PlannedMessage look_up(std::uint32_t left, int rank, std::int32_t i,
                                                    std::int32_t token) const {
    const std::uint32_t nth = team.nth_of(left);
    const int from = nth < 32 ? static_cast<int>(nth) : 0;
    PlannedMessage message;
    message.has = nth < 32;
    message.rank = __shfl_sync(~0u, rank, from);
    message.i = __shfl_sync(~0u, i, from);
    message.token = __shfl_sync(~0u, token, from);
    if (!message.has || message.token < 0 || team.slot() >= call.lane.top_k) return message;
    const std::int64_t route = std::int64_t{message.token} * call.lane.top_k + team.slot();
    message.slot_rank = call.plan.route_rank[route];
    message.expert = call.plan.route_expert[route];
    message.row = call.plan.route_row[route];
    if (call.weights != nullptr) message.weight = call.weights[route];
    return message;
  }

  // Of the first `count` teams.
  template <class Rows>
  __device__ __forceinline__ void send_messages(const PlannedMessage& message, int count, bool streams,
                                                RowStream<Rows>& stream) {
    const LaneView& lane = call.lane;
    const int rank = message.rank;
    std::int32_t local = SlotNote::kElsewhere, row = -1;
    if (message.slot_rank == rank) {
      local = local_at(rank, message.expert);
      row = row_at(rank, message.row, std::int64_t{message.token} * lane.top_k + team.slot());
    }
    const std::uint32_t kept = __ballot_sync(~0u, row >= 0) & team.threads(team.mine());
    const std::int32_t placed = __shfl_sync(~0u, row, max(__ffs(static_cast<int>(kept)) - 1, 0));
    // Each thread of a team knows where its message goes; the first leads it.
    Destination to = state.destination(message.has, rank, message.i, kept != 0 ? placed : -1);
    jitter(lane);
    if (message.has && team.slot() < lane.top_k) {
      const SlotNote note{.token = message.token, .local = local, .weight = message.weight};
      store_unit_relaxed_sys(to.notes + team.slot(), note.unit(state.number));
    }
    const bool leads = message.has && team.slot() == 0;
    sent.add(leads && rank != lane.rank);
    const bool moves = leads && message.token >= 0 && state.travels(rank);
    const std::uint32_t moving = __ballot_sync(~0u, moves),
                        rows = __ballot_sync(~0u, moves && to.row != nullptr);
#pragma unroll 1
    for (int t = 0; t < count; ++t) {
      const std::int32_t token = __shfl_sync(~0u, message.token, t * team.size());
      if ((moving & team.threads(t)) != 0) {
        jitter(lane);
        send_row(call, token, to, rows & team.threads(t), {0, kQuarters}, streams, stream);
      }
      state.announcer->ask(leads && team.mine() == t, to.flags, 1);
    }
  }

  // A planned expert's number at its rank, or kElsewhere: none that the rank has.
  __device__ std::int32_t local_at(int rank, std::int32_t expert) const {
    const BlockTables& tables = state.tables;
    if (!is_expert(call.lane, expert)) return SlotNote::kElsewhere;
    const int position = tables.position_of[expert];
    return tables.rank_of[position] == rank ? position - tables.first_expert[rank] : SlotNote::kElsewhere;
  }

  // A planned row at another rank, or -1: dropped, or none that the rank has.
  __device__ std::int32_t row_at(int rank, std::int32_t row, std::int64_t route) const {
    const LaneView& lane = call.lane;
    const BlockTables& tables = state.tables;
    if (row == -1 || (state.takers >> rank & 1) == 0) return -1;
    const std::int64_t groups =
        lane.layout == Layout::expert_padded ? tables.first_expert[rank + 1] - tables.first_expert[rank] : 1;
    return usable(lane, row, groups * tables.capacity[rank], route) ? row : -1;
  }
};

}  // namespace ferry::cuda
