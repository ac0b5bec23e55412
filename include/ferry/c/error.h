// What went wrong: a status, a text, and the numbers.
#ifndef FERRY_C_ERROR_H
#define FERRY_C_ERROR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int ferry_status;
enum {
  FERRY_OK = 0,
  FERRY_USAGE = 1,        // the caller's arguments or data are wrong; the exchange stays usable
  FERRY_OVERFLOW = 2,     // routes did not fit the capacity and were dropped; the exchange stays usable
  FERRY_TIMEOUT = 3,      // a peer did not come before the deadline; final for the group
  FERRY_PEER_LOST = 4,    // a peer died or left with an error; final for the group
  FERRY_SYSTEM = 5,       // the operating system refused something, such as memory
  FERRY_UNSUPPORTED = 6,  // this build, backend or machine cannot do it
  FERRY_OTHER = -1        // an error that is none of Ferry's
};

enum {
  FERRY_OPERATION_NONE = 0,
  FERRY_CONSTRUCT = 1,
  FERRY_DISPATCH = 2,
  FERRY_COMBINE = 3,
  FERRY_METADATA = 4,
  FERRY_ROUTE_VALUES = 5,
  FERRY_BARRIER = 6
};

typedef struct ferry_wait_record {  // who waited for whom when a wait ended without its flag
  int32_t operation;                // FERRY_DISPATCH, ...
  uint64_t call;                    // call number of the lane
  int32_t rank, peer;               // the rank that waited; the one that was missing
  uint64_t expected, seen;          // flag value waited for; last seen
} ferry_wait_record;

typedef struct ferry_bad_id {  // expert ids outside [-1, experts): they were skipped
  int32_t rank, token, slot;   // the lowest (token, slot) of the call
  int64_t id;
  int64_t count;
} ferry_bad_id;

typedef struct ferry_bad_source {  // entries of a plan that point outside the exchange: they were skipped
  int32_t rank;                    // the rank that found them
  int64_t index;                   // lowest index of the table they stand in
  int64_t count;
} ferry_bad_source;

typedef struct ferry_overflow {
  int32_t rank;      // the rank that needs the most rows
  int64_t capacity;  // rows it has (expert_padded: rows an expert)
  int64_t needed;    // rows it would have needed
  int64_t dropped;   // routes (rank_major: rows) dropped on all ranks together
} ferry_overflow;

enum {  // which member of ferry_error_record holds the numbers
  FERRY_RECORD_NONE = 0,
  FERRY_RECORD_WAIT = 1,
  FERRY_RECORD_BAD_ID = 2,
  FERRY_RECORD_BAD_SOURCE = 3,
  FERRY_RECORD_OVERFLOW = 4,
  FERRY_RECORD_SYSTEM = 5
};

typedef struct ferry_error_record {
  size_t size;
  int32_t status;  // of the call that failed
  int32_t kind;    // FERRY_RECORD_...; the other members mean nothing
  ferry_wait_record wait;
  ferry_bad_id bad_id;
  ferry_bad_source bad_source;
  ferry_overflow overflow;
  int64_t error_number;  // FERRY_RECORD_SYSTEM: errno
} ferry_error_record;

// Of the last call that failed in this thread; calls that succeed leave both alone. The text is never NULL
// ("" when nothing has failed), holds the numbers that matter, and lives until the thread's next failure.
const char* ferry_last_error(void);
ferry_status ferry_last_record(ferry_error_record* record);

const char* ferry_status_name(ferry_status status);  // "timeout", ...; "other" for anything unknown. Static.
const char* ferry_version(void);                     // of the library, "major.minor.patch". Static.

#ifdef __cplusplus
}
#endif

#endif
