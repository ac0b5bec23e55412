// Registers an encoder of the caller's own as a format, under a name. Dispatch then calls it to encode
// tokens.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ferry/format.hpp"
#include "ferry/types.hpp"

namespace ferry {
namespace detail {

// What errors say of an encoder's exception that has no text.
inline constexpr char kExceptionWithoutText[] =
    "an exception that is not a std::exception: throw one, and its text is shown here";

}  // namespace detail

/// The tokens of one dispatch, and where their encoded rows go. Every address and stride is a multiple of 16
/// bytes.
struct EncoderCall {
  const void* tokens = nullptr;  ///< row r is at tokens + r * stride: `hidden` values of `type`
  std::int64_t stride = 0;       ///< bytes
  DType type = DType::bf16;
  int hidden = 0;
  std::int64_t rows = 0;  ///< N; with `device_rows` the most rows
  /// Device memory only: where N is, read when the kernel runs; or null.
  const std::int32_t* device_rows = nullptr;
  std::array<std::int64_t, kMaxParts> part_bytes{};  ///< bytes of a row of each part; 0: no such part
  std::array<void*, kMaxParts> parts{};  ///< row r of part p goes to parts[p] + r * part_strides[p]
  std::array<std::int64_t, kMaxParts> part_strides{};
  Stream stream{};  ///< device memory only: where the encoder enqueues its work
};

/// How a format of the caller's encodes. A row depends on its token alone, not on the expert or the
/// destination. The functions are called by every thread that dispatches.
struct Encoder {
  /// Bytes of a row of each part, for tokens of `hidden` values: multiples of 16, without gaps. Ferry keeps
  /// the answer for each `hidden`.
  std::function<std::array<std::int64_t, kMaxParts>(int hidden)> part_bytes;
  /// Encodes rows in host memory. Empty: exchanges of host memory refuse the format.
  std::function<void(const EncoderCall&)> on_host;
  /// Enqueues kernels that encode rows in device memory, which may be captured into a graph; does not wait.
  /// Empty: exchanges of device memory refuse the format.
  std::function<void(const EncoderCall&)> on_device;
};

/// Makes `encoder` a format of this process under `name`, which parse_format() and to_string() know from then
/// on. An exchange that is constructed with it (Config::format) takes tokens of bf16, fp16 or fp32; dispatch
/// calls the encoder for them, and each part is received as an array of rows of its bytes. Every rank
/// registers the encoder; ranks compare the name, not the functions. docs/guides/own_format.md has an
/// example.
///
/// @param name  begins with a letter; letters, digits and underscores, at most 63. No other format may have
/// it
/// @throws UsageError  a name that is not allowed or taken, or an encoder without functions
Format register_format(const std::string& name, Encoder encoder);

/// Opens a shared library and registers the formats that it has: those that its function ferry_formats()
/// (c/encoder.h, format_library.hpp) registers. So a program that is not compiled with the encoder can use
/// it, one in Python for example. If one of them cannot be registered, none is. The library stays loaded. A
/// library that is loaded already is not asked again, unless that has failed.
///
/// @param path  to the file; without a slash the loader looks for it as for any library
/// @return the formats, in the order in which they were registered
/// @throws UsageError  the path is empty, the file cannot be loaded or has no ferry_formats(), or what
///                     register_format() throws
std::vector<Format> load_formats(const std::string& path);

}  // namespace ferry
