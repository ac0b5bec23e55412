// Makes errors from errno, records them for another process, rewords them for another interface, and tells
// them to peers.
#pragma once

#include <cstring>
#include <exception>
#include <span>
#include <string>
#include <system_error>

#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

// An exception as plain bytes, so that it can be stored in shared memory and thrown in another process.
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

  std::string message() const { return {text, strnlen(text, sizeof text)}; }

  static ErrorRecord of(const Error& error) noexcept;
  static ErrorRecord of(const std::exception_ptr& error) noexcept;

  // Throws an exception of the recorded class with the message `prefix` + text.
  [[noreturn]] void raise(const std::string& prefix = {}) const { raise_with(prefix + message()); }
  [[noreturn]] void raise_with(const std::string& message) const;
};

// With the operating system's text. `text`: what was attempted. Pass errno before another call can change it.
inline SystemError system_error(const std::string& text, int error_number) {
  return SystemError(str(text, ": ", std::generic_category().message(error_number)), error_number);
}

// Returns step(). If it throws a `Refused`, which only this rank knows of, calls `refuse` with it first, so
// that the peers' call ends with the same error instead of waiting.
template <class Refused = Error, class Refuse, class Step>
decltype(auto) or_refuse(Refuse refuse, Step step) {
  try {
    return step();
  } catch (const Refused& error) {
    refuse(error);
    throw;
  }
}

// Some interfaces, such as MAX's, are carried out by calls whose arguments have other names. Errors are put
// into the words of the interface that was called.
struct Phrase {
  const char *from, *to;
};

// Replaces each phrase of `text`, in the order given, unless it begins within a longer name.
std::string reworded(std::string text, std::span<const Phrase> phrases);

// Runs `call`. What it throws about its arguments is thrown with another text.
template <class Call>
decltype(auto) in_words(std::span<const Phrase> phrases, const Call& call) {
  try {
    return call();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::usage && error.code() != ErrorCode::unsupported) throw;
    ErrorRecord::of(error).raise_with(reworded(error.what(), phrases));
  }
}

}  // namespace ferry
