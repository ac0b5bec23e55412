/* A model of calls in two hops: windows, credits and forwarding, for two nodes of two ranks (0 and 1, 2 and 3). Each rank
   sends to its node's other rank directly, and to the other node by a relay, its twin there. In a dispatch the relay passes
   messages on; in a combine (SUMS) the relay is on the node that sends, and adds its own rows and its peer's by token.

   What a rank sends another in a hop passes through a window of SLOTS slots in the reader's memory. A slot has a flag, set when
   its message may be read. The reader says in the writer's memory that it has read the slot's message: its credit. A stream ends
   with a count. Flags, credits and counts hold the call number above the count, so nothing is reset.

   Between nodes a credit arrives some time after it has been given, and a rank ends its call when all of its credits have
   arrived. All ranks are alike, so this is modelled for what rank 0 writes; credits of other ranks arrive at once.

   Comments quote the code that the lines below them model, as in lane.pml.

   Roles of a rank take turns in any order, and none waits while another of them could go on: each is a guarded step.

   Memory. As in lane.pml: a reader that finds a message which no release has ordered before its flag fails an assertion. A slot
   must not be written before its message has been read. Each MISTAKE_... removes or moves a line, and the model must then
   fail. */

#define R 4
#define peer(rank) ((rank) ^ 1) /* of the same node */
#define twin(rank) ((rank) ^ 2)
#define cross(rank) ((rank) ^ 3)

#ifndef CALLS
#define CALLS 2
#endif
#define SLOTS 1
#ifndef MESSAGES
#define MESSAGES 2 /* the most that a rank sends to a relay in a call, or has tokens */
#endif
#ifndef DIRECT
#define DIRECT 1 /* messages to the peer */
#endif
#ifndef SUMS
#define SUMS 0
#endif

/* Streams to a reader: to it as a relay; from its peer itself; what a relay passes on. */
#define kHop1 0
#define kDirect 1
#define kRelayed 2
#define stream(reader, kind) (3 * (reader) + (kind))
#define kStreams (3 * R)
#define slot(s, k) ((s) * SLOTS + (k) % SLOTS)

#if SUMS
#define kBetweenNodes kRelayed
#define writer_of_hop1(reader) peer(reader)
#define writer_of_relayed(reader) twin(reader)
#define reader_of_hop1(writer) peer(writer)
#define reader_of_relayed(writer) twin(writer)
#else
#define kBetweenNodes kHop1
#define writer_of_hop1(reader) twin(reader)
#define writer_of_relayed(reader) peer(reader)
#define reader_of_hop1(writer) twin(writer)
#define reader_of_relayed(writer) peer(writer)
#endif

/* What rank 0 writes to the other node. */
#define between_nodes stream(twin(0), kBetweenNodes)

/* A count with its call.
   hop_state.cuh hop_tag: `number << kHopCountBits | static_cast<std::uint64_t>(count)` */
#define kMost 8
#define tag(n, count) (kMost * (n) + (count))
#define count_of(tagged) ((tagged) % kMost)

/* Of each slot. */
byte message[kStreams * SLOTS]; /* tag of the message; whole: a release has ordered it */
bit whole[kStreams * SLOTS];
bit unread[kStreams * SLOTS];
byte flag[kStreams * SLOTS];
byte note[kStreams * SLOTS]; /* the message's content */
byte credit[kStreams * SLOTS];
byte late_credit; /* on its way to rank 0; 0: none */
/* Of each stream. */
byte end_count[kStreams];

byte number[R];               /* of the running call */
byte header[R];               /* the last call whose header the rank has posted */
byte out[kStreams];           /* by stream: written in this call */
byte in[kStreams];            /* read in this call */
byte pending[R], own_next[R]; /* of the relay: ranks that its message is still for; its own next row */
bit started[R];
byte last_token[R];
byte done[R]; /* roles that have ended */
#define kSender 1
#define kSendsDirectly 2
#define kRelay 4
#define kReceivesDirect 8
#define kReceivesRelayed 16
#define kAll 31

#define now number[me]
#define works(role) (now > 0 && (done[me] & (role)) == 0 && all_headers)
#ifdef MISTAKE_WRITE_BEFORE_HEADERS
#define all_headers 1
#else
/* hop_block.cuh run: `if (!await_headers()) return leave_empty();` */
#define all_headers (header[0] >= now && header[1] >= now && header[2] >= now && header[3] >= now)
#endif

/* What ranks send. Calls with few messages come before calls with many, so that old counts would be too small. */
#define messages_of(rank) (now % 2 -> 1 : MESSAGES)
/* 1: the relay; 2: its peer; 3: both. */
#define targets_of(rank, i) ((i) == 0 -> 3 : ((i) == 2 -> 1 : ((now + (rank)) % 2 -> 2 : 3)))
#define for_relay 1
#define for_peer 2
#define has_row(rank, source, token) ((token) < MESSAGES && ((now + (rank) + 2 * (source) + (token)) % 3 != 0))

/* --- streams ------------------------------------------------------------------------------------------------------- */

#ifdef MISTAKE_CREDIT_WITHOUT_CALL
#define was_read(s, k) (count_of(credit[slot(s, k)]) >= (k) + 1)
#else
/* hop_state.cuh was_read: `const std::uint64_t tag = hop_tag(number, k + 1);`
   hop_state.cuh was_read: `load_acquire_sys(credit) >= tag` */
#define was_read(s, k) (credit[slot(s, k)] >= tag(now, (k) + 1))
#endif
/* hop_state.cuh has_room: `if (k < slots()) return true;`
   hop_state.cuh has_room: `room = was_read(hop, origin, reader, channel, k - slots());` */
#define has_room(s) (out[s] < SLOTS || was_read(s, out[s] - SLOTS))
#ifdef MISTAKE_END_WITHOUT_CREDITS
#define is_closed(s) 1
#else
/* hop_state.cuh is_closed: `read = read && was_read(hop, origin, reader, channel, k);` */
#define is_closed(s) (out[s] == 0 || was_read(s, out[s] - 1))
#endif
#ifdef MISTAKE_FLAG_WITHOUT_CALL
#define arrived(s) (count_of(flag[slot(s, in[s])]) >= in[s] + 1)
#else
/* hop_state.cuh look: `const std::uint64_t tag = hop_tag(number, k + 1);`
   hop_state.cuh look: `load_acquire_sys(flag) >= tag` */
#define arrived(s) (flag[slot(s, in[s])] >= tag(now, in[s] + 1))
#endif
#ifdef MISTAKE_END_WITHOUT_CALL
#define has_ended(s) (!arrived(s) && end_count[s] > 0 && count_of(end_count[s]) <= in[s])
#else
/* hop_state.cuh look: `end >> kHopCountBits == number && static_cast<std::int64_t>(end & kHopCountMask) <= k` */
#define has_ended(s) (!arrived(s) && end_count[s] / kMost == now && count_of(end_count[s]) <= in[s])
#endif

/* hop_state.cuh publish: `const std::uint64_t tag = hop_tag(number, k + 1);`
   hop_state.cuh publish: `transport.signal(lane(), reader, flag, tag);` */
inline write(s, content) {
  assert(unread[slot(s, out[s])] == 0); /* the slot's message has been read */
  message[slot(s, out[s])] = tag(now, out[s] + 1);
  note[slot(s, out[s])] = content;
  unread[slot(s, out[s])] = 1;
#ifdef MISTAKE_FLAG_WITHOUT_RELEASE
  whole[slot(s, out[s])] = 0;
#else
  whole[slot(s, out[s])] = 1;
#endif
  flag[slot(s, out[s])] = tag(now, out[s] + 1);
  out[s]++
}

/* hop_state.cuh end: `hop_tag(number, total)` */
inline publish_end(s) { end_count[s] = tag(now, out[s]) }

inline read(s) {
  assert(message[slot(s, in[s])] == tag(now, in[s] + 1)); /* of this call, and not overwritten */
  assert(whole[slot(s, in[s])])
}

inline set_credit(s, at, value) {
  if
  :: (s) == between_nodes ->
    assert(late_credit == 0); /* no two are on their way to one word, which would arrive in any order */
    late_credit = value
  :: else -> credit[at] = value
  fi
}
/* hop_state.cuh give_back: `hop_tag(number, k + 1)` */
inline give_back(s) { set_credit(s, slot(s, in[s] - 1), tag(now, in[s])) }

inline finish_reading(s) {
  unread[slot(s, in[s])] = 0;
  in[s]++
}

/* hop_block.cuh run_tasks: `if (at.done != 0) continue;`
   hop_send.cuh waits_for: `return false;` */

/* --- roles --------------------------------------------------------------------------------------------------------- */

#ifdef MISTAKE_RELAY_AFTER_SENDING
#define may_relay (done[me] & kSender)
#else
#define may_relay 1
#endif
#ifdef MISTAKE_RECEIVE_AFTER_RELAYING
#define may_receive (done[me] & kRelay)
#else
#define may_receive 1
#endif

#define to_relay stream(reader_of_hop1(me), kHop1)
#define to_peer stream(peer(me), kDirect)
#define as_relay stream(me, kHop1)
#define passed_on stream(reader_of_relayed(me), kRelayed)

#define has_published_end(s) (end_count[s] / kMost == now)
inline credit_arrives() {
  d_step {
    me == 0 && late_credit != 0 ->
    credit[slot(between_nodes, 0)] = late_credit;
    late_credit = 0
  }
}

/* hop_send.cuh ends_now: `if (at.ended != 0) return false;`
   hop_send.cuh send_to_relay: `return work.channels.is_closed(0, work.routes.me(), relay, channel, total) || waits_for(at, relay);`
   hop_send.cuh relay_sums: `if (!work.channels.is_closed(1, me, reader, channel, sent)) closed = waits_for(at, reader);` */
inline close(role) {
  d_step {
    me == 0 && works(role) && has_published_end(between_nodes) && is_closed(between_nodes) -> done[me] = done[me] | role
  }
}

/* hop_send.cuh send_directly: `if (!work.channels.has_room(1, me, rank, channel, at.next)) return waits_for(at, rank);`
   hop_send.cuh send_directly: `work.channels.end(1, me, rank, channel, at.next);` */
inline send_directly() {
  d_step {
    works(kSendsDirectly) && (out[to_peer] == DIRECT || has_room(to_peer)) ->
    if
    :: out[to_peer] < DIRECT -> write(to_peer, 0)
    :: else
    fi;
    if
    :: out[to_peer] == DIRECT -> publish_end(to_peer); done[me] = done[me] | kSendsDirectly
    :: else
    fi
  }
}

/* hop_send.cuh receive_from: `work.channels.give_back(1, origin, writer, channel, at.next);` */
inline receive(kind, role) {
  d_step {
    works(role) && may_receive && arrived(stream(me, kind)) ->
    read(stream(me, kind));
    if
    :: SUMS && kind == kRelayed ->
      /* A token has one sum, of all ranks that have a row of it. */
      assert(note[slot(stream(me, kind), in[stream(me, kind)])] / 4 + 1 > last_token[me]);
      last_token[me] = note[slot(stream(me, kind), in[stream(me, kind)])] / 4 + 1;
      assert(note[slot(stream(me, kind), in[stream(me, kind)])] % 4 ==
             (has_row(twin(me), me, last_token[me] - 1) -> 1 : 0) + (has_row(cross(me), me, last_token[me] - 1) -> 2 : 0))
    :: else
    fi;
    finish_reading(stream(me, kind));
    give_back(stream(me, kind))
  }
}

/* hop_send.cuh receive_from: `if (state == State::ended) return true;` */
inline end_receiving(kind, role) {
  d_step {
    works(role) && has_ended(stream(me, kind)) -> done[me] = done[me] | role
  }
}

#if !SUMS

/* hop_send.cuh send_to_relay: `if (!work.channels.has_room(0, work.routes.me(), relay, channel, k)) return waits_for(at, relay);`
   hop_send.cuh send_to_relay: `work.channels.end(0, work.routes.me(), relay, channel, total);` */
inline send() {
  d_step {
    works(kSender) && !has_published_end(to_relay) && has_room(to_relay) ->
    write(to_relay, targets_of(me, out[to_relay]));
    if
    :: out[to_relay] == messages_of(me) -> publish_end(to_relay); done[me] = done[me] | (me == 0 -> 0 : kSender)
    :: else
    fi
  }
}

/* A message stays in its slot until every rank that it is for has it.
   hop_block.cuh relay_messages: `if (at.pending != 0) return false;`
   hop_block.cuh relay_messages: `work.channels.give_back(0, origin, origin, channel, at.next);`
   hop_block.cuh relay_messages: `work.channels.end(1, origin, rank, channel, sent);` */
inline relay() {
  d_step {
    works(kRelay) && may_relay && started[me] == 0 && arrived(as_relay) ->
    started[me] = 1;
    read(as_relay);
    pending[me] = note[slot(as_relay, in[as_relay])] & for_peer; /* delivers it to itself */
#ifdef MISTAKE_CREDIT_BEFORE_FORWARDING
    set_credit(as_relay, slot(as_relay, in[as_relay]), tag(now, in[as_relay] + 1))
#endif
  }
}
inline pass_on() {
  d_step {
    works(kRelay) && started[me] == 1 && (pending[me] == 0 || has_room(passed_on)) ->
    if
    :: pending[me] != 0 -> read(as_relay); write(passed_on, 0); pending[me] = 0
    :: else
    fi;
    started[me] = 0;
    finish_reading(as_relay);
#ifndef MISTAKE_CREDIT_BEFORE_FORWARDING
    give_back(as_relay)
#endif
  }
}
inline end_relaying() {
  d_step {
    works(kRelay) && started[me] == 0 && has_ended(as_relay) -> publish_end(passed_on); done[me] = done[me] | kRelay
  }
}

#else

/* The peer relays for the rank across. Rows are in the order of tokens.
   hop_send.cuh send_for_sums: `work.channels.end(0, work.routes.me(), relay, channel, at.sent[0]);` */
inline send() {
  d_step {
    works(kSender) && (own_next[me] >= MESSAGES || !has_row(me, cross(me), own_next[me]) || has_room(to_relay)) ->
    if
    :: has_row(me, cross(me), own_next[me]) -> write(to_relay, own_next[me])
    :: else
    fi;
    own_next[me]++;
    if
    :: own_next[me] >= MESSAGES -> publish_end(to_relay); done[me] = done[me] | kSender
    :: else
    fi
  }
}

/* The relay's own rows are read where they lie.
   hop_send.cuh relay_sums: `if (missing != 0) return waits_for(at, static_cast<int>(__shfl_sync(~0u, rank, __ffs(static_cast<int>(missing)) - 1)));`
   hop_send.cuh relay_sums: `const std::uint32_t rows = __ballot_sync(~0u, to == next && token == first);`
   hop_send.cuh relay_sums: `work.channels.give_back(0, origin, origin, channel, read);` */
#define token_of_peer (note[slot(as_relay, in[as_relay])])
inline relay() {
  d_step {
    works(kRelay) && may_relay && pending[me] < MESSAGES &&
#ifdef MISTAKE_SUM_WITHOUT_LATE_RANKS
    1 &&
#else
    (arrived(as_relay) || has_ended(as_relay)) &&
#endif
    has_room(passed_on) ->
    /* pending: the next token. */
    if
    :: arrived(as_relay) && token_of_peer == pending[me] ->
      read(as_relay);
      write(passed_on, 4 * pending[me] + 2 + (has_row(me, twin(me), pending[me]) -> 1 : 0));
      finish_reading(as_relay);
      give_back(as_relay)
    :: else ->
      if
      :: has_row(me, twin(me), pending[me]) -> write(passed_on, 4 * pending[me] + 1)
      :: else
      fi
    fi;
    pending[me]++
  }
}
inline pass_on() { false }
inline end_relaying() {
  d_step {
    works(kRelay) && !has_published_end(passed_on) && pending[me] >= MESSAGES && has_ended(as_relay) ->
    publish_end(passed_on);
    done[me] = done[me] | (me == 0 -> 0 : kRelay)
  }
}

#endif

/* What a rank should have received in its call. */
hidden byte i, expected;
inline check_received() {
  assert(in[stream(me, kDirect)] == DIRECT);
  expected = 0;
  for (i : 0 .. MESSAGES - 1) {
    if
    :: !SUMS && i < messages_of(cross(me)) && (targets_of(cross(me), i) & for_peer) -> expected++
    :: SUMS && (has_row(twin(me), me, i) || has_row(cross(me), me, i)) -> expected++
    :: else
    fi
  }
  assert(in[stream(me, kRelayed)] == expected) /* no message is missed */
}

proctype Rank(byte me) {
  do
  :: d_step { now == 0 || done[me] == kAll ->
      if
      :: now > 0 ->
        check_received();
        assert(late_credit == 0 || me != 0) /* nothing of a call arrives in a later one */
      :: else
      fi;
      now++;
      done[me] = 0;
      /* Its counts in this call: nothing of them is read by others. */
      in[stream(me, kHop1)] = 0; in[stream(me, kDirect)] = 0; in[stream(me, kRelayed)] = 0;
      out[to_relay] = 0; out[to_peer] = 0; out[passed_on] = 0;
      pending[me] = 0; own_next[me] = 0; started[me] = 0; last_token[me] = 0;
      header[me] = now
    };
    if
    :: now > CALLS -> break
    :: else
    fi
  :: send()
  :: close((SUMS -> kRelay : kSender))
  :: credit_arrives()
  :: send_directly()
  :: relay()
  :: pass_on()
  :: end_relaying()
  :: receive(kDirect, kReceivesDirect)
  :: receive(kRelayed, kReceivesRelayed)
  :: end_receiving(kDirect, kReceivesDirect)
  :: end_receiving(kRelayed, kReceivesRelayed)
  od
}

init {
  atomic { run Rank(0); run Rank(1); run Rank(2); run Rank(3) }
}
