#include "tools/ferry/common/arguments.hpp"

#include <fmt/core.h>

#include <array>
#include <charconv>
#include <filesystem>
#include <limits>

#include "ferry/error.hpp"

namespace ferry::app {

namespace {

namespace fs = std::filesystem;

// The command line's own numbers wrap around below zero.
std::uint64_t parse_seed(const std::string& text) {
  std::uint64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc{} && stop == end) return value;
  throw UsageError(fmt::format("--seed {}: must be a number from 0 to {}", text,
                               std::numeric_limits<std::uint64_t>::max()));
}

// Where a path leads, for files that do not exist as well.
fs::path place_of(const std::string& path) {
  std::error_code failed;
  fs::path place = fs::weakly_canonical(fs::absolute(path, failed), failed);
  return failed ? fs::path(path) : place;
}

bool same_place(const std::string& a, const std::string& b) {
  if (a == "-" || b == "-") return a == b;
  return place_of(a) == place_of(b);
}

template <class Value, std::size_t kCount>
Value named(const std::array<Value, kCount>& values, const std::string& name) {
  for (const Value value : values) {
    if (name == to_string(value)) return value;
  }
  throw UsageError(fmt::format("'{}' is none of the names there are", name));
}

}  // namespace

void add_count(CLI::App& command, const char* name, int& value, const std::string& about) {
  add_number(command, name, value, about, 1, std::numeric_limits<int>::max());
}

CLI::Option* add_seed(CLI::App& command, std::uint64_t& value, const std::string& about) {
  return command
      .add_option_function<std::string>(
          "--seed", [&value](const std::string& text) { value = parse_seed(text); }, about)
      ->type_name("N");
}

CLI::Option* add_text(CLI::App& command, const char* name, std::string& value, const std::string& about,
                      const char* type_name) {
  return command
      .add_option_function<std::string>(
          name,
          [&value, name](const std::string& text) {
            if (text.empty()) throw UsageError(fmt::format("{}: must not be empty", name));
            value = text;
          },
          about)
      ->type_name(type_name);
}

CLI::Option* add_output(CLI::App& command, const char* name, std::string& path, const std::string& about) {
  return add_text(command, name, path, about, "FILE");
}

void refuse_shared(std::initializer_list<NamedOutput> outputs) {
  for (const NamedOutput* one = outputs.begin(); one != outputs.end(); ++one) {
    for (const NamedOutput* other = outputs.begin(); other != one; ++other) {
      if (one->path.empty() || other->path.empty() || !same_place(one->path, other->path)) continue;
      throw UsageError(fmt::format("{} {} and {} {} would write to the same place", other->option,
                                   other->path, one->option, one->path));
    }
  }
}

BackendKind backend_of(const std::string& name) {
  return named(std::array{BackendKind::reference, BackendKind::cpu, BackendKind::cuda}, name);
}

Layout layout_of(const std::string& name) {
  return named(std::array{Layout::expert_major, Layout::expert_padded, Layout::rank_major}, name);
}

Reduction reduction_of(const std::string& name) {
  return named(std::array{Reduction::partial, Reduction::exact, Reduction::unreduced}, name);
}

Format format_of(const std::string& name) {
  const std::string known = "must be bf16, fp16, fp32 or fp8[-columns][-pow2[-packed]]";
  if (name.starts_with("raw")) {
    throw UsageError(fmt::format("--format {}: {}; raw parts have no values to compute with", name, known));
  }
  try {
    return parse_format(name);
  } catch (const UsageError&) {
    throw UsageError(fmt::format("--format {}: {}", name, known));
  }
}

}  // namespace ferry::app
