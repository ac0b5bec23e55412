// Adds command-line options of the kinds that several subcommands have.
#pragma once

#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "tools/ferry/common/files.hpp"

namespace ferry::app {

// Accepts a number from `least` to `most`: CLI::Range accepts NaN too.
template <class Number>
CLI::Validator in_range(Number least, Number most) {
  const auto check = [least, most](const std::string& text) {
    Number value{};
    if (CLI::detail::lexical_cast(text, value) && value >= least && value <= most) return std::string();
    return fmt::format("Value {} not in range {} to {}", text, least, most);
  };
  return CLI::Validator(check, "");
}

// Adds an option that takes a number from `least` to `most`. The error for any other number names the option
// and the range.
template <class Number>
void add_number(CLI::App& command, const char* name, Number& value, const std::string& help, Number least,
                Number most) {
  command.add_option(name, value, help)->check(in_range(least, most))->type_name("N");
}

// A list, with commas between.
template <class Value>
CLI::Option* add_list(CLI::App& command, const char* name, std::vector<Value>& values, const char* help) {
  return command.add_option(name, values, help)->delimiter(',')->type_name("LIST");
}

// Any of `choices`.
void add_names(CLI::App& command, const char* name, std::vector<std::string>& values,
               const std::vector<std::string>& choices, const char* help);

// A number that is 1 or more.
void add_count(CLI::App& command, const char* name, int& value, const std::string& help);

// --seed: decimal digits below 2^64. Throws UsageError for anything else.
CLI::Option* add_seed(CLI::App& command, std::uint64_t& value, const std::string& help);

// A text. Throws UsageError for an empty one.
CLI::Option* add_text(CLI::App& command, const char* name, std::string& value, const std::string& help,
                      const char* type_name);

// One of `choices`.
void add_choice(CLI::App& command, const char* name, std::string& value, const char* help,
                const std::vector<std::string>& choices);

// A file to write: any path, or - for standard output.
CLI::Option* add_output(CLI::App& command, const char* name, std::string& path, const std::string& help);

// --json: where the report goes.
void add_json(CLI::App& command, std::string& path);

// A file and the option that names it.
struct NamedFile {
  const char* option;
  const std::string& path;
};

// --global-scale.
void add_global_scale(CLI::App& command, std::optional<double>& g);

// Throws UsageError, which ends with `reason`, if the command line has one of these options: its mode does
// not read them.
void refuse_given(const CLI::App& command, std::initializer_list<const char*> names, const char* reason);

// Throws UsageError if two of them lead to the same file.
void refuse_shared(std::initializer_list<NamedFile> files);

}  // namespace ferry::app
