// ferry: the command line.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>

#include "ferry/error.hpp"
#include "ferry/version.hpp"
#include "tools/ferry/commands/commands.hpp"

namespace ferry::app {
namespace {

enum Exit : int { kOk = 0, kCheckFailed = 1, kUsage = 2, kOther = 3 };

constexpr const char* kFooter = R"(Examples:
  ferry run                                    play a routing trace over 8 ranks, check every number
  ferry run --ranks 4 --processes --html run.html
  ferry limits                                 what this machine can move
  ferry doctor                                 what is here, what is missing, what to do
  ferry trace list                             traces that can be played

Exit codes: 0 all went well, 1 a check failed, 2 the command line or a file given is wrong, 3 anything else
(the system refused something, a rank was lost, not supported here). Errors are one line on stderr.
)";

// Errors of the system's libraries may span lines; the program's own stay one.
std::string one_line(std::string text) {
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  return text;
}

int fail(Exit code, const std::string& message) {
  fmt::print(stderr, "ferry: {}\n", one_line(message));
  return code;
}

void build(CLI::App& program) {
  program.name("ferry");
  program.footer(kFooter);
  program.set_version_flag("--version", "ferry " + std::string(version()));
  program.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  program.get_formatter()->column_width(32);
  add_run(program);
  add_bench(program);
  add_limits(program);
  add_doctor(program);
  add_trace(program);
}

// What to look at after a mistake: the subcommands, where the command line has named none.
std::string hint(const CLI::App& program) {
  if (!program.get_subcommands().empty()) return " (see --help)";
  std::string names;
  for (const CLI::App* command : program.get_subcommands({}))
    names += (names.empty() ? "" : ", ") + command->get_name();
  return fmt::format(" (the subcommands are {}; see --help)", names);
}

int run(int argc, char** argv) {
  CLI::App program{
      "Ferry carries tokens of a Mixture-of-Experts layer to their experts and back: expert-parallel\n"
      "dispatch and combine."};
  build(program);
  try {
    program.parse(argc, argv);
    if (program.get_subcommands().empty()) return fail(kUsage, "a subcommand is required" + hint(program));
    return kOk;
  } catch (const CLI::Success& asked) {  // --help, --version
    program.exit(asked);
    return kOk;
  } catch (const CLI::ParseError& error) {
    return fail(kUsage, error.what() + hint(program));
  } catch (const CheckFailed& error) {
    return fail(kCheckFailed, error.what());
  } catch (const UsageError& error) {
    return fail(kUsage, error.what());
  } catch (const std::exception& error) {
    return fail(kOther, error.what());
  }
}

}  // namespace
}  // namespace ferry::app

// NOLINTNEXTLINE(bugprone-exception-escape): what cannot be printed either ends the program
int main(int argc, char** argv) {
  const int status = ferry::app::run(argc, argv);
  // What was printed has to have arrived: a full disk is a failure.
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  return ferry::app::fail(ferry::app::kOther, "standard output could not be written");
}
