// The formats that callers have registered in this process.
#pragma once

#include <optional>
#include <string_view>

#include "ferry/encoder.hpp"

namespace ferry {

// The encoder and the name of a format of kind `registered`. Throws UsageError for a number that no
// registration has returned. Both stay valid until the process ends.
const Encoder& encoder_of(const Format& format);
const std::string& name_of_registered(const Format& format);

// The registered format of this name, if there is one.
std::optional<Format> find_registered(std::string_view name);

// The format in which the backends see rows of `format`: raw parts of a registered one, any other unchanged.
// Throws UsageError if its encoder gives sizes that a raw format cannot have.
Format as_raw(const Format& format, std::int64_t hidden);

}  // namespace ferry
