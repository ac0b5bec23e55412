// The subcommands of the program: one file and one function each.
//
// Every function adds its subcommand with its options, and a callback that does the work. A callback reports
// by throwing: CheckFailed, a ferry::Error, or anything else derived from std::exception (main.cpp says which
// exit code that is).
#pragma once

#include <CLI/CLI.hpp>
#include <stdexcept>

namespace ferry::app {

// The program did what was asked, and a result was not what it must be.
class CheckFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void add_run(CLI::App& program);
void add_bench(CLI::App& program);
void add_limits(CLI::App& program);
void add_doctor(CLI::App& program);
void add_trace(CLI::App& program);

}  // namespace ferry::app
