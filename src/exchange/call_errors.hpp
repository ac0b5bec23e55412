// Turns the findings of calls into an error.
#pragma once

#include "exchange/backend.hpp"

namespace ferry {

// Throws OverflowError, BadIdError, BadSourceError or UsageError, the first that applies; nothing if there
// are no findings.
void raise(const CallDiagnostics& found, const Config& config);

}  // namespace ferry
