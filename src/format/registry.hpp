// The formats that callers have registered in this process.
#pragma once

#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/text.hpp"
#include "ferry/encoder.hpp"
#include "ferry/error.hpp"

namespace ferry {

// The encoder and the name of a format of kind `registered`. Throws UsageError for a number that no
// registration has returned. Both stay valid until the process ends.
const Encoder& encoder_of(const Format& format);
const std::string& name_of_registered(const Format& format);

// Returns what `call`, which calls a function of an encoder, returns. An exception of that function becomes a
// UsageError that begins with `failed`.
template <class Call>
auto call_encoder(const std::string& failed, const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    throw UsageError(str(failed, ": ", error.what()));
  } catch (...) {
    throw UsageError(str(failed, " with ", detail::kExceptionWithoutText));
  }
}

// The registered format of this name, if there is one.
std::optional<Format> find_registered(std::string_view name);

// Registers formats that become known together, or not at all.
class Registration {
 public:
  Registration() = default;
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;
  // Gives the names back, unless the formats have become known.
  ~Registration();

  // Throws UsageError as register_format() does. Until make_known() the format exists for nobody, but its
  // name is taken.
  Format add(const std::string& name, Encoder encoder);
  void make_known();

 private:
  std::vector<Format> added_;
};

// The format in which the backends see rows of `format`: raw parts of a registered one, any other unchanged.
// Throws UsageError if its encoder throws, or gives sizes that a raw format cannot have.
Format as_raw(const Format& format, std::int64_t hidden);

}  // namespace ferry
