/* The protocol of one lane of the GPU backend: call numbers, generations, refusals, halves, and rows that are stored
   where they stay, for three ranks.

   Comments quote the code that the lines below them stand for, with its file and function; model_test.py looks that it
   is still there. Each MISTAKE_... takes one such line away or puts it elsewhere, and the model must fail then.

   Memory. Stores may pass one another. What a rank stores for a peer lies in a place: which call stored it, and whether
   a release has ordered it. A reader who finds there what no release has ordered before the flag he has seen could have
   read the bytes of before as well: an assertion fails, so that no store buffer need be simulated. Flags are seen when
   they are stored, but one that nothing orders before the last word may be missed by a peer who has seen the last word.

   Steps. Every wait is for a number that only grows: a rank that looks later sees no less. So what a rank stores
   without looking at its peers in between comes all at once, as one step, and a wait is one step with the reads behind
   it. Nothing read becomes better by being read later, so all that a call reads is read as late as it can.

   What nobody looks at any more is forgotten, so that states differ only in what matters. */

#define R 3
#ifndef CALLS
#define CALLS 4
#endif
#ifndef DEVIATIONS
#define DEVIATIONS 1 /* refusals and calls with other terms than the usual, of all ranks in all calls */
#endif
#ifndef DAMAGED
#define DAMAGED 0 /* plans that promise rows which nobody sends, of all ranks in all calls */
#endif
#ifndef FEW
#define FEW 0 /* 1: ranks may have few tokens */
#endif
#ifndef PLACING
#define PLACING 2 /* calls that store rows where they stay, of all ranks in all calls */
#endif

/* Where a writer stores in call n in the memory of a reader: its letter, its row and the flags. */
#define pair(rank, peer) ((R - 1) * (rank) + ((peer) + R - 1 - (rank)) % R)
#define kPairs (R * (R - 1))
#define place(reader, generation, writer) (kPairs * (generation) + pair(reader, writer))
#define kAllPlaces (2 * kPairs)
#ifdef MISTAKE_ONE_GENERATION_OF_LETTERS
#define post_at(reader, n, writer) place(reader, 0, writer)
#else
/* call_header.cuh post_word: `store_packet_relaxed_sys(lane.at<LLPacket>(peer, unit), {call, word});` */
#define post_at(reader, n, writer) place(reader, (n) & 1, writer)
#endif
#ifdef MISTAKE_ONE_GENERATION_OF_ROWS
#define row_at(reader, n, writer) place(reader, 0, writer)
#else
/* send_row.cuh of: `lane.message(rank, parity, lane.rank, message, bytes)`
   combine_send.cuh row_at_home: `call.lane.combine_row(to.home, static_cast<int>(number & 1), to.first_row + row)` */
#define row_at(reader, n, writer) place(reader, (n) & 1, writer)
#endif
#define flag_at(reader, n, writer) place(reader, (n) & 1, writer)

/* What a place has of call n: a store, which its thread's next release orders; what a release has ordered. */
#define written(n) (2 * (n))
#define whole(n) (2 * (n) + 1)

/* What a call brings. */
#define kRefusal 0
#define kUsual 1
#define kOther 2

/* Facts in a fused dispatch's letter: the rank stores rows where they stay, at ranks that let it; it lets others; it has
   few tokens, and blocks that do nothing but send. */
#define kPlaces 1
#define kTakes 2
#define kFew 4

#define kSends 1
#define kSaysLast 2 /* all is sent but the last word */

byte letter_call[kAllPlaces], letter_terms[kAllPlaces], letter_facts[kAllPlaces];
byte letter[kAllPlaces]; /* its content */
byte row[kAllPlaces];    /* in staging */
byte row_flag[kAllPlaces], end_of_stream_flag[kAllPlaces];
/* The row a writer stores where it stays, in the reader's memory for arrivals: one for all calls. 0: nobody reads what
   was there.
   dispatch_send.cuh destination: `lane.received_row(rank, direct_row,` */
byte arrival[kPairs];

byte number[R];       /* of the call that runs */
byte terms_of[2 * R]; /* what each rank has brought to its calls */
byte facts[R];        /* of the call that runs */
bit damaged[R];       /* the plan promises rows that nobody sends */
bit finished[R];      /* LaneState::finished, of two blocks */
byte sending[kPairs]; /* blocks at work */

byte deviations, broken, placing; /* so far */
byte over[2];             /* ranks whose call of a generation is over */
hidden byte i;

#define now number[me]
#define next(rank) (((rank) + 1) % R)
#define last(rank) (((rank) + 2) % R)

/* In each call two of the ranks have no rows for one another, so that only letters join them. */
#define has_row(n, writer, reader) (((n) + (writer) + (reader)) % R != 0)
#define expects(source) (damaged[me] || has_row(now, me, source))

/* What rank me finds in its letters. */
#define has_come(peer) (letter_call[post_at(me, now, peer)] >= now)
#define all_have_come (has_come(next(me)) && has_come(last(me)))
#define says_the_same(peer) (letter_terms[post_at(me, now, peer)] == terms_of[(now & 1) * R + me])
#define all_say_the_same (says_the_same(next(me)) && says_the_same(last(me)))
#define facts_from(peer) letter_facts[post_at(me, now, peer)]

/* dispatch_coordinator.cuh await_row_offsets: `header.facts.accepts_direct_writes ? direct_writers : 0` */
#define is_direct_writer(peer) ((facts[me] & kTakes) && (facts_from(peer) & kPlaces))
#if defined(MISTAKE_PLACED_WHERE_NOT_LET) || defined(MISTAKE_PLACED_BEFORE_LETTERS)
#define is_direct_write_peer(peer) (facts[me] & kPlaces)
#else
/* dispatch_coordinator.cuh await_row_offsets: `header.facts.direct_write ? direct_write_peers : 0`
   dispatch_send.cuh destination: `(direct_write_peers >> rank & 1) == 0` */
#define is_direct_write_peer(peer) ((facts[me] & kPlaces) && (facts_from(peer) & kTakes))
#endif
#ifdef MISTAKE_PLACED_BEFORE_LETTERS
#define kLetsAlways 1 /* so that what letters say of it is known before */
#define may_send 1
#define sends_rows 1
#else
#define kLetsAlways 0
/* dispatch_kernel.cuh run: `has_row_offsets = await_row_offsets<Traits>(`
   dispatch_kernel.cuh run: `(step == 0 || has_row_offsets)) send(needs_row_offsets` */
#define may_send (!(facts[me] & kPlaces) || all_have_come)
#define sends_rows (!(facts[me] & kPlaces) || all_say_the_same)
#endif

/* Flags and the last word from a source. */
#define is_here(source) (row_flag[flag_at(me, now, source)] >= written(now))
/* wait.cuh wait_long: `if (all_sent != nullptr && load_acquire_sys(all_sent) >= awaited.call)` */
#define has_sent_all(source) (end_of_stream_flag[flag_at(me, now, source)] >= now)
#ifdef MISTAKE_PLACED_ROW_WITHOUT_FLAG
#define waits_no_more(source) (!expects(source) || is_here(source) || has_sent_all(source) || is_direct_writer(source))
#else
/* wait.cuh wait_for: `if (load_acquire_sys(flag) >= awaited.call) return WaitResult::yes;`
   wait.cuh wait_for_some: `if (here != 0) return {here, 0};`
   dispatch_receive.cuh await_some: `wait_for_some(lane, flags_of(mine),`
   combine_reduce.cuh await_staged: `lane.combine_flags(lane.rank, generation(), first_row(home) + of) + quarter,` */
#define waits_no_more(source) (!expects(source) || is_here(source) || has_sent_all(source))
#endif

#define is_at_work(block) (block[pair(me, next(me))] || block[pair(me, last(me))])
#ifdef MISTAKE_LAST_WORD_AFTER_ROWS
#define may_say_last (all_have_come && (!all_say_the_same || waits_no_more(next(me)) && waits_no_more(last(me))))
#else
#define may_say_last all_have_come
#endif

/* By a block that has sent all it had. */
inline say_last(peer) {
#ifndef MISTAKE_LAST_WORD_WITHOUT_FENCE
  /* call_header.cuh finish_sending: `__threadfence();`
     call_header.cuh finish_sending: `fence_acq_rel_sys();` */
  row_flag[flag_at(peer, now, me)] = row_flag[flag_at(peer, now, me)] | 1;
#endif
  finished[me] = 1 - finished[me];
  if
#ifndef MISTAKE_LAST_WORD_OF_THE_FIRST_BLOCK
  /* call_header.cuh finish_sending: `if (before != static_cast<unsigned>(blocks - 1)) return;` */
  :: finished[me] == 0 ->
#else
  :: finished[me] == 1 ->
#endif
    /* call_header.cuh finish_sending: `store_relaxed_sys(lane.end_of_stream_flag(phase, peer,` */
    end_of_stream_flag[flag_at(next(me), now, me)] = now;
    end_of_stream_flag[flag_at(last(me), now, me)] = now
  :: else
  fi;
  sending[pair(me, peer)] = 0
}

/* A sending block, here with all the rows for one peer. */
inline send(peer) {
  d_step {
    sending[pair(me, peer)] == kSends && may_send ->
    if
    :: has_row(now, me, peer) && sends_rows ->
      if
      :: is_direct_write_peer(peer) ->
        assert(arrival[pair(peer, me)] == 0); /* nobody reads it any more */
        arrival[pair(peer, me)] = written(now)
      :: else ->
        /* row_copy.cuh store: `*reinterpret_cast<uint4*>(mine + g * kGranule) = held[g];` */
        row[row_at(peer, now, me)] = written(now)
      fi;
#ifndef MISTAKE_FLAG_WITHOUT_RELEASE
      /* flag_publisher.cuh ask: `if (thread == 0) store_release_block(&asked[warp], before + more);`
         flag_publisher.cuh run: `fence_acq_rel_sys();`
         flag_publisher.cuh publish_now: `fence_acq_rel_sys();` */
      if
      :: is_direct_write_peer(peer) -> arrival[pair(peer, me)] = whole(now)
      :: else -> row[row_at(peer, now, me)] = whole(now)
      fi;
#endif
      /* flag_publisher.cuh run: `for (; done != wanted; ++done) set(flags[warp][done % kQueuedFlags], call);`
         flag_publisher.cuh publish_now: `set_flags(first, count, call);` */
      row_flag[flag_at(peer, now, me)] = written(now)
    :: else
    fi;
    if
    :: facts[me] == 0 || (facts[me] & kFew) || may_say_last ->
      /* combine.cu work: `finish_sending(lane, number, role.senders);`
         dispatch_kernel.cuh run: `if (!Role::kReceives || (Traits::kFewTokens && role.sends)) return finish(false);` */
      say_last(peer)
    :: else -> sending[pair(me, peer)] = kSaysLast
    fi
  }
}

/* The same block of a fused dispatch, later: only damaged plans make anybody wait for the last word, so it comes when
   what others wait for is done, after the letters. Before the block waits for rows, where it does that too: ranks with
   damaged plans would wait for one another's last words.
   dispatch_kernel.cuh finish: `state->number, role.senders);`
   dispatch_kernel.cuh run: `finish(!needs_row_offsets); if (!has_row_offsets) {` */
inline finish(peer) {
  d_step {
    sending[pair(me, peer)] == kSaysLast && may_say_last ->
    say_last(peer)
  }
}

/* All blocks of a rank that send. */
proctype Blocks(byte me) {
end:
  do
  :: send(next(me))
  :: send(last(me))
  :: finish(next(me))
  :: finish(last(me))
  od
}

/* A usual letter, or a refusal. Each unit of a letter carries the call's number beside its word, in one access: whoever
   sees the number has the word. A refusal's record is ordered before the units that announce it.
   call_header.cuh head_word: `if (i == kLetterTerms) return content.terms.hash;`
   plan_header.cuh post_refusal: `store_packet_relaxed_sys(letter + kLetterTerms, {number, 0});` */
inline post(peer) {
  letter[post_at(peer, now, me)] = written(now);
  letter_terms[post_at(peer, now, me)] = terms;
  letter_facts[post_at(peer, now, me)] = facts[me];
#ifndef MISTAKE_NUMBER_AND_WORD_APART
  /* call_header.cuh post_word: `store_packet_relaxed_sys(lane.at<LLPacket>(peer, unit), {call, word});`
     ptx.cuh store_packet_relaxed_sys: `st.relaxed.sys.global.b128`
     plan_header.cuh post_refusal: `fence_acq_rel_sys();` */
  letter[post_at(peer, now, me)] = whole(now);
#endif
  /* call_header.cuh post_word: `store_packet_relaxed_sys(lane.at<LLPacket>(peer, unit), {call, word});` */
  letter_call[post_at(peer, now, me)] = now
}

/* DispatchResult stay until the rank's next dispatch: its own kernels and the caller's that read them come before it on the
   stream, and calls of other kinds may come in between. */
inline stop_reading_arrivals() {
  if
  :: facts[me] & kTakes ->
    for (i : pair(me, next(me)) .. pair(me, last(me))) { arrival[i] = (arrival[i] < written(now) -> 0 : arrival[i]) }
  :: else
  fi
}

/* All blocks of a rank that receive, from one source. Who ends early has received what came before, but for a fused
   dispatch, which waits for letters first. Only whose plan is damaged need look at the last word; here all may. */
inline take(source) {
  if
  :: terms == kRefusal || !has_row(now, source, me) || odd != me && (facts[me] != 0 || !is_here(source))
  :: else ->
    if
    :: has_sent_all(source) ->
      /* wait.cuh wait_long: `>= awaited.call ? WaitResult::yes : WaitResult::no;`
         wait.cuh wait_long_for_some: `return {here, __ballot_sync(~0u, last) & ~here};` */
      assert(row_flag[flag_at(me, now, source)] == whole(now)) /* not missed after the last word */
    :: else
    fi;
    if
    :: is_direct_writer(source) ->
      /* receive_rows.cuh store_rows: `(context.direct_writers >> message.source & 1) != 0`
         receive_rows.cuh store_rows: `if (direct) from = call.received_parts[0]` */
      assert(arrival[pair(me, source)] == whole(now)) /* the row of this call */
    :: else ->
      assert(row[row_at(me, now, source)] == whole(now)) /* the row of this call */
    fi
  fi
}

/* By the last rank whose call ends. Only whether arrivals are read is of interest any more. */
inline forget() {
  over[now & 1]++;
  if
  :: over[now & 1] == R ->
    over[now & 1] = 0;
    for (i : 0 .. R - 1) { terms_of[(now & 1) * R + i] = 0 }
    for (i : kPairs * (now & 1) .. kPairs * (now & 1) + kPairs - 1) {
      if
      :: letter_call[i] <= now -> letter_call[i] = 0; letter[i] = 0; letter_terms[i] = 0; letter_facts[i] = 0
      :: else
      fi;
      row[i] = (row[i] <= whole(now) -> 0 : row[i]);
      row_flag[i] = (row_flag[i] <= whole(now) -> 0 : row_flag[i]);
      end_of_stream_flag[i] = (end_of_stream_flag[i] <= now -> 0 : end_of_stream_flag[i])
    }
    for (i : 0 .. kPairs - 1) { arrival[i] = (arrival[i] == whole(now) -> whole(0) : arrival[i]) }
  :: else
  fi
}

/* All calls of one rank: kernels of one stream, each after the one before. */
proctype Rank(byte me) {
  byte terms;
  byte odd; /* whose letter is not as this rank's; me: nobody's */
  bit halves;
  do
  :: atomic {
      now == CALLS -> break
    }
  :: atomic {
      now < CALLS ->
      /* combine.cu start_block: `state->number = calls + 1;` */
      now++;
      if
      :: terms = kUsual
      :: broken < DAMAGED -> terms = kUsual; damaged[me] = 1; broken++
      :: deviations < DEVIATIONS -> terms = kOther; deviations++
      :: deviations < DEVIATIONS -> terms = kRefusal; deviations++
      fi;
      terms_of[(now & 1) * R + me] = terms;
      if
      :: terms == kRefusal
      :: terms != kRefusal && PLACING == 0 -> halves = 1
      :: terms != kRefusal && !kLetsAlways /* a combine, which receives without letters */
      :: terms != kRefusal && PLACING + DAMAGED > 0 ->
        /* dispatch_coordinator.cuh fill_facts: `facts.accepts_direct_writes = fused && call.own_memory` */
        facts[me] = kTakes
      :: terms != kRefusal && FEW ->
        /* dispatch_coordinator.cuh fill_facts: `facts.token_indexed = token_indexed;` */
        facts[me] = kTakes | kFew
      :: terms != kRefusal && placing < PLACING ->
        /* dispatch_coordinator.cuh fill_facts: `facts.direct_write = fused` */
        facts[me] = kTakes | kPlaces; placing++
      fi;
      d_step {
#ifndef MISTAKE_LETTER_BEFORE_ARRIVALS_ARE_READ
        stop_reading_arrivals();
#endif
        /* combine.cu work: `post_head(lane, number, state->letter);`
           dispatch_kernel.cuh run: `post_head(call.lane, state->number,`
           small_operations.cu refusal_kernel: `if (peer != lane.rank) post_refusal(lane, number, peer,` */
        post(next(me));
        post(last(me));
        if
        :: terms != kRefusal -> sending[pair(me, next(me))] = kSends; sending[pair(me, last(me))] = kSends
        :: else
        fi
      }
    };
    d_step {
      /* A receive half comes when the send half's kernel has ended.
         dispatch_kernel.cuh run_dispatch_block: `if (kPhase != Phase::send) end_block(` */
      !(halves && is_at_work(sending)) && (
#ifdef MISTAKE_EARLY_END_WITHOUT_ALL_LETTERS
        terms != kRefusal && has_come(next(me)) && !says_the_same(next(me)) || all_have_come
#elif defined(MISTAKE_REFUSAL_WITHOUT_ALL_LETTERS)
        terms == kRefusal || all_have_come
#else
        /* call_header.cuh await_letters: `came = await_head(lane, {mine.terms.operation, call, peer}, &terms, &facts);`
           call_header.cuh await_letters: `if (!__all_sync(~0u, came)) return false;`
           plan_header.cuh await_all: `await_word(lane, number, operation, peer, kLetterTerms, &terms);`
           small_operations.cu refusal_kernel: `await_all(lane, number, call.operation);` */
        all_have_come
#endif
      ) ->
#ifdef MISTAKE_LETTER_BEFORE_ARRIVALS_ARE_READ
      stop_reading_arrivals();
#endif
      /* call_header.cuh await_letters: `alike = terms == own;` */
      odd = (!says_the_same(next(me)) -> next(me) : (!says_the_same(last(me)) -> last(me) : me))
    };
    d_step {
      /* call_header.cuh await_letters: `if (!agree && coordinates && peer == 0) store_release_gpu(&lane.state->ended, call);`
         wait.cuh wait_long: `if (has_ended(lane, awaited.call)) return WaitResult::ended;`
         wait.cuh wait_long_for_some: `if (__any_sync(~0u, has_ended(lane, awaited.call))) return {0, 0};` */
      !is_at_work(sending) && (odd != me || terms == kRefusal || waits_no_more(next(me)) && waits_no_more(last(me))) ->
      take(next(me));
      take(last(me));
      if
      :: terms == kRefusal
      :: terms != kRefusal && odd != me ->
        /* call_header.cuh name_difference: `if (theirs != operation) {` */
        assert(letter[post_at(me, now, odd)] == whole(now)) /* a letter of this call */
      :: terms != kRefusal && odd == me ->
        /* row_offsets.cuh for_each_source: `here = here && seen[s].call >= number;` */
        assert(letter[post_at(me, now, next(me))] == whole(now)); /* a letter of this call */
        assert(letter[post_at(me, now, last(me))] == whole(now))  /* a letter of this call */
      fi;
      /* Every rank's call ends in the same way. */
      assert(terms == kRefusal || (odd == me) == (terms_of[(now & 1) * R + next(me)] == terms &&
                                                  terms_of[(now & 1) * R + last(me)] == terms));
      forget();
      facts[me] = 0; damaged[me] = 0; terms = 0; odd = 0; halves = 0
    }
  od
}

init {
  atomic {
    run Rank(0); run Rank(1); run Rank(2); run Blocks(0); run Blocks(1); run Blocks(2)
  }
}
