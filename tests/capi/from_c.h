// The parts of the test that are compiled as C.
#ifndef FERRY_TESTS_CAPI_FROM_C_H
#define FERRY_TESTS_CAPI_FROM_C_H

#include "ferry/ferry.h"

#ifdef __cplusplus
extern "C" {
#endif

// The sizes of all structs according to the C compiler. The last entry has a NULL name.
typedef struct from_c_size {
  const char* name;
  size_t bytes;
} from_c_size;
extern const from_c_size from_c_sizes[];

// Three threads form a group with bootstrap functions in C, dispatch and combine. Returns 0, or the line that
// failed.
int from_c_run(void);

#ifdef __cplusplus
}
#endif

#endif
