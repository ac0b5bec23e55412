// The program `ferry`: parses the command line and maps errors to exit codes.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ferry/error.hpp"
#include "ferry/version.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/files.hpp"

namespace ferry::app {
namespace {

enum Exit : int { kOk = 0, kCheckFailed = 1, kUsage = 2, kOther = 3 };

constexpr const char* kFooter = R"(Examples:
  ferry run                                    run a routing trace over 8 ranks and check every number
  ferry run --ranks 4 --processes --html run.html
  ferry bench                                  time dispatch and combine
  ferry launch -n 4 program                    start a program once for each rank
  ferry limits                                 measure what this machine can move
  ferry model                                  state times for other ranks, nodes and routing
  ferry doctor                                 list what is missing on this machine
  ferry trace list                             list the traces that can be run

Exit codes: 0 success, 1 a check failed, 2 bad command line or input file, 3 any other error (a system call
failed, a rank was lost, not supported here). `ferry launch` passes on the status of a rank that failed. An
error is one line on stderr.
)";

// Messages may span several lines, which are then parted by semicolons.
std::string one_line(const std::string& text) {
  std::string line;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    if (!line.empty() && end > at) line += line.back() == ':' ? " " : "; ";
    line.append(text, at, end - at);
    at = std::min(text.find_first_not_of("\n ", end), text.size());
  }
  return line;
}

std::string footer() {
  const std::string folder = documents_folder().string();
  return folder.empty() ? kFooter
                        : fmt::format("{}\nDocuments, such as docs/programs.md: {}\n", kFooter, folder);
}

int fail(int code, const std::string& message) {
  fmt::print(stderr, "ferry: {}\n", one_line(message));
  return code;
}

void build(CLI::App& program) {
  program.name("ferry");
  program.footer(footer());
  program.set_version_flag("--version", "ferry " + std::string(version()));
  program.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  program.get_formatter()->column_width(32);
  add_run(program);
  add_bench(program);
  add_launch(program);
  add_limits(program);
  add_model(program);
  add_doctor(program);
  add_trace(program);
}

// Letters to insert, remove or replace to make one text of the other.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

// The options of `command` that are meant by misspelt ones among the arguments it did not expect, each after
// a comma.
std::string near_options(const CLI::App& command) {
  std::string found;
  for (const std::string& argument : command.remaining(true)) {
    if (!argument.starts_with("--")) continue;
    const std::string_view given = std::string_view(argument).substr(2, argument.find('=') - 2);
    std::pair<std::size_t, std::string> nearest{3, ""};
    for (const CLI::Option* option : command.get_options()) {
      for (const std::string& name : option->get_lnames())
        nearest = std::min(nearest, {edit_distance(given, name), name});
    }
    if (nearest.first < 3 && nearest.first < given.size()) found += ", --" + nearest.second;
  }
  return found;
}

// Advice after a usage error: names the subcommands if none was given, and options like a misspelt one.
std::string hint(const CLI::App& program) {
  if (!program.get_subcommands().empty()) {
    const CLI::App* command = &program;
    while (!command->get_subcommands().empty())
      command = command->get_subcommands().front();  // such as trace info
    const std::string near = near_options(*command);
    if (!near.empty()) return fmt::format(" (did you mean {}? see --help)", near.substr(2));
    return " (see --help)";
  }
  std::string names;
  for (const CLI::App* command : program.get_subcommands({}))
    names += (names.empty() ? "" : ", ") + command->get_name();
  return fmt::format(" (the subcommands are {}; see --help)", names);
}

int run(int argc, char** argv) {
  CLI::App program{"Ferry: expert-parallel dispatch and combine for Mixture-of-Experts models."};
  build(program);
  try {
    program.parse(argc, argv);
    if (program.get_subcommands().empty()) return fail(kUsage, "a subcommand is required" + hint(program));
    return kOk;
  } catch (const CLI::Success& request) {  // --help, --version
    program.exit(request);
    return kOk;
  } catch (const CLI::ParseError& error) {
    return fail(kUsage, error.what() + hint(program));
  } catch (const CheckFailed& error) {
    return fail(kCheckFailed, error.what());
  } catch (const ProgramFailed& error) {
    return fail(error.status, error.what());
  } catch (const UsageError& error) {
    return fail(kUsage, error.what());
  } catch (const std::bad_alloc&) {
    return fail(kOther, "not enough memory");
  } catch (const std::exception& error) {
    return fail(kOther, error.what());
  }
}

}  // namespace
}  // namespace ferry::app

// NOLINTNEXTLINE(bugprone-exception-escape): an error that cannot be printed ends the program
int main(int argc, char** argv) {
  const int status = ferry::app::run(argc, argv);
  // Output that could not be written, for example to a full disk, is a failure.
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  return ferry::app::fail(ferry::app::kOther, "standard output could not be written");
}
