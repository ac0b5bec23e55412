/* Libraries of formats. OF_TWO: the upper and the lower byte of bf16 values; REPEATS: a name that is taken;
 * REFUSES: a status of its own; WITHOUT: no ferry_formats(). SECOND_TAKEN: the name of the second is taken;
 * IGNORES: likewise, but it returns FERRY_OK; FAILS_ONCE: a status of its own after the first, the first
 * time; KEEPS: stores register_format for later; CALLS: calls a function of the program, and its format has
 * the name that the macro gives. */
#include "ferry/c/encoder.h"

#ifndef WITHOUT
static ferry_status part_bytes(int32_t hidden, int64_t* bytes, void* user) {
  (void)user;
  bytes[0] = hidden;
  return hidden % 16 == 0 ? FERRY_OK : FERRY_USAGE;
}

/* Byte `user` - 1 of each value. */
static ferry_status on_host(const ferry_encoder_call* call, void* user) {
  const int which = *(const int*)user;
  for (int64_t row = 0; row < call->rows; ++row) {
    const unsigned char* from = (const unsigned char*)call->tokens + row * call->stride;
    unsigned char* to = (unsigned char*)call->parts[0] + row * call->part_strides[0];
    for (int c = 0; c < call->hidden; ++c) to[c] = from[2 * c + which];
  }
  return call->size == sizeof *call && call->type == FERRY_BF16 ? FERRY_OK : FERRY_USAGE;
}

#ifdef KEEPS
ferry_register_format_function kept_register_format;
#endif

#ifdef CALLS
void (*during_ferry_formats)(void);
#endif

ferry_status ferry_formats(ferry_register_format_function register_format) {
  static int lower = 0, upper = 1;
  ferry_encoder encoder = {0};
  ferry_format format;
  ferry_status status;
  encoder.size = sizeof encoder;
  encoder.part_bytes = part_bytes;
  encoder.on_host = on_host;
  encoder.user = &lower;
#if defined(REPEATS)
  return register_format("bf16", &encoder, &format);
#elif defined(REFUSES)
  return FERRY_UNSUPPORTED;
#elif defined(SECOND_TAKEN) || defined(IGNORES)
  status = register_format("library_before_taken", &encoder, &format);
  if (status != FERRY_OK) return status;
  status = register_format("library_taken", &encoder, &format);
#ifdef IGNORES
  status = FERRY_OK;
#endif
  return status;
#elif defined(FAILS_ONCE)
  static int calls = 0;
  status = register_format("library_at_second_try", &encoder, &format);
  return calls++ == 0 ? FERRY_UNSUPPORTED : status;
#elif defined(KEEPS)
  kept_register_format = register_format;
  return FERRY_OK;
#elif defined(CALLS)
  if (during_ferry_formats != 0) during_ferry_formats();
  return register_format(CALLS, &encoder, &format);
#endif
  status = register_format("library_lower", &encoder, &format);
  if (status != FERRY_OK) return status;
  encoder.user = &upper;
  return register_format("library_upper", &encoder, &format);
}
#else
int no_formats;
#endif
