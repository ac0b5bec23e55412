// Names of enumerators, and the values that they name.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/types.hpp"

namespace ferry {

// The name at the index `value`; "unknown" beyond the names.
template <class Enum, std::size_t Count>
constexpr const char* name_of(Enum value, const char* const (&names)[Count]) {
  const auto index = static_cast<std::size_t>(value);
  return index < Count ? names[index] : "unknown";
}

// The enumerators that to_string() has names for, in the order of their numbers, without
// BackendKind::reference, which is reserved.
template <class Enum>
std::vector<Enum> enumerators() {
  std::vector<Enum> all;
  constexpr bool kBackend = std::is_same_v<Enum, BackendKind>;
  for (int number = kBackend ? static_cast<int>(BackendKind::automatic) : 0;; ++number) {
    const auto value = static_cast<Enum>(number);
    if (to_string(value) == std::string_view("unknown")) return all;
    if (!kBackend || number != static_cast<int>(BackendKind::reference)) all.push_back(value);
  }
}

// The enumerator that to_string() prints as `name`. Throws UsageError, which names them all; `setting` says
// whose value it is.
template <class Enum>
Enum enumerator_named(const char* setting, const std::string& name) {
  std::string names;
  for (const Enum value : enumerators<Enum>()) {
    if (name == to_string(value)) return value;
    names += str(names.empty() ? "" : ", ", to_string(value));
  }
  throw UsageError(str(setting, ": '", name, "' is not one of ", names));
}

}  // namespace ferry
