/* A model of the protocol of one lane of the GPU backend, for three ranks: call numbers, the two staging buffers, refusals,
   calls in phases, and direct writes (rows that a sender stores in the receiver's buffer, at their final position).

   Comments quote the code that the lines below them model, with its file and function; model_test.py checks that the code
   still contains the quotes. Each MISTAKE_... removes or moves one such line, and the model must then fail.

   Memory. Stores may become visible in any order. For each buffer that a rank stores to for a peer, the model keeps which
   call wrote it and whether a release has ordered the write. A reader that finds data which no release has ordered before
   the flag it has seen might as well have read the old bytes: an assertion fails. So no store buffer is simulated. Flags
   are seen at once, but a peer that has seen the end-of-stream flag may miss a flag that nothing orders before it.

   Steps. Every wait is for a number that only grows, so a rank that looks later sees no less. All that a rank stores
   without reading from its peers is therefore one step, and a wait is one step with the reads after it. No read gets
   better by coming later, so everything that a call reads is read as late as possible.

   Values that no rank reads any more are cleared, so that states differ only in what matters. */

#define R 3
#ifndef CALLS
#define CALLS 4
#endif
#ifndef DEVIATIONS
#define DEVIATIONS 1 /* refusals and calls with different options, of all ranks in all calls */
#endif
#ifndef DAMAGED
#define DAMAGED 0 /* plans that promise rows which no rank sends, of all ranks in all calls */
#endif
#ifndef FEW
#define FEW 0 /* 1: calls of few tokens, with metadata blocks, may occur */
#endif
#ifndef DIRECT_WRITES
#define DIRECT_WRITES 2 /* calls that write directly, of all ranks in all calls */
#endif

/* Index of the buffers that a writer stores to in a reader's memory in call n: its header, its row and its flags. */
#define pair(rank, peer) ((R - 1) * (rank) + ((peer) + R - 1 - (rank)) % R)
#define kPairs (R * (R - 1))
#define buffer(reader, parity, writer) (kPairs * (parity) + pair(reader, writer))
#define kBuffers (2 * kPairs)
#ifdef MISTAKE_ONE_BUFFER_OF_HEADERS
#define header_at(reader, n, writer) buffer(reader, 0, writer)
#else
/* call_header.cuh post_header_word: `store_packet_relaxed_sys(memory::at<LLPacket>(lane, peer, packet), {call, word});` */
#define header_at(reader, n, writer) buffer(reader, (n) & 1, writer)
#endif
#ifdef MISTAKE_ONE_BUFFER_OF_ROWS
#define row_at(reader, n, writer) buffer(reader, 0, writer)
#else
/* send_encoded.cuh of: `memory::message(lane, rank, parity, lane.rank, message, bytes)`
   combine_send.cuh staged_row: `memory::combine_row(call.lane, to.destination, static_cast<int>(number & 1), to.first_row + row)` */
#define row_at(reader, n, writer) buffer(reader, (n) & 1, writer)
#endif
#define flag_at(reader, n, writer) buffer(reader, (n) & 1, writer)

/* State of a buffer in call n: stored, to be ordered by its thread's next release; ordered by a release. */
#define written(n) (2 * (n))
#define whole(n) (2 * (n) + 1)

/* Options of a call. */
#define kRefusal 0
#define kUsual 1
#define kOther 2

/* Facts in the header of a fused dispatch: the rank writes directly to ranks that allow it; it allows direct writes; it
   has few tokens, and sender blocks that do nothing but send. */
#define kWritesDirectly 1
#define kAllowsDirect 2
#define kFew 4

/* State of a sender block. */
#define kSends 1
#define kSent 2 /* everything but the end-of-stream flag */

byte header_call[kBuffers], header_terms[kBuffers], header_facts[kBuffers];
byte header[kBuffers]; /* its content */
byte row[kBuffers];    /* in staging */
byte row_flag[kBuffers], end_of_stream_flag[kBuffers];
/* The row that a writer stores directly in the reader's receive buffer; there is one buffer for all calls. 0: no reader
   needs its content any more.
   dispatch_send.cuh destination: `memory::received_row(lane, rank, direct_row,` */
byte received[kPairs];

byte number[R];       /* of the running call */
byte terms_of[2 * R]; /* options that each rank has passed to its calls */
byte facts[R];  bit damaged[R]; /* of the running call; damaged: its plan promises rows that no rank sends */
bit finished[R];      /* LaneState::finished, of two blocks */
byte sending[kPairs]; /* sender blocks at work */

byte deviations, damaged_plans, direct_writes; /* so far */
byte over[2]; hidden byte i; /* over: ranks whose call of this parity is over */

#define now number[me]
#define next(rank) (((rank) + 1) % R)
#define last(rank) (((rank) + 2) % R)

/* In each call two of the ranks have no rows for one another: only their headers connect them. */
#define has_row(n, writer, reader) (((n) + (writer) + (reader)) % R != 0)
#define expects(source) (damaged[me] || has_row(now, me, source))

/* What rank me finds in the headers it has received. */
#define header_arrived(peer) (header_call[header_at(me, now, peer)] >= now)
#define all_headers_arrived (header_arrived(next(me)) && header_arrived(last(me)))
#define has_same_options(peer) (header_terms[header_at(me, now, peer)] == terms_of[(now & 1) * R + me])
#define all_have_same_options (has_same_options(next(me)) && has_same_options(last(me)))
#define facts_from(peer) header_facts[header_at(me, now, peer)]

/* dispatch_coordinator.cuh await_row_offsets: `header.facts.accepts_direct_writes ? direct_writers : 0` */
#define is_direct_writer(peer) ((facts[me] & kAllowsDirect) && (facts_from(peer) & kWritesDirectly))
#if defined(MISTAKE_DIRECT_WRITE_NOT_ALLOWED) || defined(MISTAKE_DIRECT_WRITE_BEFORE_HEADERS)
#define is_direct_write_peer(peer) (facts[me] & kWritesDirectly)
#else
/* dispatch_coordinator.cuh await_row_offsets: `header.facts.direct_write ? direct_write_peers : 0`
   dispatch_send.cuh destination: `(direct_write_peers >> rank & 1) == 0` */
#define is_direct_write_peer(peer) ((facts[me] & kWritesDirectly) && (facts_from(peer) & kAllowsDirect))
#endif
#ifdef MISTAKE_DIRECT_WRITE_BEFORE_HEADERS
#define kAllowsAlways 1 /* so that the headers' facts are known beforehand */
#define may_send 1
#define sends_rows 1
#else
#define kAllowsAlways 0
/* dispatch_kernel.cuh run: `has_row_offsets = await_row_offsets<Traits>(`
   dispatch_kernel.cuh run: `(step == 0 || has_row_offsets)) send(needs_row_offsets` */
#define may_send (!(facts[me] & kWritesDirectly) || all_headers_arrived)
#define sends_rows (!(facts[me] & kWritesDirectly) || all_have_same_options)
#endif

/* Flags from a source. */
#define row_arrived(source) (row_flag[flag_at(me, now, source)] >= written(now))
/* wait.cuh wait_long: `if (end_of_stream != nullptr && load_acquire_sys(end_of_stream) >= awaited.call)` */
#define has_finished(source) (end_of_stream_flag[flag_at(me, now, source)] >= now)
#ifdef MISTAKE_DIRECT_ROW_WITHOUT_FLAG
#define wait_is_over(source) (!expects(source) || row_arrived(source) || has_finished(source) || is_direct_writer(source))
#else
/* wait.cuh wait_flag: `if (load_acquire_sys(flag) >= awaited.call) return WaitResult::ready;`
   wait.cuh wait_any: `if (ready != 0) return {ready, 0};`
   dispatch_receive.cuh await_some: `wait_any(lane, flags_of(mine),`
   combine_reduce.cuh await_staged: `memory::combine_flags(lane, lane.rank, parity(), first_row(entry) + row) + quarter,` */
#define wait_is_over(source) (!expects(source) || row_arrived(source) || has_finished(source))
#endif

#define is_at_work(block) (block[pair(me, next(me))] || block[pair(me, last(me))])
#ifdef MISTAKE_END_OF_STREAM_AFTER_ROWS
#define may_finish (all_headers_arrived && (!all_have_same_options || wait_is_over(next(me)) && wait_is_over(last(me))))
#else
#define may_finish all_headers_arrived
#endif

/* A sender block that has sent everything. The last of the rank's blocks sets the end-of-stream flags. */
inline publish_end_of_stream(peer) {
#ifndef MISTAKE_END_OF_STREAM_WITHOUT_FENCE
  /* call_header.cuh publish_end_of_stream: `__threadfence();`
     call_header.cuh publish_end_of_stream: `fence_acq_rel_sys();` */
  row_flag[flag_at(peer, now, me)] = row_flag[flag_at(peer, now, me)] | 1;
#endif
  finished[me] = 1 - finished[me];
  if
#ifndef MISTAKE_END_OF_STREAM_BY_THE_FIRST_BLOCK
  /* call_header.cuh publish_end_of_stream: `if (before != static_cast<unsigned>(blocks - 1)) return;` */
  :: finished[me] == 0 ->
#else
  :: finished[me] == 1 ->
#endif
    /* call_header.cuh publish_end_of_stream: `store_relaxed_sys(memory::end_of_stream_flag(lane, payload, peer,` */
    end_of_stream_flag[flag_at(next(me), now, me)] = now;
    end_of_stream_flag[flag_at(last(me), now, me)] = now
  :: else
  fi;
  sending[pair(me, peer)] = 0
}

/* A sender block; in the model, each block has the rows for one peer. */
inline send(peer) {
  d_step {
    sending[pair(me, peer)] == kSends && may_send ->
    if
    :: has_row(now, me, peer) && sends_rows ->
      if
      :: is_direct_write_peer(peer) ->
        assert(received[pair(peer, me)] == 0); /* no reader needs the old row any more */
        received[pair(peer, me)] = written(now)
      :: else ->
        /* row_copy.cuh store: `*reinterpret_cast<uint4*>(mine + g * kGranule) = held[g];` */
        row[row_at(peer, now, me)] = written(now)
      fi;
#ifndef MISTAKE_FLAG_WITHOUT_RELEASE
      /* flag_publisher.cuh enqueue: `if (thread == 0) store_release_block(&requested[warp], before + more);`
         flag_publisher.cuh run: `fence_acq_rel_sys();`
         flag_publisher.cuh publish_now: `fence_acq_rel_sys();` */
      if
      :: is_direct_write_peer(peer) -> received[pair(peer, me)] = whole(now)
      :: else -> row[row_at(peer, now, me)] = whole(now)
      fi;
#endif
      /* flag_publisher.cuh run: `for (; done != wanted; ++done) publish(requests[warp][done % kQueuedFlags], call);`
         flag_publisher.cuh publish_now: `set_flags(first, count, call);` */
      row_flag[flag_at(peer, now, me)] = written(now)
    :: else
    fi;
    if
    :: facts[me] == 0 || (facts[me] & kFew) || may_finish ->
      /* combine_kernel.cuh work: `publish_end_of_stream(lane, number, role.senders);`
         dispatch_kernel.cuh run: `if (!Role::kReceives || (Traits::kFewTokens && role.sends)) return finish(false);` */
      publish_end_of_stream(peer)
    :: else -> sending[pair(me, peer)] = kSent
    fi
  }
}

/* The same block of a fused dispatch, later. Only ranks with damaged plans wait for the end-of-stream flag, so it is set
   after the headers have arrived, when everything that others wait for is done. It is set before a block that also
   receives waits for rows: otherwise ranks with damaged plans would wait for one another's flags.
   dispatch_kernel.cuh finish: `state->number, role.senders);`
   dispatch_kernel.cuh run: `finish(!needs_row_offsets); if (!has_row_offsets) return leave_empty();` */
inline finish(peer) {
  d_step {
    sending[pair(me, peer)] == kSent && may_finish -> publish_end_of_stream(peer)
  }
}

/* All sender blocks of a rank. */
proctype Blocks(byte me) {
end:
  do
  :: send(next(me))   :: send(last(me))
  :: finish(next(me)) :: finish(last(me))
  od
}

/* A call header or a refusal. Each LL packet of a header holds the call number beside its payload and is stored in one
   access: a reader that sees the number has the payload. A refusal's record is ordered before the packets that announce it.
   call_header.cuh header_word: `if (i == kHeaderTerms) return content.terms.hash;`
   plan_header.cuh post_refusal: `store_packet_relaxed_sys(header + kHeaderTerms, {number, 0});` */
inline post_header(peer) {
  header[header_at(peer, now, me)] = written(now);
  header_terms[header_at(peer, now, me)] = terms;
  header_facts[header_at(peer, now, me)] = facts[me];
#ifndef MISTAKE_NUMBER_AND_PAYLOAD_APART
  /* call_header.cuh post_header_word: `store_packet_relaxed_sys(memory::at<LLPacket>(lane, peer, packet), {call, word});`
     ptx.cuh store_packet_relaxed_sys: `st.relaxed.sys.global.b128`
     plan_header.cuh post_refusal: `fence_acq_rel_sys();` */
  header[header_at(peer, now, me)] = whole(now);
#endif
  header_call[header_at(peer, now, me)] = now
}

/* Received rows stay until the rank's next dispatch: all kernels that read them, the caller's included, come before it on
   the stream. Calls of other kinds may come in between. */
inline release_receive_buffer() {
  if
  :: facts[me] & kAllowsDirect ->
    for (i : pair(me, next(me)) .. pair(me, last(me))) { received[i] = (received[i] < written(now) -> 0 : received[i]) }
  :: else
  fi
}

/* All receiver blocks of a rank, for one source. A rank that aborts has received the rows that arrived before, except in a
   fused dispatch, which waits for the headers first. Only ranks with damaged plans need the end-of-stream flag; in the
   model every rank may look at it. */
inline receive(source) {
  if
  :: terms == kRefusal || !has_row(now, source, me) || different != me && (facts[me] != 0 || !row_arrived(source))
  :: else ->
    if
    :: has_finished(source) ->
      /* wait.cuh wait_long: `>= awaited.call ? WaitResult::ready : WaitResult::end_of_data;`
         wait.cuh wait_any_slow: `return {ready, __ballot_sync(~0u, finished) & ~ready};` */
      assert(row_flag[flag_at(me, now, source)] == whole(now)) /* not missed after the end-of-stream flag */
    :: else
    fi;
    if
    :: is_direct_writer(source) ->
      /* dispatch_receive.cuh store_rows: `(context.direct_writers >> message.source & 1) != 0`
         dispatch_receive.cuh store_rows: `if (direct) from = call.received_parts[0]` */
      assert(received[pair(me, source)] == whole(now)) /* the row of this call */
    :: else ->
      assert(row[row_at(me, now, source)] == whole(now)) /* the row of this call */
    fi
  fi
}

/* The last rank whose call ends clears the call's buffers. Of the received rows it only matters whether they are still
   read. */
inline clear_unread() {
  over[now & 1]++;
  if
  :: over[now & 1] == R ->
    over[now & 1] = 0;
    for (i : 0 .. R - 1) { terms_of[(now & 1) * R + i] = 0 }
    for (i : kPairs * (now & 1) .. kPairs * (now & 1) + kPairs - 1) {
      if
      :: header_call[i] <= now -> header_call[i] = 0; header[i] = 0; header_terms[i] = 0; header_facts[i] = 0
      :: else
      fi;
      row[i] = (row[i] <= whole(now) -> 0 : row[i]);
      row_flag[i] = (row_flag[i] <= whole(now) -> 0 : row_flag[i]);
      end_of_stream_flag[i] = (end_of_stream_flag[i] <= now -> 0 : end_of_stream_flag[i])
    }
    for (i : 0 .. kPairs - 1) { received[i] = (received[i] == whole(now) -> whole(0) : received[i]) }
  :: else
  fi
}

/* All calls of one rank: kernels on one stream, one after the other. */
proctype Rank(byte me) {
  byte terms;
  byte different; /* rank whose options differ from this rank's; me: none */
  bit in_phases;
  do
  :: atomic { now == CALLS -> break }
  :: atomic {
      now < CALLS ->
      /* combine_kernel.cuh start_block: `state->number = calls + 1;` */
      now++;
      if
      :: terms = kUsual
      :: damaged_plans < DAMAGED -> terms = kUsual; damaged[me] = 1; damaged_plans++
      :: deviations < DEVIATIONS -> terms = kOther; deviations++
      :: deviations < DEVIATIONS -> terms = kRefusal; deviations++
      fi;
      terms_of[(now & 1) * R + me] = terms;
      if
      :: terms == kRefusal
      :: terms != kRefusal && DIRECT_WRITES == 0 -> in_phases = 1
      :: terms != kRefusal && !kAllowsAlways /* a combine, which receives without waiting for headers */
      :: terms != kRefusal && DIRECT_WRITES + DAMAGED > 0 ->
        /* dispatch_coordinator.cuh fill_facts: `facts.accepts_direct_writes = !kWide && fused && call.own_memory` */
        facts[me] = kAllowsDirect
      :: terms != kRefusal && FEW ->
        /* dispatch_coordinator.cuh fill_facts: `facts.token_indexed = token_indexed;` */
        facts[me] = kAllowsDirect | kFew
      :: terms != kRefusal && direct_writes < DIRECT_WRITES ->
        /* dispatch_coordinator.cuh fill_facts: `facts.direct_write = !kWide && fused` */
        facts[me] = kAllowsDirect | kWritesDirectly; direct_writes++
      fi;
      d_step {
#ifndef MISTAKE_HEADER_BEFORE_ROWS_ARE_READ
        release_receive_buffer();
#endif
        /* combine_kernel.cuh work: `post_header(lane, number, state->call_header);`
           dispatch_kernel.cuh run: `post_header(call.lane, state->number,`
           small_operations.cu refusal_kernel: `if (peer != lane.rank) post_refusal(lane, number, peer,` */
        post_header(next(me)); post_header(last(me));
        if
        :: terms != kRefusal -> sending[pair(me, next(me))] = kSends; sending[pair(me, last(me))] = kSends
        :: else
        fi
      }
    };
    d_step {
      /* A receive phase starts when the kernel of the send phase has ended.
         dispatch_kernel.cuh run_dispatch_block: `if (kPhase != Phase::send) store_call_number(` */
      !(in_phases && is_at_work(sending)) && (
#ifdef MISTAKE_ABORT_WITHOUT_ALL_HEADERS
        terms != kRefusal && header_arrived(next(me)) && !has_same_options(next(me)) || all_headers_arrived
#elif defined(MISTAKE_REFUSAL_WITHOUT_ALL_HEADERS)
        terms == kRefusal || all_headers_arrived
#else
        /* call_header.cuh await_all_headers: `received = await_header(lane, {mine.terms.operation, call, peer}, &terms, &facts);`
           call_header.cuh await_all_headers: `if (!__all_sync(~0u, received)) return false;`
           plan_header.cuh drain_headers: `await_header_word(lane, number, operation, peer, kHeaderTerms, &terms);`
           small_operations.cu refusal_kernel: `drain_headers(lane, number, call.operation);` */
        all_headers_arrived
#endif
      ) ->
#ifdef MISTAKE_HEADER_BEFORE_ROWS_ARE_READ
      release_receive_buffer();
#endif
      /* call_header.cuh await_all_headers: `alike = terms == own;` */
      different = (!has_same_options(next(me)) -> next(me) : (!has_same_options(last(me)) -> last(me) : me))
    };
    d_step {
      /* call_header.cuh await_all_headers: `if (!agree && coordinates && peer == 0) set_aborted(lane, call);`
         wait.cuh wait_long: `if (is_aborted(lane, awaited.call)) return WaitResult::aborted;`
         wait.cuh wait_any_slow: `if (__any_sync(~0u, is_aborted(lane, awaited.call))) return {0, 0};` */
      !is_at_work(sending) && (different != me || terms == kRefusal || wait_is_over(next(me)) && wait_is_over(last(me))) ->
      receive(next(me)); receive(last(me));
      if
      :: terms == kRefusal
      :: terms != kRefusal && different != me ->
        /* call_header.cuh report_mismatch: `if (theirs != operation) {` */
        assert(header[header_at(me, now, different)] == whole(now)) /* a header of this call */
      :: terms != kRefusal && different == me ->
        /* row_offsets.cuh for_each_source: `ready = ready && loaded[s].call >= number;` */
        /* headers of this call */
        assert(header[header_at(me, now, next(me))] == whole(now)); assert(header[header_at(me, now, last(me))] == whole(now))
      fi;
      /* The call ends in the same way on all ranks. */
      assert(terms == kRefusal || (different == me) == (terms_of[(now & 1) * R + next(me)] == terms &&
                                                  terms_of[(now & 1) * R + last(me)] == terms));
      clear_unread();
      facts[me] = 0; damaged[me] = 0; terms = 0; different = 0; in_phases = 0
    }
  od
}

init {
  atomic { run Rank(0); run Rank(1); run Rank(2); run Blocks(0); run Blocks(1); run Blocks(2) }
}
