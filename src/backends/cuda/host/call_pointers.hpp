// The list of the caller's pointers to check, for every operation of an exchange.
#pragma once

#include <cstdint>

#include "backends/cuda/memory/pointer_check.hpp"
#include "exchange/backend.hpp"

namespace ferry::cuda {

// Nothing is read at the input pointers of a rank without tokens, so they are left out.
CallPointers pointers_of(const DispatchCall& call);
CallPointers pointers_of(const CombineCall& call);
CallPointers pointers_of(const NumberCall& call);
CallPointers pointers_of(const RouteValuesCall& call);
CallPointers pointers_of(const DispatchCountsCall& call);
CallPointers pointers_of(const GatherCall& call);

}  // namespace ferry::cuda
