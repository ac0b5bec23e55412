// The program's files, written and read, and how far it is: a line on a terminal, lines in a log.
#pragma once

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <string_view>

#include "base/mapping.hpp"
#include "ferry/error.hpp"
#include "tools/report/json_field.hpp"

namespace ferry::app {

// Destination of a text: a file, standard output (`-`), or none (empty path).
//
// A path that cannot be written is an error at construction, before the work starts. A regular file appears
// complete or not at all: the text goes to a temporary file in the same folder, which is then renamed. Other
// files (a pipe, /dev/null) are written in place.
class Output {
 public:
  explicit Output(std::string path);  // @throws UsageError that names the path

  bool wanted() const { return !path_.empty(); }
  bool to_stdout() const { return path_ == "-"; }
  bool replaces() const { return replaces_; }  // a file existed at construction
  const std::string& path() const { return path_; }

  void write(const std::string& text) const;  // @throws SystemError, for a full disk too

 private:
  std::string path_;    // as given
  std::string target_;  // the regular file that the path leads to; empty for anything else
  bool replaces_ = false;
};

// A line for each file among `outputs` that says it was written, and whether it replaced an older file.
std::string written_files(std::initializer_list<const Output*> outputs);

// The fields with which every command's report begins.
nlohmann::ordered_json report_json(const char* schema, int schema_version);

// Writes a command's report to `json`, and its table to standard output, unless the JSON goes there.
void write_report(const Output& json, const nlohmann::ordered_json& report, const std::string& table);

// Shows on stderr how much of a long task is done and how long the rest may take: on a terminal one line that
// is rewritten, elsewhere a line after 2 s, then after twice the time each, at most a minute apart. A shorter
// task leaves no line in a log.
//
// Construct it before the ranks start: threads and forked processes share its counter, and any of them may
// print the line.
class Progress {
 public:
  // advance() must be called `parts` times for each of the `total` items. With `total` 0 only `task` is
  // shown. `work`: of all parts, in the unit of advance(); 0: all parts take as long.
  explicit Progress(std::string task, std::int64_t total = 0, std::int64_t parts = 1, double work = 0);
  ~Progress() { hide(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show() const;                    // on a terminal: prints the line now
  void hide() const;                    // on a terminal: erases the line
  void refresh() const;                 // prints the line if its time has come
  void advance(double work = 1) const;  // counts one part, then refreshes
  void mute() const;                    // prints nothing from now on: for the ranks of mpirun other than 0

 private:
  struct SharedState;
  SharedState& state() const;
  std::string line() const;

  std::string task_;
  std::int64_t total_, parts_;
  double work_;
  bool terminal_;
  Mapping memory_;  // SharedState, shared with forked ranks
};

// A whole file. Devices, pipes and sockets are refused: they may have no end, or not begin. The message of an
// error begins with `name`.
// @throws UsageError  it cannot be read, or is no regular file
std::string read_file(const std::string& path, const std::string& name);

// What `read` makes of the JSON in a file. The message of a UsageError begins with `name` and ends with
// `remedy`.
template <class Read>
auto read_json_file(const std::string& path, const std::string& name, const std::string& remedy,
                    const Read& read) {
  const std::string text = read_file(path, name);
  try {
    const nlohmann::ordered_json json = report::parse_json(text);
    return read(json);
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("{}: {}; {}", name, error.what(), remedy));
  }
}

// @throws UsageError  the report is of another schema
void require_schema(const report::JsonField& report, const std::string& schema);

// Whether text on this stream may have colours: it is a terminal, and NO_COLOR is not set.
bool colours(std::FILE* stream);

// ---- the documents that were installed with the program, for messages that refer to them

// The folder that holds README.md and docs: of the Python package, or of the prefix of a tarball. Empty if
// there is none, as in a checkout.
std::filesystem::path documents_folder();

// The path of an installed document such as "docs/traces.md"; where documents are not installed, the name
// itself.
std::string document(std::string_view name);

}  // namespace ferry::app
