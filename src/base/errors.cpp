#include "base/errors.hpp"

#include <algorithm>
#include <stdexcept>
#include <string_view>

namespace ferry {

std::string describe(const WaitRecord& record) {
  const std::string role = record.role == WaitRole::none ? "" : str(", as ", to_string(record.role), ","),
                    awaited = record.peer < 0 ? std::string("its peers") : str("rank ", record.peer),
                    node = record.node < 0 ? "" : str(" on node ", record.node),
                    relay = record.via < 0 ? "" : str(" by way of rank ", record.via);
  return str("rank ", record.rank, role, " waited for ", awaited,
             record.peer < 0 ? relay + node : node + relay, " in ", to_string(record.operation), " ",
             record.call, " (expected ", record.expected, ", observed ", record.observed, ")");
}

namespace {

using Kind = ErrorRecord::Kind;

void copy_text(ErrorRecord& record, const char* text) {
  const std::size_t length = std::min(std::strlen(text), sizeof record.text - 1);
  std::memcpy(record.text, text, length);
  record.text[length] = '\0';
}

void describe_usage(ErrorRecord& record, const Error& error) {
  record.kind = Kind::usage;
  if (const auto* bad_id = dynamic_cast<const BadIdError*>(&error)) {
    record.kind = Kind::bad_id;
    record.bad_id = bad_id->bad;
  } else if (const auto* bad_source = dynamic_cast<const BadSourceError*>(&error)) {
    record.kind = Kind::bad_source;
    record.bad_source = bad_source->bad;
  }
}

}  // namespace

ErrorRecord ErrorRecord::of(const Error& error) noexcept {
  ErrorRecord record;
  copy_text(record, error.what());
  if (const auto* overflow = dynamic_cast<const OverflowError*>(&error)) {
    record.kind = Kind::overflow;
    record.overflow = overflow->overflow;
  } else if (const auto* timeout = dynamic_cast<const TimeoutError*>(&error)) {
    record.kind = Kind::timeout;
    record.wait = timeout->record;
  } else if (const auto* lost = dynamic_cast<const PeerLostError*>(&error)) {
    record.kind = Kind::peer_lost;
    record.wait = lost->record;
  } else if (const auto* system = dynamic_cast<const SystemError*>(&error)) {
    record.kind = Kind::system;
    record.error_number = system->error_number;
  } else if (error.code() == ErrorCode::unsupported) {
    record.kind = Kind::unsupported;
  } else {
    describe_usage(record, error);
  }
  return record;
}

ErrorRecord ErrorRecord::of(const std::exception_ptr& error) noexcept {
  ErrorRecord record;
  record.kind = Kind::other;
  try {
    std::rethrow_exception(error);
  } catch (const Error& ferry_error) {
    return of(ferry_error);
  } catch (const std::exception& other) {
    copy_text(record, other.what());
  } catch (...) {
    copy_text(record, "an exception that does not derive from std::exception");
  }
  return record;
}

void ErrorRecord::raise_with(const std::string& message) const {
  switch (kind) {
    case Kind::usage:
      throw UsageError(message);
    case Kind::bad_id:
      throw BadIdError(message, bad_id);
    case Kind::bad_source:
      throw BadSourceError(message, bad_source);
    case Kind::overflow:
      throw OverflowError(message, overflow);
    case Kind::timeout:
      throw TimeoutError(message, wait);
    case Kind::peer_lost:
      throw PeerLostError(message, wait);
    case Kind::system:
      throw SystemError(message, error_number);
    case Kind::unsupported:
      throw UnsupportedError(message);
    case Kind::none:
    case Kind::other:
      break;
  }
  throw std::runtime_error(message);
}

namespace {

bool is_of_name(char c) {
  return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

}  // namespace

std::string reworded(std::string text, std::span<const Phrase> phrases) {
  for (const auto& [from, to] : phrases) {
    const std::string_view phrase = from, other = to;
    for (std::size_t at = text.find(phrase); at != std::string::npos; at = text.find(phrase, at)) {
      // A quoted word is the caller's own.
      const bool other_word =
          at > 0 && is_of_name(phrase.front()) && (is_of_name(text[at - 1]) || text[at - 1] == '\'');
      if (!other_word) text.replace(at, phrase.size(), other);
      at += other_word ? 1 : other.size();
    }
  }
  return text;
}

}  // namespace ferry
