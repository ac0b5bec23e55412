// The subcommands of the program: one file and one function each.
//
// Each function adds its subcommand, its options and a callback that does the work. A callback reports
// failure by throwing CheckFailed, a ferry::Error or another std::exception; main.cpp maps these to exit
// codes.
#pragma once

#include <CLI/CLI.hpp>
#include <stdexcept>
#include <string>

namespace ferry::app {

struct BenchOptions;

// The command ran to its end, but a result was wrong.
class CheckFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A program that the command has started has failed.
class ProgramFailed : public std::runtime_error {
 public:
  ProgramFailed(const std::string& text, int exit_status) : std::runtime_error(text), status(exit_status) {}
  int status;  // to pass on
};

void add_run(CLI::App& program);
void add_bench(CLI::App& program);
void add_launch(CLI::App& program);
void add_limits(CLI::App& program);
void add_model(CLI::App& program);
void add_doctor(CLI::App& program);
void add_trace(CLI::App& program);

// The options of `ferry bench` alone, for tests.
void add_bench_options(CLI::App& command, BenchOptions& options);

}  // namespace ferry::app
