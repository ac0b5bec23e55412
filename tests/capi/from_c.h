// What the test has compiled as C.
#ifndef FERRY_TESTS_CAPI_FROM_C_H
#define FERRY_TESTS_CAPI_FROM_C_H

#include "ferry/ferry.h"

#ifdef __cplusplus
extern "C" {
#endif

// sizeof of every struct as the C compiler sees it; NULL after the last.
typedef struct from_c_size {
  const char* name;
  size_t bytes;
} from_c_size;
extern const from_c_size from_c_sizes[];

// Three threads meet by functions in C, dispatch and combine. 0, or the number of the line that went wrong.
int from_c_meet(void);

#ifdef __cplusplus
}
#endif

#endif
