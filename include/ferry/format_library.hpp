// Lets a shared library register its encoders with the program that loads it: ferry::load_formats(), in C
// ferry_load_formats(), in Python ferry.load_formats(). Header only: the library does not link Ferry, and the
// program may have another version of it.
//
//   extern "C" ferry_status ferry_formats(ferry_register_format_function register_format) {
//     return ferry::register_from_library(register_format, "truncate", ferry::cuda::make_encoder(...));
//   }
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <utility>

#include "ferry/c/encoder.h"
#include "ferry/encoder.hpp"
#include "ferry/error.hpp"

namespace ferry {
namespace detail {

// The text of this thread's last exception, cut if it is longer.
inline std::array<char, 512>& error_text() noexcept {
  static thread_local std::array<char, 512> text{};
  return text;
}

// Exceptions do not leave a library that may have been built by another compiler. Their texts are kept.
template <class Call>
ferry_status status_of_call(Call call) noexcept {
  const auto keep = [](const char* text) {
    std::snprintf(error_text().data(), error_text().size(), "%s", text);
  };
  try {
    call();
  } catch (const Error& error) {
    keep(error.what());
    return static_cast<ferry_status>(error.code());
  } catch (const std::exception& error) {
    keep(error.what());
    return FERRY_OTHER;
  } catch (...) {
    keep(kExceptionWithoutText);
    return FERRY_OTHER;
  }
  return FERRY_OK;
}

// Of an earlier or a later Ferry: fields that it does not have are zero.
inline EncoderCall encoder_call_of(const ferry_encoder_call& given) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(&given);
  for (std::size_t i = sizeof given; i < given.size; ++i) {
    if (bytes[i] == 0) continue;
    throw UnsupportedError(
        "the library of formats is older than the Ferry that calls it: compile it with that one's headers");
  }
  ferry_encoder_call c{};
  std::memcpy(&c, &given, std::min(given.size, sizeof c));
  EncoderCall call;
  call.tokens = c.tokens;
  call.stride = c.stride;
  call.type = static_cast<DType>(c.type);
  call.hidden = c.hidden;
  call.rows = c.rows;
  call.device_rows = c.device_rows;
  std::copy(c.part_bytes, c.part_bytes + kMaxParts, call.part_bytes.begin());
  std::copy(c.parts, c.parts + kMaxParts, call.parts.begin());
  std::copy(c.part_strides, c.part_strides + kMaxParts, call.part_strides.begin());
  call.stream.handle = c.stream;
  return call;
}

}  // namespace detail

/// register_format() through `register_format`, the argument of ferry_formats(). The encoder is kept for as
/// long as the process runs.
inline ferry_status register_from_library(ferry_register_format_function register_format, const char* name,
                                          Encoder encoder) noexcept {
  ferry_status status = FERRY_OK;
  const ferry_status made = detail::status_of_call([&] {
    auto* const kept = new Encoder(std::move(encoder));
    ferry_encoder c{};
    c.size = sizeof c;
    c.user = kept;
    c.error = [](void*) -> const char* { return detail::error_text().data(); };
    c.part_bytes = [](std::int32_t hidden, std::int64_t* bytes, void* user) {
      return detail::status_of_call([&] {
        const auto parts = static_cast<const Encoder*>(user)->part_bytes(hidden);
        std::copy(parts.begin(), parts.end(), bytes);
      });
    };
    if (kept->on_host) {
      c.on_host = [](const ferry_encoder_call* call, void* user) {
        return detail::status_of_call(
            [&] { static_cast<const Encoder*>(user)->on_host(detail::encoder_call_of(*call)); });
      };
    }
    if (kept->on_device) {
      c.on_device = [](const ferry_encoder_call* call, void* user) {
        return detail::status_of_call(
            [&] { static_cast<const Encoder*>(user)->on_device(detail::encoder_call_of(*call)); });
      };
    }
    ferry_format format{};
    status = register_format(name, &c, &format);
  });
  return made != FERRY_OK ? made : status;
}

}  // namespace ferry
