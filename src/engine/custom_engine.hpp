// The engine `custom`: the caller's functions as an engine.
#pragma once

#include <memory>

#include "engine/engine.hpp"
#include "ferry/engine.hpp"

namespace ferry {

// Throws UsageError if all_to_all_v is missing.
std::shared_ptr<Engine> make_custom_engine(EngineFunctions functions);

}  // namespace ferry
