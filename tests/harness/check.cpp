#include "harness/check.hpp"

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <sstream>

#include "ferry/error.hpp"

namespace ferry::contract {
namespace {

std::string hex(std::span<const std::byte> bytes) {
  std::ostringstream out;
  for (const std::byte each : bytes)
    out << std::hex << std::setw(2) << std::setfill('0') << std::to_integer<int>(each);
  return out.str();
}

}  // namespace

std::string usage_error(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return {};
}

void require_error(const std::string& words, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    require(std::string(error.what()).find(words) != std::string::npos, "'", error.what(),
            "' does not name '", words, "'");
    return;
  }
  throw Mismatch(str("no error that names '", words, "'"));
}

void require_refused(const std::string& words, const std::function<void()>& call) {
  const std::string text = usage_error(call);
  require(text.find(words) != std::string::npos, "'", text, "' does not name '", words, "'");
}

void require_equal_bytes(std::span<const std::byte> actual, std::span<const std::byte> expected,
                         std::size_t element_bytes, const std::string& what) {
  require(actual.size() == expected.size(), what, ": ", actual.size(), " bytes, expected ", expected.size());
  if (actual.empty() || std::memcmp(actual.data(), expected.data(), actual.size()) == 0) return;
  std::size_t differ = 0, first = actual.size();
  for (std::size_t at = 0; at < actual.size(); at += element_bytes) {
    const std::size_t bytes = std::min(element_bytes, actual.size() - at);
    if (std::memcmp(&actual[at], &expected[at], bytes) == 0) continue;
    ++differ;
    first = std::min(first, at);
  }
  const std::size_t shown = std::min<std::size_t>({element_bytes, 16, actual.size() - first});
  throw Mismatch(str(what, ": ", differ, " of ", actual.size() / element_bytes,
                     " elements differ, the first is ", first / element_bytes, ": got ",
                     hex(actual.subspan(first, shown)), ", expected ", hex(expected.subspan(first, shown)),
                     " (bytes in memory order)"));
}

}  // namespace ferry::contract
