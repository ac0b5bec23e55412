/* The protocol of one lane of the GPU backend: call numbers, generations, refusals and halves, for three ranks.

   Comments quote the code that the lines below them stand for, with its file and function; model_test.py looks that it
   is still there. Each MISTAKE_... takes one such line away, and the model must fail then.

   Memory. Stores may pass one another. What a rank stores for a peer lies in a Place: which call stored it, and how
   far it is ordered. A reader who finds there what no release has ordered before the flag he has seen could have read
   the bytes of before as well: an assertion fails, so that no store buffer need be simulated. Flags are seen when they
   are stored, but one that nothing orders before the last word may be missed by a peer who has seen the last word.

   Steps. Every wait is for a number that only grows: a rank that looks later sees no less. So what a rank stores
   without looking at its peers in between comes all at once, as one step, and a wait is one step with the reads behind
   it. */

#define R 3
#ifndef CALLS
#define CALLS 5
#endif
#ifndef DEVIATIONS
#define DEVIATIONS 2 /* refusals and calls with other terms than the usual, of all ranks in all calls */
#endif

/* Where a writer stores in call n in the memory of a reader: its letter, its row and the flags. */
#define place(reader, generation, writer) (((reader) * 2 + (generation)) * R + (writer))
#define kPlaces (2 * R * R)
#ifdef MISTAKE_ONE_GENERATION_OF_LETTERS
#define post_at(reader, n, writer) place(reader, 0, writer)
#else
/* letters.cuh post_letters: `store_unit_relaxed_sys(lane.at<LetterUnit>(peer, letter) + i, unit);` */
#define post_at(reader, n, writer) place(reader, (n) & 1, writer)
#endif
#ifdef MISTAKE_ONE_GENERATION_OF_ROWS
#define row_at(reader, n, writer) place(reader, 0, writer)
#else
/* dispatch_send.cuh destinations: `to.message = lane.message(slot(), generation(), lane.rank, message,`
   combine_send.cuh row_at_home: `call.lane.combine_row(to.home, static_cast<int>(number & 1), to.first_row + row)` */
#define row_at(reader, n, writer) place(reader, (n) & 1, writer)
#endif
#define flag_at(reader, n, writer) place(reader, (n) & 1, writer)

#define kWritten 1 /* a store: its thread's next release orders it */
#define kReleased 2
typedef Place { byte call; byte ordered };
#define is_whole(place, n) (place.call == (n) && place.ordered == kReleased)

#define kRefusal 0
#define kUsual 1
#define kOther 2

byte letter_call[kPlaces], letter_terms[kPlaces];
Place letter[kPlaces]; /* its content */
Place row[kPlaces];
Place row_flag[kPlaces];
byte sent_flag[kPlaces];

byte number[R];                       /* of the call that runs */
byte ended[R];                        /* LaneState::ended */
bit finished[R];                      /* LaneState::finished, of two blocks */
bit sending[R * R], receiving[R * R]; /* blocks at work, by rank and peer */

byte terms_of[2 * R]; /* what each rank has brought to its calls, for the assertions alone */
byte deviations;

#define next(rank) (((rank) + 1) % R)
#define last(rank) (((rank) + 2) % R)

/* In each call two of the ranks have no rows for one another, so that only letters join them. */
#define has_row(n, writer, reader) (((n) + (writer) + (reader)) % R != 0)

/* A sending block, here with all the rows for one peer. */
proctype Sender(byte me; byte peer) {
  byte n;
end:
  do
  :: d_step {
      sending[me * R + peer] ->
      n = number[me];
      if
      :: has_row(n, me, peer) ->
        /* row_copy.cuh store: `*reinterpret_cast<uint4*>(mine + g * kGranule) = held[g];` */
        row[row_at(peer, n, me)].call = n;
        row[row_at(peer, n, me)].ordered = kWritten;
        /* announce.cuh ask: `if (thread == 0) store_release_block(&asked[warp], before + more);`
           announce.cuh run: `fence_acq_rel_sys();` */
#ifndef MISTAKE_FLAG_WITHOUT_RELEASE
        row[row_at(peer, n, me)].ordered = kReleased;
#endif
        /* announce.cuh run: `for (; done != wanted; ++done) set(flags[warp][done % kAsked], call);` */
        row_flag[flag_at(peer, n, me)].call = n;
        row_flag[flag_at(peer, n, me)].ordered = kWritten
      :: else
      fi;
#ifndef MISTAKE_LAST_WORD_WITHOUT_FENCE
      /* letters.cuh finish_sending: `__threadfence();`
         letters.cuh finish_sending: `fence_acq_rel_sys();` */
      row_flag[flag_at(peer, n, me)].ordered = kReleased;
#endif
      /* letters.cuh finish_sending: `if (before != static_cast<unsigned>(blocks - 1)) return;` */
      finished[me] = 1 - finished[me];
      if
      :: finished[me] == 0 ->
        /* letters.cuh finish_sending: `store_relaxed_sys(lane.sent_flag(phase, peer,` */
        sent_flag[flag_at(next(me), n, me)] = n;
        sent_flag[flag_at(last(me), n, me)] = n
      :: else
      fi;
      sending[me * R + peer] = 0;
      n = 0
    }
  od
}

/* A receiving block, here of the rows of one source. */
proctype Receiver(byte me; byte source) {
end:
  do
  :: d_step {
      /* wait.cuh wait_for: `if (load_acquire_sys(flag) >= awaited.call) return Came::yes;`
         wait.cuh wait_for_some: `return here != 0 ? CameFlags{here, 0}` */
      receiving[me * R + source] && row_flag[flag_at(me, number[me], source)].call >= number[me] ->
      /* dispatch_receive.cuh take_some: `wait_for_some(lane, flags, waits ? wanted : 0, last,`
         combine_home.cuh await_staged: `lane.combine_flags(lane.rank, generation(), first_row(home) + of) + quarter,` */
      assert(is_whole(row[row_at(me, number[me], source)], number[me])); /* the row of this call */
      receiving[me * R + source] = 0
    }
  :: d_step {
      /* wait.cuh wait_long: `if (has_ended(lane, awaited.call)) return Came::ended;`
         wait.cuh wait_long_for_some: `if (__any_sync(~0u, has_ended(lane, awaited.call))) return {0, 0};` */
      receiving[me * R + source] && ended[me] >= number[me] ->
      receiving[me * R + source] = 0
    }
  :: d_step {
      /* wait.cuh wait_long: `if (all_sent != nullptr && load_acquire_sys(all_sent) >= awaited.call)` */
      receiving[me * R + source] && sent_flag[flag_at(me, number[me], source)] >= number[me] ->
      /* wait.cuh wait_long: `return load_acquire_sys(flag) >= awaited.call ? Came::yes : Came::no;` */
      assert(row_flag[flag_at(me, number[me], source)].ordered == kReleased &&
             row_flag[flag_at(me, number[me], source)].call >= number[me]); /* not missed after the last word */
      receiving[me * R + source] = 0
    }
  od
}

/* A usual letter, or a refusal. Each unit of a letter carries the call's number beside its word, in one access: whoever
   sees the number has the word. A refusal's record is ordered before the units that announce it.
   letters.cuh letter_word: `if (i == kLetterTerms) return content.terms.hash;`
   plan_header.cuh post_refusal: `store_unit_relaxed_sys(letter + kLetterTerms, {number, 0});` */
inline post(peer) {
  letter[post_at(peer, n, me)].call = n;
  letter[post_at(peer, n, me)].ordered = kWritten;
  letter_terms[post_at(peer, n, me)] = terms;
#ifndef MISTAKE_NUMBER_AND_WORD_APART
  /* letters.cuh post_letters: `store_unit_relaxed_sys(lane.at<LetterUnit>(peer, letter) + i, unit);`
     ptx.cuh store_unit_relaxed_sys: `st.relaxed.sys.global.b128`
     plan_header.cuh post_refusal: `fence_acq_rel_sys();` */
  letter[post_at(peer, n, me)].ordered = kReleased;
#endif
  /* letters.cuh post_letters: `store_unit_relaxed_sys(lane.at<LetterUnit>(peer, letter) + i, unit);` */
  letter_call[post_at(peer, n, me)] = n
}

#define has_come(peer) (letter_call[post_at(me, n, peer)] >= n)
#define says_the_same(peer) (letter_terms[post_at(me, n, peer)] == terms)
#define is_at_work(block) (block[me * R + next(me)] || block[me * R + last(me)])

inline start_receivers() {
  receiving[me * R + next(me)] = has_row(n, me, next(me));
  receiving[me * R + last(me)] = has_row(n, me, last(me))
}

/* All calls of one rank: kernels of one stream, each after the one before. */
proctype Rank(byte me) {
  byte n, terms;
  byte odd; /* whose letter is not as this rank's; me: nobody's */
  bit fused;
  do
  :: atomic {
      n == CALLS -> break
    }
  :: atomic {
      n < CALLS ->
      /* combine.cu start_block: `state->number = calls + 1;` */
      n++;
      number[me] = n;
      if
      :: terms = kUsual
      :: deviations < DEVIATIONS -> terms = kOther; deviations++
      :: deviations < DEVIATIONS -> terms = kRefusal; deviations++
      fi;
      terms_of[(n & 1) * R + me] = terms;
      /* combine.cu work: `post_letters(lane, number, state->letter, nullptr,`
         small_operations.cu refusal_kernel: `if (peer != lane.rank) post_refusal(lane, number, peer,` */
      d_step {
        post(next(me));
        post(last(me))
      };
      if
      :: terms != kRefusal ->
        sending[me * R + next(me)] = 1;
        sending[me * R + last(me)] = 1;
        if
        :: fused = 1
        :: fused = 0
        fi
      :: else
      fi;
      if
      :: fused -> start_receivers()
      :: else
      fi
    };
    if
    :: terms != kRefusal && !fused ->
      d_step {
        /* The send half's kernel has ended.
           dispatch.cu dispatch_kernel: `if (kHalves != Halves::send) end_block(state->call.lane, state->number);` */
        !is_at_work(sending) -> start_receivers()
      }
    :: else
    fi;
    d_step {
#ifdef MISTAKE_EARLY_END_WITHOUT_ALL_LETTERS
      terms != kRefusal && has_come(next(me)) && !says_the_same(next(me)) || has_come(next(me)) && has_come(last(me)) ->
#elif defined(MISTAKE_REFUSAL_WITHOUT_ALL_LETTERS)
      terms == kRefusal || has_come(next(me)) && has_come(last(me)) ->
#else
      /* letters.cuh await_letters: `came = await_word(lane, call, mine.terms.operation, peer, kLetterTerms, &terms)`
         letters.cuh await_letters: `if (!__all_sync(~0u, came)) return false;`
         plan_header.cuh await_all: `await_word(lane, number, operation, peer, kLetterTerms, &terms);`
         small_operations.cu refusal_kernel: `await_all(lane, number, call.operation);` */
      has_come(next(me)) && has_come(last(me)) ->
#endif
      /* letters.cuh await_letters: `alike = terms == own;` */
      odd = (!says_the_same(next(me)) -> next(me) : (!says_the_same(last(me)) -> last(me) : me));
      if
      :: odd == me
      :: else ->
        /* letters.cuh await_letters: `if (!agree && speaks && peer == 0) store_release_gpu(&lane.state->ended, call);` */
        ended[me] = n
      fi
    };
    d_step {
      !is_at_work(sending) && !is_at_work(receiving) ->
      if
      :: terms == kRefusal
      :: terms != kRefusal && odd != me ->
        /* letters.cuh name_difference: `if (theirs != operation) {` */
        assert(is_whole(letter[post_at(me, n, odd)], n)) /* a letter of this call */
      :: terms != kRefusal && odd == me ->
        /* places.cuh await: `return wait_for(call.lane, &unit(source, i)->call, nullptr, {Operation::dispatch, number, source}) ==` */
        assert(is_whole(letter[post_at(me, n, next(me))], n)); /* a letter of this call */
        assert(is_whole(letter[post_at(me, n, last(me))], n))  /* a letter of this call */
      fi;
      /* Every rank's call ends in the same way. */
      assert(terms == kRefusal || (odd == me) == (terms_of[(n & 1) * R + next(me)] == terms &&
                                                  terms_of[(n & 1) * R + last(me)] == terms));
      ended[me] = 0; /* as good as any earlier call's number */
      terms = 0;
      fused = 0;
      odd = 0
    }
  od
}

init {
  atomic {
    run Rank(0); run Rank(1); run Rank(2);
    run Sender(0, 1); run Sender(0, 2); run Sender(1, 0); run Sender(1, 2); run Sender(2, 0); run Sender(2, 1);
    run Receiver(0, 1); run Receiver(0, 2); run Receiver(1, 0); run Receiver(1, 2); run Receiver(2, 0);
    run Receiver(2, 1)
  }
}
