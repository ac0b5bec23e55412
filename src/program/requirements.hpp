// What the steps of a program require of the exchanges that run them.
#pragma once

#include <string>

#include "ferry/program.hpp"

namespace ferry {

// The entry for a step that names this exchange, or end(): the entry of that name, or a single one without a
// name, which serves every step. For ProgramConfigs and ProgramExchanges.
template <class Map>
typename Map::const_iterator find_exchange(const Map& exchanges, const std::string& name) {
  const auto found = exchanges.find(name);
  if (found != exchanges.end()) return found;
  return exchanges.size() == 1 && exchanges.begin()->first.empty() ? exchanges.begin() : exchanges.end();
}

// For messages: why find_exchange() has found nothing.
std::string no_such_exchange(const std::string& name);

}  // namespace ferry
