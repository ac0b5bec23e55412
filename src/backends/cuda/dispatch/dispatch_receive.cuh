// The receiving role of dispatch: messages are spread to the rows of their experts as they arrive.
#pragma once

#include "backends/cuda/dispatch/message_queue.cuh"
#include "backends/cuda/dispatch/received_rows.cuh"
#include "backends/cuda/dispatch/row_offsets.cuh"

namespace ferry::cuda {

// A message of a team: whose, and where it lies among its source's: at its number, or its token's.
struct TeamMessage {
  bool has;
  int source, i;
  Quarters quarters;  // that are this warp's; the first takes the notes
};

// What this thread's slot of its team's message becomes.
struct TakenSlot {
  SlotMetadata note;     // .token: the message's token
  std::int32_t message;  // its number
  std::int32_t row;      // or -1
  int position;          // of this rank among the token's, ascending
  std::uint32_t kept;    // threads of the warp with a row
};

// One warp that receives.
template <class Traits>
struct Receiver {
  const DispatchArguments& call;
  BlockTables tables;
  RowOffsets places;
  Incoming incoming;
  std::uint32_t direct_writers;  // ranks that have stored rows where they stay
  SourceSplits splits;           // of rows, by source
  std::byte* memory;             // of a stream

  __device__ static int slot() { return static_cast<int>(threadIdx.x % 32); }
  __device__ std::uint64_t number() const { return incoming.number; }
  __device__ int parity() const { return incoming.parity(); }

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
  __device__ __forceinline__ void keep_notes(const Team& team, const TeamMessage& message,
                                             const TakenSlot& taken) const {
    const LaneView& lane = call.lane;
    const bool rank_major = lane.layout == Layout::rank_major;
    const std::uint32_t kept = taken.kept & team.threads(team.mine());
    std::int32_t one_row = -1;  // rank_major: the token's one row
    if (rank_major) one_row = __shfl_sync(~0u, taken.row, max(__ffs(static_cast<int>(kept)) - 1, 0));
    if (!message.has || message.quarters.first != 0) return;
    const std::int64_t where = std::int64_t{message.source} * lane.max_tokens + taken.message;
    const int slot = team.slot();
    const SlotMetadata& note = taken.note;
    const std::int32_t row = taken.row;
    if (!Traits::replays(call)) {
      if (slot < lane.top_k) call.plan.came_rows[where * lane.top_k + slot] = row;
      if (slot == 0) {
        call.plan.came_token[where] = note.token;
        call.plan.came_position[where] = taken.position;
      }
      if (row >= 0) call.plan.sources[row] = {message.source, note.token, rank_major ? -1 : slot};
    }
    if (!rank_major) {
      if (row < 0) return;
      if (call.weight != nullptr) call.weight[row] = note.weight;
      // A damaged plan may put a row where no expert of this rank is.
      if (call.group_of_row != nullptr) call.group_of_row[row] = max(note.local, 0);
      return;
    }
    if (kept == 0) return;
    if (slot == 0 && call.group_of_row != nullptr) call.group_of_row[one_row] = message.source;
    if (slot >= lane.top_k) return;
    call.local_ids[std::int64_t{one_row} * lane.top_k + slot] = note.local;
    if (call.weight != nullptr)
      call.weight[std::int64_t{one_row} * lane.top_k + slot] = note.local >= 0 ? note.weight : 0.0f;
  }

  __device__ const std::byte* message_of(int source, std::int64_t i) const {
    return call.lane.message(call.lane.rank, parity(), source, i, call.message.bytes);
  }

  __device__ __forceinline__ const LLPacket* note_of(const Team& team, const TeamMessage& message) const {
    return call.lane.slot_notes(call.lane.rank, parity(), message.source, message.i) + team.slot();
  }
  // This thread's note, if it has one, as it lies now.
  __device__ __forceinline__ LLPacket look_at_note(const Team& team, const TeamMessage& message) const {
    LLPacket seen{};
    if (message.has && team.slot() < call.lane.top_k) seen = load_packet_relaxed_sys(note_of(team, message));
    return seen;
  }

  // Each team's message's notes, waited for, from look_at_note() on. False: the call has ended early.
  __device__ __forceinline__ bool take_notes(const Team& team, const TeamMessage& message, LLPacket seen,
                                             TakenSlot* taken) const {
    const LaneView& lane = call.lane;
    const int slot = team.slot();
    const bool has = message.has && slot < lane.top_k;
    const LLPacket* unit = note_of(team, message);
    const std::int64_t entry =
        (std::int64_t{message.source} * lane.max_tokens + message.i) * lane.top_k + slot;
    // Asked for before anything is waited for.
    std::int32_t row = has && Traits::replays(call) ? call.plan.came_rows[entry] : -1;
    bool ended = false;
    if (has && seen.call >> SlotMetadata::kTokenBits < number()) {
      ended = wait_long(lane, &unit->call, nullptr,
                        {Operation::dispatch, number(), message.source, SlotMetadata::kTokenBits}) !=
              WaitResult::yes;
      seen = load_packet_relaxed_sys(unit);
    }
    if (__any_sync(~0u, ended)) return false;
    SlotMetadata note;
    if (has) note = SlotMetadata::of(seen);
    // Threads without a slot go by what the first one knows.
    note.token = __shfl_sync(~0u, note.token, team.mine() * team.size());
    std::int32_t number_of = message.i;
    if (incoming.by_token(message.source)) {
      number_of = note.token;
      note.token = message.i;
    }
    if (has && !Traits::replays(call)) {
      row = row_of_slot(message.source, number_of, note.local, note.ordinal);
    } else if (row != -1 && !usable(lane, row, places.begin[lane.groups], entry)) {
      row = -1;
    }
    const std::uint32_t lower = __ballot_sync(~0u, note.first_of_lower) & team.threads(team.mine());
    *taken = {note, number_of, row, __popc(static_cast<int>(lower)), __ballot_sync(~0u, row >= 0)};
    return true;
  }

  // The rows of the messages of teams in `teams` (one bit each), whose flags have been acquired.
  __device__ __forceinline__ void take_rows(const Team& team, std::uint32_t teams, const TeamMessage& message,
                                            const TakenSlot& taken) const {
    const LaneView& lane = call.lane;
    std::uint32_t kept = taken.kept & team.threads(team.mine());
    // All slots of a rank_major message name the token's one row.
    if (lane.layout == Layout::rank_major) kept &= ~kept + 1;
    const bool own = message.source == lane.rank && !call.own_staged,
               placed = !own && (direct_writers >> message.source & 1) != 0;
    const std::int32_t first = __shfl_sync(~0u, taken.row, max(__ffs(static_cast<int>(kept)) - 1, 0));
    const std::byte* staged = message_of(message.source, message.i);
    if (own) staged = token_row(call, 0, taken.note.token);
    // The first row lies where it stays: the others are copies of it.
    const std::byte* from = staged;
    if (placed) from = call.arrived[0] + std::int64_t{first} * static_cast<int>(call.parts.part[0].row_bytes);
    const std::uint32_t copies = placed ? kept & (kept - 1) : kept;
    if (Traits::computes(call)) {
      compute_rows(team, teams, staged, kept, taken);
      if (call.apply_weights) return;
    }
    const SmallPart small = look_at_small_part(team, message, taken);
    // What is left of a row for one warp, where warps share it, is soon here.
    if (moves_whole(call.parts.part[0]) && message.quarters.count() == kQuarters) {
      copy_rows(team, teams, from, copies, taken.row);
    } else {
      spread_parts(team, teams, 0, 1, from, copies, message, taken);
    }
    if (small.is) return store_small_part(team, teams, small, kept, taken.row);
    if (call.parts.count > 1) spread_parts(team, teams, 1, call.parts.count, from, kept, message, taken);
  }

  // Part 0 of each team's message, all of it, to the rows of its threads in `copies`.
  __device__ __forceinline__ void copy_rows(const Team& team, std::uint32_t teams, const std::byte* from,
                                            std::uint32_t copies, std::int32_t row) const {
    const std::uint32_t some = __ballot_sync(~0u, copies != 0);
    std::uint32_t todo = 0;
#pragma unroll 1
    for (std::uint32_t left = teams; left != 0; left &= left - 1) {
      const int t = __ffs(static_cast<int>(left)) - 1;
      todo |= (some >> (t << team.shift) & 1) << t;
    }
    if (todo == 0) return;
    const auto bytes = static_cast<int>(call.parts.part[0].row_bytes);
    RowStream<CopiedRows> stream{memory, {team, todo, from, bytes}};
    stream.start();
#pragma unroll 1
    for (; todo != 0; todo &= todo - 1) {
      const std::uint32_t to = __shfl_sync(~0u, copies, (__ffs(static_cast<int>(todo)) - 1) << team.shift);
#pragma unroll 1
      for (int at = 0; at < bytes; at += stream.kPiece) {
        const auto piece = stream.take();
#pragma unroll 1
        for (std::uint32_t left = to; left != 0; left &= left - 1) {
          const std::int32_t one = __shfl_sync(~0u, row, __ffs(static_cast<int>(left)) - 1);
          piece.store(call.arrived[0] + std::int64_t{one} * bytes, at, bytes);
        }
      }
    }
  }

  // This warp's share of part 1 of each team's message, if it is small and the last, on its way while part 0
  // is copied. Of teams whose flags have not come it is thrown away, and read again when they have.
  struct SmallPart {
    bool is;
    ByteRange range;
    uint4 held[2];
  };
  __device__ __forceinline__ SmallPart look_at_small_part(const Team& team, const TeamMessage& message,
                                                          const TakenSlot& taken) const {
    SmallPart small{false, {0, 0}, {}};
    if (!Traits::kSpecialised || call.parts.count != 2 || !moves_whole(call.parts.part[1])) return small;
    const auto bytes = static_cast<int>(call.parts.part[1].row_bytes);
    if (bytes > 32 * team.size()) return small;
    if (Traits::kByToken) {
      // Of few tokens scales alone: shares of them begin at multiples of 16 bytes where they are 32-bit
      // values, of whole blocks.
      if (!Traits::quantises(call) || call.fp8.packed || call.lane.hidden != 32 * bytes) return small;
    } else if (message.quarters.count() != kQuarters) {
      return small;
    }
    small.is = true;
    small.range = Traits::kByToken ? bytes_of_part<Traits>(call, 1, message.quarters) : ByteRange{0, bytes};
    const bool own = message.source == call.lane.rank && !call.own_staged;
    const std::byte* from = own ? token_row(call, 1, taken.note.token)
                                : message_of(message.source, message.i) + call.message.part_offset[1];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = small.range.begin + 16 * (team.slot() + i * team.size());
      if (message.has && at < small.range.end) small.held[i] = *reinterpret_cast<const uint4*>(from + at);
    }
    return small;
  }
  // `row`: of this thread's slot; `kept`: the team's slots whose row takes it.
  __device__ __forceinline__ void store_small_part(const Team& team, std::uint32_t teams,
                                                   const SmallPart& small, std::uint32_t kept,
                                                   std::int32_t row) const {
    const auto bytes = static_cast<int>(call.parts.part[1].row_bytes);
    std::uint32_t left = (teams >> team.mine() & 1) != 0 ? kept : 0;
#pragma unroll 1
    while (__any_sync(~0u, left != 0)) {
      const std::int64_t to = __shfl_sync(~0u, row, max(__ffs(static_cast<int>(left)) - 1, 0));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = small.range.begin + 16 * (team.slot() + i * team.size());
        if (left != 0 && at < small.range.end)
          *reinterpret_cast<uint4*>(call.arrived[1] + to * bytes + at) = small.held[i];
      }
      left &= left - 1;
    }
  }

  // Parts [first, last) of each team's message, one message after the other. `from`: part 0.
  __device__ void spread_parts(const Team& team, std::uint32_t teams, int first, int last,
                               const std::byte* from, std::uint32_t kept, const TeamMessage& message,
                               const TakenSlot& taken) const {
#pragma unroll 1
    for (; teams != 0; teams &= teams - 1) {
      const int thread = (__ffs(static_cast<int>(teams)) - 1) * team.size();
      const std::uint32_t to = __shfl_sync(~0u, kept, thread);
      const int source = __shfl_sync(~0u, message.source, thread), i = __shfl_sync(~0u, message.i, thread);
      const std::int32_t token = __shfl_sync(~0u, taken.note.token, thread);
      const Quarters quarters{__shfl_sync(~0u, message.quarters.first, thread),
                              __shfl_sync(~0u, message.quarters.last, thread)};
      const auto* row = pointer_of(from, thread);
      const bool own = source == call.lane.rank && !call.own_staged;
#pragma unroll 1
      for (int p = first; p < last && to != 0; ++p) {
        const std::byte* part = row;
        if (p > 0)
          part = own ? token_row(call, p, token) : message_of(source, i) + call.message.part_offset[p];
        spread_part<Traits>(call, p, part, taken.row, to, quarters);
      }
    }
  }

  // The row `from` of each team's threads, computed for each of the rows of `kept`, theirs as well.
  __device__ void compute_rows(const Team& team, std::uint32_t teams, const std::byte* from,
                               std::uint32_t kept, const TakenSlot& taken) const {
    for (; teams != 0; teams &= teams - 1) {
      const int thread = (__ffs(static_cast<int>(teams)) - 1) * team.size();
      const auto* row = pointer_of(from, thread);
      for (std::uint32_t left = __shfl_sync(~0u, kept, thread); left != 0; left &= left - 1) {
        const int at = __ffs(static_cast<int>(left)) - 1;
        compute_row(call, row, __shfl_sync(~0u, taken.row, at), __shfl_sync(~0u, taken.note.weight, at));
      }
    }
  }

  // By warp `worker` of `workers`: its messages, up to 32 in view, as they come. False: the call has ended
  // early.
  __device__ bool take_all(int worker, int workers) const {
    const LaneView& lane = call.lane;
    const int messages = slot() < lane.ranks ? incoming.messages_of(slot()) : 0;
    Turns turns{worker, workers, 0, 0, false};
    // Computed rows are the work of one warp. Of few that are only moved, shares may be small: what comes
    // last is then soon copied.
    const int hands = Traits::kByToken && !Traits::quantises(call) ? 2 * workers : workers;
    turns.splits = Traits::computes(call) ? 0 : splits_of(__reduce_add_sync(~0u, messages), hands);
    int most = messages;
    const std::int32_t* runs = incoming.runs;
    if (messages > runs[slot()]) most = (messages + runs[slot()] - 1) / runs[slot()] * runs[slot()];
    turns.units = __reduce_max_sync(~0u, most) * lane.ranks << turns.splits;
    turns.rotate = turns.splits == 0 && lane.by_ranks.quotient(workers) * lane.ranks == workers;
    const Team team = Team::of(lane.top_k);
    ComingMessage mine;
    int step = 0;
    std::uint32_t pending = incoming.fill(turns, 0, &step, &mine);
    // Few messages: their notes are read and kept while their rows are on the way.
    if (!Traits::replays(call) && __popc(static_cast<int>(pending)) <= team.count() &&
        worker + step * workers >= turns.units)
      return pending == 0 || take_few(team, pending, mine);
    if (!incoming.drop_absent(turns, 0, &pending, &step, &mine)) return false;
    while (pending != 0) {
      // The first quarter's flag is waited for by all shares of a row: where messages lie by number, its
      // notes are written by the warp that sends it.
      ReadyMask came = await_some(mine, pending, 1);
      if ((came.here | came.late) == 0) return false;
      pending &= ~(came.here | came.late);
#pragma unroll 1
      for (std::uint32_t here = came.here; here != 0;) {
        const TeamMessage message = assign(team, here, mine);
        TakenSlot taken;
        if (!take_notes(team, message, look_at_note(team, message), &taken)) return false;
        take_rows(team, (1u << min(__popc(static_cast<int>(here)), team.count())) - 1, message, taken);
        keep_notes(team, message, taken);
        for (int t = 0; t < team.count(); ++t) here &= here - 1;
      }
      const std::uint32_t before = pending;
      pending = incoming.fill(turns, pending, &step, &mine);
      if (!incoming.drop_absent(turns, before, &pending, &step, &mine)) return false;
    }
    return true;
  }

 private:
  __device__ __forceinline__ const std::uint64_t* flags_of(const ComingMessage& mine) const {
    return call.lane.dispatch_flags(call.lane.rank, parity(), mine.source, mine.i);
  }
  // The flags that a thread's message waits for, and `others`.
  __device__ __forceinline__ std::uint32_t wanted(const ComingMessage& mine, std::uint32_t others) const {
    return splits.flags(mine.source, mine.quarters) | others;
  }
  // Some of the messages of threads in `pending`.
  __device__ __forceinline__ ReadyMask await_some(const ComingMessage& mine, std::uint32_t pending,
                                                  std::uint32_t others) const {
    const LaneView& lane = call.lane;
    // Only a plan can promise messages that do not come.
    const std::uint64_t* last = Traits::replays(call)
                                    ? lane.end_of_stream_flag(Payload::rows, lane.rank, parity(), mine.source)
                                    : nullptr;
    const ReadyMask came =
        wait_for_some(lane, flags_of(mine), (pending >> slot() & 1) != 0 ? wanted(mine, others) : 0, last,
                      {Operation::dispatch, number(), mine.source});
    if ((came.late >> slot() & 1) != 0 && mine.quarters.first == 0)
      record_bad_source(lane, std::int64_t{mine.source} * lane.max_tokens + mine.i);
    return came;
  }

  // Those of `pending` whose shares are here.
  __device__ __forceinline__ std::uint32_t here_now(const ComingMessage& mine, std::uint32_t pending) const {
    return acquire_all(flags_of(mine), (pending >> slot() & 1) != 0 ? wanted(mine, 0) : 0, number());
  }

  // One message for each team at most.
  __device__ __forceinline__ bool take_few(const Team& team, std::uint32_t all,
                                           const ComingMessage& mine) const {
    TeamMessage message = assign(team, all, mine);
    TakenSlot taken;
    const LLPacket note = look_at_note(team, message);
    // Rows that do not travel need no flag. Others' are asked for with the notes.
    const std::uint32_t own = all & __ballot_sync(~0u, mine.source == call.lane.rank && !call.own_staged);
    std::uint32_t here = here_now(mine, all & ~own) | own;
    if (!take_notes(team, message, note, &taken)) return false;
    // Where messages lie by token, there may be none.
    const bool absent = taken.message == SlotMetadata::kNoMessage;
    std::uint32_t pending = all;
    const std::uint32_t none = __ballot_sync(~0u, message.has && absent);
    message.has = message.has && !absent;
    int team_of = 0;
    for (std::uint32_t left = none == 0 ? 0 : all; left != 0; left &= left - 1, ++team_of)
      if ((none & team.threads(team_of)) != 0) pending &= ~(left & ~left + 1);
    bool kept = false;
#pragma unroll 1
    while (pending != 0) {
      ReadyMask came{here & pending, 0};
      if (came.here == 0) {
        // Rows that are here are waited for by others: they come before what is only kept.
        if (!kept) keep_notes(team, message, taken);
        kept = true;
        came = await_some(mine, pending, 0);
        if (came.here == 0) return false;
      }
      pending &= ~came.here;
      std::uint32_t teams = 0;
      for (std::uint32_t left = came.here; left != 0; left &= left - 1)
        teams |= 1u << __popc(static_cast<int>(all & ((left & ~left + 1) - 1)));
      take_rows(team, teams, message, taken);
      here = pending == 0 ? 0 : here_now(mine, pending);
    }
    if (!kept) keep_notes(team, message, taken);
    return true;
  }

  // The messages of the first threads in `threads`, one for each team.
  __device__ __forceinline__ TeamMessage assign(const Team& team, std::uint32_t threads,
                                                const ComingMessage& mine) const {
    const std::uint32_t nth = team.nth_of(threads);
    const bool has = nth < 32;
    const int from = has ? static_cast<int>(nth) : 0;
    return {has,
            __shfl_sync(~0u, mine.source, from),
            __shfl_sync(~0u, mine.i, from),
            {__shfl_sync(~0u, mine.quarters.first, from), __shfl_sync(~0u, mine.quarters.last, from)}};
  }
};

}  // namespace ferry::cuda
