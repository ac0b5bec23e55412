// Statuses, and the message and numbers of a thread's last error.
#ifndef FERRY_C_ERROR_H
#define FERRY_C_ERROR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/// Result of a function that can fail.
typedef int ferry_status;
enum {
  FERRY_OK = 0,
  /// The caller's arguments or data are wrong; the exchange stays usable. Nothing was delivered, except with
  /// a finding of ferry_check(): a record of kind FERRY_RECORD_BAD_ID or FERRY_RECORD_BAD_SOURCE, or a scale
  /// with which a block could not be encoded. Then everything else was. The rows of a ferry_dispatch_result
  /// whose `call` is not 0 were delivered.
  FERRY_USAGE = 1,
  FERRY_OVERFLOW = 2,     ///< routes exceeded the capacity and were dropped; the exchange stays usable
  FERRY_TIMEOUT = 3,      ///< a peer missed the deadline; final for the group
  FERRY_PEER_LOST = 4,    ///< a peer died or left with an error; final for the group
  FERRY_SYSTEM = 5,       ///< the operating system refused a request, such as memory
  FERRY_UNSUPPORTED = 6,  ///< this build, backend or machine cannot do it
  FERRY_OTHER = -1        ///< an error of another library, such as the caller's code
};

/// The operation in which a rank waited.
enum {
  FERRY_OPERATION_NONE = 0,
  FERRY_CONSTRUCT = 1,  ///< creating a group or an exchange
  FERRY_DISPATCH = 2,
  FERRY_COMBINE = 3,
  FERRY_METADATA = 4,
  FERRY_ROUTE_VALUES = 5,
  FERRY_BARRIER = 6,
  FERRY_DISPATCH_COUNTS = 7,
  FERRY_ALL_GATHER_V = 8,
  FERRY_REDUCE_SCATTER_V = 9,
  FERRY_RETURN_VALUES = 10
};

/// What a rank did in two hops when its wait ended.
enum {
  FERRY_ROLE_NONE = 0,     ///< one hop, a wait for call headers, or not known
  FERRY_ROLE_SENDER = 1,   ///< sent its own messages, and waited for room
  FERRY_ROLE_RELAY = 2,    ///< passed on messages of other ranks, or added rows
  FERRY_ROLE_RECEIVER = 3  ///< waited for messages to itself
};

/// A wait that ended without success: who waited for whom, and for which flag value.
typedef struct ferry_wait_record {
  int32_t operation;  ///< FERRY_DISPATCH, ...
  uint64_t call;      ///< call number of the lane
  int32_t rank;       ///< the rank that waited
  int32_t peer;       ///< the rank that it waited for; -1: any of them
  uint64_t expected;  ///< flag value it waited for
  uint64_t observed;  ///< flag value it last read
} ferry_wait_record;

/// Expert ids outside [-1, E). Their slots were skipped; everything else was delivered.
typedef struct ferry_bad_id {
  int32_t rank, token, slot;  ///< the first bad id: lowest token, then lowest slot
  int64_t id;                 ///< the id found there
  int64_t count;              ///< bad ids of the call
} ferry_bad_id;

/// Entries of a plan that point outside the exchange. They were skipped; everything else was delivered.
typedef struct ferry_bad_source {
  int32_t rank;   ///< the rank whose plan it is
  int64_t index;  ///< the lowest index of a bad entry in its table
  int64_t count;  ///< bad entries found
} ferry_bad_source;

/// Routes and shared rows that did not fit a rank's capacity, and were dropped, or rows that did not fit its
/// ferry_receive_buffers.rows. The numbers are the same on every rank.
typedef struct ferry_overflow {
  int32_t rank;      ///< of the ranks that overflowed, the one that needs the most rows
  int64_t capacity;  ///< rows that rank `rank` has (expert_padded: rows of one expert), or `rows`
  int64_t needed;    ///< rows that it would have needed, padding included
  /// routes and shared rows dropped on all ranks together (rank_major: rows), and rows past `rows`
  int64_t dropped;
} ferry_overflow;

/// Which member of ferry_error_record is valid.
enum {
  FERRY_RECORD_NONE = 0,
  FERRY_RECORD_WAIT = 1,
  FERRY_RECORD_BAD_ID = 2,
  FERRY_RECORD_BAD_SOURCE = 3,
  FERRY_RECORD_OVERFLOW = 4,
  FERRY_RECORD_SYSTEM = 5
};

/// The numbers of an error.
typedef struct ferry_error_record {
  size_t size;
  int32_t status;  ///< the status that the failed call returned
  int32_t kind;    ///< FERRY_RECORD_...: the one member below that is valid
  ferry_wait_record wait;
  ferry_bad_id bad_id;
  ferry_bad_source bad_source;
  ferry_overflow overflow;
  int64_t error_number;  ///< FERRY_RECORD_SYSTEM: errno
  int64_t wait_via;      ///< FERRY_RECORD_WAIT: the relay that forwards what the rank waited for; -1: none
  int64_t wait_role;     ///< FERRY_RECORD_WAIT: what the rank that waited did in two hops, FERRY_ROLE_...
  int64_t wait_node;     ///< FERRY_RECORD_WAIT: node of the peer, or without one of the relay; -1: not known,
                         ///< or the group has one node
} ferry_error_record;

/// Message of the last call that failed in this thread, with the numbers that matter; "" if none has. Calls
/// that succeed do not change it. Valid until the thread's next failure.
const char* ferry_last_error(void);
/// Numbers of the last call that failed in this thread.
ferry_status ferry_last_record(ferry_error_record* record);

/// Name of a status, such as "timeout"; "other" for any other number. Static string.
const char* ferry_status_name(ferry_status status);
/// Version of the linked library, "major.minor.patch". Static string.
const char* ferry_version(void);

#ifdef __cplusplus
}
#endif

#endif
