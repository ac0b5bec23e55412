// Arguments that several subcommands take.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "ferry/format.hpp"
#include "ferry/types.hpp"
#include "tools/ferry/common/output.hpp"

namespace ferry::app {

// A number from `least` to `most`; the error of another names it and the range.
template <class Number>
void add_number(CLI::App& command, const char* name, Number& value, const std::string& about, Number least,
                Number most) {
  command.add_option(name, value, about)->check(CLI::Range(least, most).description(""))->type_name("N");
}

void add_count(CLI::App& command, const char* name, int& value, const std::string& about);  // 1 or more

// Of a synthesised trace and whatever else is drawn: decimal digits below 2^64, anything else is refused.
CLI::Option* add_seed(CLI::App& command, std::uint64_t& value, const std::string& about);

// A text that is given may not be empty.
CLI::Option* add_text(CLI::App& command, const char* name, std::string& value, const std::string& about,
                      const char* type_name);

// A file to write: any path, or - for stdout.
CLI::Option* add_output(CLI::App& command, const char* name, std::string& path, const std::string& about);

// An output and the option that names it.
struct NamedOutput {
  const char* option;
  const std::string& path;
};

// Throws UsageError where two outputs go to the same place.
void refuse_shared(std::initializer_list<NamedOutput> outputs);

// By their names; UsageError for any other.
BackendKind backend_of(const std::string& name);
Layout layout_of(const std::string& name);
Reduction reduction_of(const std::string& name);
Format format_of(const std::string& name);  // one with values to compute with: no raw parts

}  // namespace ferry::app
