// What a call has found, as an error for its caller.
#pragma once

#include "exchange/backend.hpp"

namespace ferry {

// Throws OverflowError, BadIdError, BadSourceError or UsageError, the first that applies; nothing if the call
// has found nothing.
void raise(const CallDiagnostics& found, const Config& config);

}  // namespace ferry
