// Finds the name that a misspelt one stands for.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.hpp"

namespace ferry {

// Levenshtein distance: the fewest letters to insert, remove or replace that turn `a` into `b`.
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

// The name that the user most likely meant by `given`: at most two letters differ, or one text begins with
// the other. Empty if there is none.
inline std::string nearest(std::string_view given, const std::vector<std::string>& names) {
  std::pair<std::size_t, std::string> best{3, ""};
  for (const std::string& name : names) {
    const bool begins = given.size() > 2 && (given.starts_with(name) || name.starts_with(given));
    best = std::min(best, {std::min<std::size_t>(edit_distance(given, name), begins ? 2 : 3), name});
  }
  return best.first < std::min<std::size_t>(given.size(), 3) ? best.second : "";
}

// For messages: " (did you mean NAME?)", or nothing.
inline std::string did_you_mean(std::string_view given, const std::vector<std::string>& names) {
  const std::string name = nearest(given, names);
  return name.empty() ? name : str(" (did you mean ", name, "?)");
}

}  // namespace ferry
