// How many lanes an exchange can have: Config::lanes, and the lanes that the steps of a program name.
#pragma once

namespace ferry {

inline constexpr int kMaxLanes = 64;

}  // namespace ferry
