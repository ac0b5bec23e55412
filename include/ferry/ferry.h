// The C interface of Ferry in one include: C99, usable from C++.
//
// It is a thin layer over the C++ interface. The order of rows, the arithmetic and the state after a failure
// are the same: see docs/contract.md.
//
//   c/group.h             the ranks, and how they are started and meet
//   c/config.h            the configuration of an exchange, and the memory it takes
//   c/encoder.h           formats of the caller's own
//   c/exchange.h          the exchange and the arrays of its operations
//   c/operations.h        dispatch, combine and their gradients: start here
//   c/max.h               dispatch and combine in the call shapes of MAX
//   c/nvfuser.h           the same in the call shapes of nvFuser
//   c/plan.h              the routes of a dispatch as a value that can be kept and reused
//   c/dispatch_layout.h   which tokens go to which rank, from a rank's own ids
//   c/trace.h             routing traces, recorded or synthesised
//   c/error.h             statuses, and the numbers of the last error
//
// Symbols in shapes:
//
//   N  tokens of this rank in this call              R  ranks of the group
//   T  most tokens of a rank in a call (max_tokens)  E  experts of the layer, on all ranks together
//   K  experts that a token chooses (top_k)          L  experts of one rank (local experts)
//   H  columns of a token (hidden)                   S  shared experts, which every rank holds
//   G  groups of received rows: S + L, or R with rank_major
//
// Errors. A function that can fail returns a ferry_status. After a failure, ferry_last_error() and
// ferry_last_record() return its message and numbers. A failed call leaves its outputs unchanged unless its
// documentation says otherwise. No C++ exception leaves the library.
//
// Structs. A struct that begins with `size` may grow at its end in later versions. Set `size` to its sizeof
// and all other fields to zero, which selects the defaults, then set the fields you need. A shorter struct,
// from a program built with an earlier header, has defaults for the missing fields. A longer one is refused
// (FERRY_UNSUPPORTED) if a byte unknown to this library is not zero. In a struct that the library fills,
// `size` is the room available. Structs without it that stand in others, or are passed by value of their
// fields, have `reserved` in its place: zero, until a later version gives it a meaning whose default is zero.
// What is not zero there is refused (FERRY_USAGE): the library is older than the program, or the struct was
// not zeroed. All other structs never change. Structs of arguments are only read and may be used again.
//
// Refusals. When a rank refuses its own call, the peers' call of that number ends with the same error, and
// the exchange stays usable. Exceptions: a NULL exchange, NULL arguments or a wrong `size` are not reported
// to the peers.
//
// Thread safety. A handle may be used by one thread at a time, but different lanes of an exchange may be
// used by different threads at once.
#ifndef FERRY_FERRY_H
#define FERRY_FERRY_H

#include "ferry/c/config.h"
#include "ferry/c/dispatch_layout.h"
#include "ferry/c/encoder.h"
#include "ferry/c/error.h"
#include "ferry/c/exchange.h"
#include "ferry/c/group.h"
#include "ferry/c/max.h"
#include "ferry/c/nvfuser.h"
#include "ferry/c/operations.h"
#include "ferry/c/plan.h"
#include "ferry/c/trace.h"

#endif
