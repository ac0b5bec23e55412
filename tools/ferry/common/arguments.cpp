#include "tools/ferry/common/arguments.hpp"

#include <fmt/format.h>

#include <charconv>
#include <filesystem>
#include <limits>

#include "ferry/error.hpp"

namespace ferry::app {

namespace {

namespace fs = std::filesystem;

// Parsed here because the parser's own unsigned numbers wrap around below zero.
std::uint64_t parse_seed(const std::string& text) {
  std::uint64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc{} && stop == end) return value;
  throw UsageError(fmt::format("--seed {}: must be a number from 0 to {}", text,
                               std::numeric_limits<std::uint64_t>::max()));
}

// The file that a path leads to, which need not exist.
fs::path resolved(const std::string& path) {
  std::error_code failed;
  fs::path target = fs::weakly_canonical(fs::absolute(path, failed), failed);
  return failed ? fs::path(path) : target;
}

bool same_file(const std::string& a, const std::string& b) {
  if (a == "-" || b == "-") return a == b;
  return resolved(a) == resolved(b);
}

}  // namespace

void add_count(CLI::App& command, const char* name, int& value, const std::string& help) {
  add_number(command, name, value, help, 1, std::numeric_limits<int>::max());
}

void add_global_scale(CLI::App& command, std::optional<double>& g) {
  command
      .add_option("--global-scale", g,
                  "nvfp4: the scale g of every dispatch, a value is\nelement * scale * g; default 1")
      // The parser would take an empty text as no number at all.
      ->check([](const std::string& text) { return std::string(text.empty() ? "needs a number" : ""); })
      ->type_name("G");
}

CLI::Option* add_seed(CLI::App& command, std::uint64_t& value, const std::string& help) {
  return command
      .add_option_function<std::string>(
          "--seed", [&value](const std::string& text) { value = parse_seed(text); }, help)
      ->type_name("N");
}

CLI::Option* add_text(CLI::App& command, const char* name, std::string& value, const std::string& help,
                      const char* type_name) {
  return command
      .add_option_function<std::string>(
          name,
          [&value, name](const std::string& text) {
            if (text.empty()) throw UsageError(fmt::format("{}: must not be empty", name));
            value = text;
          },
          help)
      ->type_name(type_name);
}

void add_names(CLI::App& command, const char* name, std::vector<std::string>& values,
               const std::vector<std::string>& choices, const char* help) {
  add_list(command, name, values, help)->check(CLI::IsMember(choices).description(""));
}

void add_choice(CLI::App& command, const char* name, std::string& value, const char* help,
                const std::vector<std::string>& choices) {
  command.add_option(name, value, help)->check(CLI::IsMember(choices).description(""))->type_name("NAME");
}

CLI::Option* add_output(CLI::App& command, const char* name, std::string& path, const std::string& help) {
  return add_text(command, name, path, help, "FILE");
}

void add_json(CLI::App& command, std::string& path) {
  add_output(command, "--json", path, "write the report as JSON; - is stdout and replaces\nthe table");
}

void refuse_given(const CLI::App& command, std::initializer_list<const char*> names, const char* reason) {
  for (const char* name : names) {
    const CLI::Option& option = *command.get_option(name);
    if (option.count() == 0) continue;
    throw UsageError(fmt::format("{} {}: {}", name, fmt::join(option.reduced_results(), ","), reason));
  }
}

void refuse_shared(std::initializer_list<NamedFile> files) {
  for (const NamedFile* one = files.begin(); one != files.end(); ++one) {
    for (const NamedFile* other = files.begin(); other != one; ++other) {
      if (one->path.empty() || other->path.empty() || !same_file(one->path, other->path)) continue;
      throw UsageError(fmt::format("{} {} and {} {} are the same file", other->option, other->path,
                                   one->option, one->path));
    }
  }
}

}  // namespace ferry::app
