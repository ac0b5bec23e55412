// The program `ferry`: parses the command line and maps errors to exit codes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/nearest.hpp"
#include "ferry/error.hpp"
#include "ferry/version.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/files.hpp"
#include "tools/report/units.hpp"

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
  ferry help bench                             explain a command, as ferry bench --help does

Exit codes: 0 success, 1 a check failed, 2 bad command line, or a file named there that cannot be read or
written, 3 any other error (a system call failed, a rank was lost, not supported here). `ferry launch` passes
on the status of a rank that failed. An error is one line on stderr.
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
  fmt::print(stderr, "{} {}\n", report::toned("ferry:", report::Tone::bad, colours(stderr)),
             one_line(message));
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

// The command that was given, such as trace info.
const CLI::App& innermost(const CLI::App& program) {
  const CLI::App* command = &program;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  return *command;
}

// What is wrong with the command line: arguments that nothing takes, in their order, and what may have been
// meant; otherwise what the parser says.
std::string usage_error(const CLI::App& program, const CLI::Error& error) {
  const CLI::App* command = &innermost(program);
  std::vector<std::string> names, options, meant;
  for (const CLI::App* one : command->get_subcommands({})) names.push_back(one->get_name());
  for (const CLI::Option* one : command->get_options())
    for (const std::string& name : one->get_lnames()) options.push_back("--" + name);
  std::string text = error.what();
  const std::vector<std::string> unexpected = command->remaining(true);
  if (!unexpected.empty() &&
      (!names.empty() || error.get_exit_code() == static_cast<int>(CLI::ExitCodes::ExtrasError))) {
    text = fmt::format("not expected: {}", fmt::join(unexpected, " "));
    meant.push_back(nearest(unexpected.front(), names));
    for (const std::string& one : unexpected)
      if (one.starts_with("--")) meant.push_back(nearest(one.substr(0, one.find('=')), options));
    std::erase(meant, "");
  }
  if (!meant.empty()) return fmt::format("{} (did you mean {}? see --help)", text, fmt::join(meant, ", "));
  if (names.empty()) return text + " (see --help)";
  return fmt::format("{} (the subcommands are {}; see --help)", text, fmt::join(names, ", "));
}

int run(int argc, char** argv) {
  CLI::App program{"Ferry: expert-parallel dispatch and combine for Mixture-of-Experts models."};
  build(program);
  try {
    program.parse(argc, argv);
    if (program.get_subcommands().empty()) throw CLI::RequiredError("a subcommand");
    return kOk;
  } catch (const CLI::Success& request) {  // --help, --version
    // The parser answers --help even beside a command that it does not know.
    const CLI::App& command = innermost(program);
    if (!command.get_subcommands({}).empty() && command.remaining_size() > 0)
      return fail(kUsage, usage_error(program, request));
    program.exit(request);
    return kOk;
  } catch (const CLI::ParseError& error) {
    return fail(kUsage, usage_error(program, error));
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
  char help[] = "--help";
  if (argc > 1 && std::string_view(argv[1]) == "help") {  // ferry help run: ferry run --help
    std::rotate(argv + 1, argv + 2, argv + argc);
    argv[argc - 1] = help;
  }
  const int status = ferry::app::run(argc, argv);
  // Output that could not be written, for example to a full disk, is a failure.
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  return ferry::app::fail(ferry::app::kOther, "standard output could not be written");
}
