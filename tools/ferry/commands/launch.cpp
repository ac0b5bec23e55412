// ferry launch: starts a program once for each rank on this host.
#include <fmt/core.h>

#include <memory>
#include <string>
#include <vector>

#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/launch/job.hpp"

namespace ferry::app {

namespace {

constexpr const char* kFooter = R"(Examples:
  ferry launch -n 4 ./program --its-option
  ferry launch -n 4 -- ./program --its-option  the same
  ferry launch -n 4 script.py                  a file that ends in .py is run by python3

The program makes its group with Group::launched(), in Python Group.launched(), in C ferry_group_launched().
When a rank fails, the others have 10 s to end; then they are killed, with all that the ranks have started.
Ctrl-C and other signals are passed on; after one that asks the ranks to end they have 2 s. The exit status is
that of the first rank that failed, or 128 + n if signal n killed it. Ranks on several hosts are started by
mpirun, torchrun or Slurm.
)";

struct LaunchOptions {
  int ranks = 0;  // 0: not given
};

bool is_script(const std::string& name) {
  return name.size() > 3 && name.compare(name.size() - 3, 3, ".py") == 0;
}

void launch(const LaunchOptions& options, std::vector<std::string> command) {
  if (!command.empty() && command.front() == "--") command.erase(command.begin());
  if (options.ranks == 0) {
    throw CLI::RequiredError("-n RANKS is required before PROGRAM: ferry launch -n 4 ./program",
                             CLI::ExitCodes::RequiredError);
  }
  if (command.empty()) throw CLI::RequiredError("PROGRAM");
  if (is_script(command.front())) command.insert(command.begin(), "python3");
  const std::vector<RankFailure> failures = run_job(options.ranks, command);
  if (failures.empty()) return;
  for (std::size_t i = 1; i < failures.size(); ++i) fmt::print(stderr, "ferry: {}\n", failures[i].text);
  throw ProgramFailed(failures.front().text, failures.front().status);
}

}  // namespace

void add_launch(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("launch", "Start PROGRAM [ARGUMENTS] once for each rank on this host");
  command->footer(kFooter);
  const auto options = std::make_shared<LaunchOptions>();
  command->add_option("-n,--ranks", options->ranks, "number of ranks, 1 to 1024; required")
      ->check(CLI::Range(1, 1024));
  command->prefix_command();  // everything after the options is passed to the program
  // What follows `--` goes to the parent in some versions of CLI11.
  command->preparse_callback([&program](std::size_t) { program.prefix_command(); });
  command->callback([command, &program, options] {
    launch(*options, command->remaining_size() > 0 ? command->remaining() : program.remaining());
  });
}

}  // namespace ferry::app
