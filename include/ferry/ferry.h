// The C interface of Ferry, thin over the C++ one; C99, and usable from C++. The order of rows, the
// arithmetic and what holds after a failure are the same and stand in docs/contract.md.
//
// Errors. A function that can fail returns a ferry_status; ferry_last_error() and ferry_last_record() then
// have the message and the numbers. A failed call leaves its outputs alone unless said otherwise. No C++
// exception leaves the library.
//
// Structs. One that begins with `size` may grow at its end in later versions. Set `size` to its sizeof and
// all else to zero, which means default; then what you need. A shorter one, of a program built against an
// earlier header, has the default for what is missing. A longer one is refused (FERRY_UNSUPPORTED) if a byte
// that this library does not know is not zero. Of a struct that the library fills, `size` says how much there
// is room for. Structs without `size` never change. Structs of arguments are only read: keep them and run
// them again.
//
// Refusals. When a rank refuses its own call, the peers' call of that number ends with the same error, and
// the exchange stays usable. Only a NULL exchange, NULL arguments or a wrong `size` is refused without
// telling them.
//
// Threads. One thread at a time uses a handle. Two lanes of an exchange may be used by two threads at once.
#ifndef FERRY_FERRY_H
#define FERRY_FERRY_H

#include "ferry/c/config.h"
#include "ferry/c/error.h"
#include "ferry/c/exchange.h"
#include "ferry/c/group.h"
#include "ferry/c/operations.h"
#include "ferry/c/plan.h"

#endif
