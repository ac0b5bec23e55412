// An exception as plain bytes, so that it can be stored in shared memory and thrown in another process.
#pragma once

#include <exception>
#include <string>

#include "ferry/error.hpp"

namespace ferry {

struct ErrorRecord {
  // Class of the exception; `other`: not a ferry::Error.
  enum class Kind : int {
    none,
    usage,
    bad_id,
    bad_source,
    overflow,
    timeout,
    peer_lost,
    system,
    unsupported,
    other
  };

  Kind kind = Kind::none;
  int error_number = 0;
  BadId bad_id{};
  BadSource bad_source{};
  Overflow overflow{};
  WaitRecord wait{};
  char text[512] = {};  // the message, cut if it is longer

  static ErrorRecord of(const Error& error) noexcept;
  static ErrorRecord of(const std::exception_ptr& error) noexcept;

  // Throws an exception of the recorded class with the message `prefix` + text.
  [[noreturn]] void raise(const std::string& prefix = {}) const { raise_with(prefix + text); }
  [[noreturn]] void raise_with(const std::string& message) const;
};

}  // namespace ferry
