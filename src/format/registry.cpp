#include "format/registry.hpp"

#include <algorithm>
#include <deque>
#include <mutex>

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "format/parts.hpp"

namespace ferry {
namespace {

struct RegisteredFormat {
  std::string name;
  Encoder encoder;
};

// Entries are never removed. Never destroyed: threads may dispatch while the process ends.
struct Registry {
  std::mutex mutex;
  std::deque<RegisteredFormat> formats;
};

Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

const RegisteredFormat& entry_of(const Format& format) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto number = static_cast<std::size_t>(format.registered);
  if (format.registered < 0 || number >= all.formats.size())
    throw UsageError(str("format: no encoder is registered with number ", format.registered));
  return all.formats[number];
}

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

void check_name(const std::string& name) {
  constexpr std::size_t kLongest = 63;
  const bool spelt = !name.empty() && name.size() <= kLongest && is_letter(name[0]) &&
                     std::all_of(name.begin(), name.end(),
                                 [](char c) { return is_letter(c) || (c >= '0' && c <= '9') || c == '_'; });
  if (!spelt) {
    throw UsageError(str("register_format: the name '", name, "' must be a letter, then letters, digits and ",
                         "underscores, at most ", kLongest, " characters"));
  }
  bool is_known = true;
  try {
    parse_format(name);
  } catch (const UsageError&) {
    is_known = false;
  }
  if (is_known) throw UsageError(str("register_format: the format '", name, "' exists already"));
}

}  // namespace

const Encoder& encoder_of(const Format& format) {
  return entry_of(format).encoder;
}

const std::string& name_of_registered(const Format& format) {
  return entry_of(format).name;
}

std::optional<Format> find_registered(std::string_view name) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  for (std::size_t number = 0; number < all.formats.size(); ++number) {
    if (all.formats[number].name == name)
      return Format{.kind = FormatKind::registered, .registered = static_cast<int>(number)};
  }
  return std::nullopt;
}

Format register_format(const std::string& name, Encoder encoder) {
  check_name(name);
  if (!encoder.part_bytes || (!encoder.on_host && !encoder.on_device)) {
    throw UsageError(
        str("register_format: the encoder of '", name, "' must have part_bytes, and on_host or on_device"));
  }
  Registry& all = registry();
  {
    const std::lock_guard lock(all.mutex);
    const bool taken = std::any_of(all.formats.begin(), all.formats.end(),
                                   [&](const RegisteredFormat& each) { return each.name == name; });
    if (taken) throw UsageError(str("register_format: the format '", name, "' exists already"));
    all.formats.push_back({name, std::move(encoder)});
  }
  return *find_registered(name);
}

Format as_raw(const Format& format, std::int64_t hidden) {
  if (format.kind != FormatKind::registered) return format;
  const RegisteredFormat& entry = entry_of(format);
  Format raw{.kind = FormatKind::raw, .part_bytes = entry.encoder.part_bytes(static_cast<int>(hidden))};
  try {
    check_format(raw, hidden, DType::bf16);
  } catch (const UsageError& error) {
    throw UsageError(
        str("format ", entry.name, ": part_bytes of its encoder, for hidden = ", hidden, ": ", error.what()));
  }
  return raw;
}

}  // namespace ferry
