// An error as plain bytes: how errors cross from one process to another.
#pragma once

#include <exception>

#include "ferry/error.hpp"

namespace ferry {

struct ErrorRecord {
  // Which class of the hierarchy; `other` is a std::exception that is none of ours.
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
  char text[512] = {};  // cut when longer

  static ErrorRecord of(const Error& error) noexcept;
  static ErrorRecord of(const std::exception_ptr& error) noexcept;

  // Throws an error of the recorded class: `prefix`, then the recorded text.
  [[noreturn]] void raise(const std::string& prefix = {}) const;
};

}  // namespace ferry
