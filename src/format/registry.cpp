#include "format/registry.hpp"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <utility>

#include "format/parts.hpp"

namespace ferry {
namespace {

struct RegisteredFormat {
  std::string name;
  Encoder encoder;
  std::map<std::int64_t, std::array<std::int64_t, kMaxParts>> part_bytes;  // checked, by hidden
  bool known = false;  // false: while others are registered with it, or given back
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

// The registry is locked.
RegisteredFormat& entry_of(Registry& all, const Format& format) {
  const auto number = static_cast<std::size_t>(format.registered);
  if (format.registered < 0 || number >= all.formats.size() || !all.formats[number].known)
    throw UsageError(
        str("format: no encoder is registered with number ", format.registered,
            " in this process: use what register_format() has returned here, or parse_format() of its name"));
  return all.formats[number];
}

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

[[noreturn]] void throw_taken(const std::string& name) {
  throw UsageError(str("register_format: the format '", name, "' exists already: choose another name"));
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
  if (is_known) throw_taken(name);
}

}  // namespace

const Encoder& encoder_of(const Format& format) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return entry_of(all, format).encoder;
}

const std::string& name_of_registered(const Format& format) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return entry_of(all, format).name;
}

std::optional<Format> find_registered(std::string_view name) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  for (std::size_t number = 0; number < all.formats.size(); ++number) {
    if (all.formats[number].known && all.formats[number].name == name)
      return Format{.kind = FormatKind::registered, .registered = static_cast<int>(number)};
  }
  return std::nullopt;
}

Registration::~Registration() {
  Registry& all = registry();
  for (const Format& format : added_) {
    RegisteredFormat given_back;  // destroyed without the lock: its functions are the caller's
    const std::lock_guard lock(all.mutex);
    std::swap(given_back, all.formats[static_cast<std::size_t>(format.registered)]);
  }
}

void Registration::make_known() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  for (const Format& format : added_) all.formats[static_cast<std::size_t>(format.registered)].known = true;
  added_.clear();
}

Format Registration::add(const std::string& name, Encoder encoder) {
  check_name(name);
  if (!encoder.part_bytes || (!encoder.on_host && !encoder.on_device)) {
    throw UsageError(
        str("register_format: the encoder of '", name, "' must have part_bytes, and on_host or on_device"));
  }
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const bool taken = std::any_of(all.formats.begin(), all.formats.end(),
                                 [&](const RegisteredFormat& each) { return each.name == name; });
  if (taken) throw_taken(name);
  added_.push_back({.kind = FormatKind::registered, .registered = static_cast<int>(all.formats.size())});
  all.formats.push_back({.name = name, .encoder = std::move(encoder), .part_bytes = {}});
  return added_.back();
}

Format register_format(const std::string& name, Encoder encoder) {
  Registration registration;
  const Format format = registration.add(name, std::move(encoder));
  registration.make_known();
  return format;
}

Format as_raw(const Format& format, std::int64_t hidden) {
  if (format.kind != FormatKind::registered) return format;
  Registry& all = registry();
  std::unique_lock lock(all.mutex);
  RegisteredFormat& entry = entry_of(all, format);
  Format raw{.kind = FormatKind::raw};
  if (const auto known = entry.part_bytes.find(hidden); known != entry.part_bytes.end()) {
    raw.part_bytes = known->second;
    return raw;
  }
  lock.unlock();  // the caller's function may ask for formats
  const std::string asked = str("format ", entry.name, ": part_bytes of its encoder, for hidden = ", hidden);
  raw.part_bytes = call_encoder(asked + ", has failed",
                                [&] { return entry.encoder.part_bytes(static_cast<int>(hidden)); });
  try {
    check_format(raw, hidden, DType::bf16);
  } catch (const UsageError& error) {
    throw UsageError(str(asked, ": ", error.what()));
  }
  lock.lock();
  entry.part_bytes[hidden] = raw.part_bytes;
  return raw;
}

}  // namespace ferry
