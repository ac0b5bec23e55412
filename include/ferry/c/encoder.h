// Registers an encoder of the caller's own as a format, under a name. Dispatch then calls it to encode
// tokens.
#ifndef FERRY_C_ENCODER_H
#define FERRY_C_ENCODER_H

#include <stddef.h>
#include <stdint.h>

#include "ferry/c/config.h"
#include "ferry/c/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/// The tokens of one dispatch, and where their encoded rows go: see ferry::EncoderCall.
typedef struct ferry_encoder_call {
  size_t size;         ///< of the calling Ferry's struct
  const void* tokens;  ///< row r is at tokens + r * stride: `hidden` values of `type`
  int64_t stride;      ///< bytes
  int32_t type;        ///< FERRY_BF16, FERRY_FP16 or FERRY_FP32
  int32_t hidden;
  int64_t rows;                ///< N; with `device_rows` the most rows
  const int32_t* device_rows;  ///< device memory only: where N is, read when the kernel runs; or NULL
  int64_t part_bytes[FERRY_MAX_PARTS];  ///< bytes of a row of each part; 0: no such part
  void* parts[FERRY_MAX_PARTS];         ///< row r of part p goes to parts[p] + r * part_strides[p]
  int64_t part_strides[FERRY_MAX_PARTS];
  void* stream;  ///< device memory only: where the encoder enqueues its work, a cudaStream_t
} ferry_encoder_call;

/// How a format of the caller's encodes: see ferry::Encoder. Functions may be called by several threads at
/// once and must not call Ferry. Another status than FERRY_OK refuses the dispatch.
typedef struct ferry_encoder {
  size_t size;
  /// Sets the bytes of a row of each part, for tokens of `hidden` values: multiples of 16, without gaps.
  /// Ferry keeps the answer for each `hidden`.
  ferry_status (*part_bytes)(int32_t hidden, int64_t* part_bytes, void* user);
  ferry_status (*on_host)(const ferry_encoder_call* call, void* user);  ///< NULL: not in host memory
  /// Enqueues kernels, which may be captured into a graph; does not wait. NULL: not in device memory.
  ferry_status (*on_device)(const ferry_encoder_call* call, void* user);
  void* user;  ///< passed to all functions
  /// Returns the text of this thread's last failure in one of the functions above, or NULL if it has none.
  /// Ferry calls it after a failure, copies the text at once, and puts it into the error. May be NULL.
  const char* (*error)(void* user);
} ferry_encoder;

/// Makes `encoder` a format of this process under `name`: see ferry::register_format(). `format` gets the
/// format, of kind FERRY_FORMAT_REGISTERED; ferry_parse_format() finds it by its name from then on.
ferry_status ferry_register_format(const char* name, const ferry_encoder* encoder, ferry_format* format);

/// ferry_register_format() of the process that loads a library of formats.
typedef ferry_status (*ferry_register_format_function)(const char* name, const ferry_encoder* encoder,
                                                       ferry_format* format);

/// The function that a library of formats defines and exports: it registers each of them by calling
/// `register_format`, and returns the first status other than FERRY_OK. The library needs nothing of Ferry's
/// but headers.
ferry_status ferry_formats(ferry_register_format_function register_format);

/// Opens the shared library at `path` and calls its ferry_formats(): see ferry::load_formats(). Registers all
/// of its formats, or none.
ferry_status ferry_load_formats(const char* path);

#ifdef __cplusplus
}
#endif
#endif
