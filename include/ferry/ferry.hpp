// Everything a C++ program needs.
#pragma once

#include "ferry/config.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "ferry/format.hpp"
#include "ferry/group.hpp"
#include "ferry/placement.hpp"
#include "ferry/plan.hpp"
#include "ferry/trace.hpp"
#include "ferry/types.hpp"
