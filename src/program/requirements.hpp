// What the steps of a program ask of the exchanges that carry them out.
#pragma once

#include <string>

#include "ferry/program.hpp"

namespace ferry {

// The entry that a step with this exchange takes, or end(): the one of that name, or a single one without a
// name, which takes every step. For ProgramConfigs and ProgramExchanges.
template <class Map>
typename Map::const_iterator find_exchange(const Map& exchanges, const std::string& name) {
  const auto found = exchanges.find(name);
  if (found != exchanges.end()) return found;
  return exchanges.size() == 1 && exchanges.begin()->first.empty() ? exchanges.begin() : exchanges.end();
}

// For messages: why find_exchange() has found none.
std::string no_such_exchange(const std::string& name);

}  // namespace ferry
