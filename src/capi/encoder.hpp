// Encoders of C.
#pragma once

#include "ferry/ferry.h"
#include "format/registry.hpp"

namespace ferry::capi {

// Adds the encoder to `registration` and sets `format`. Throws UsageError.
void add_format(Registration& registration, const char* name, const ferry_encoder* encoder,
                ferry_format* format);

}  // namespace ferry::capi
