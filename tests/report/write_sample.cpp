// write_sample FOLDER [SEED [RANKS EXPERTS STEPS [EARLIER_RANKS]]]: writes run.html, run.json, run.trace.json
// and run.txt of a synthetic run, compared with an earlier one of so many ranks if EARLIER_RANKS is given.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>

#include "report/synthetic_run.hpp"
#include "tools/report/forms.hpp"

namespace {

void write(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

void write_all(const std::string& folder, const ferry::report::RunReport& run) {
  write(folder + "/run.html", ferry::report::to_html(run));
  write(folder + "/run.json", ferry::report::to_json(run).dump() + "\n");
  write(folder + "/run.trace.json", ferry::report::to_trace_events(run));
  write(folder + "/run.txt", ferry::report::to_table(run));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3 && argc != 6 && argc != 7) {
    std::fputs("usage: write_sample FOLDER [SEED [RANKS EXPERTS STEPS [EARLIER_RANKS]]]\n", stderr);
    return 2;
  }
  try {
    const std::uint64_t seed = argc > 2 ? std::stoull(argv[2]) : 1;
    ferry::report::RunShape shape;
    if (argc >= 6)
      shape = {.ranks = std::stoi(argv[3]), .experts = std::stoi(argv[4]), .steps = std::stoi(argv[5])};
    ferry::report::RunReport run = ferry::report::synthetic_run(seed, shape);
    if (argc == 7) {
      shape.ranks = std::stoi(argv[6]);
      run.compared_with =
          std::make_shared<const ferry::report::RunReport>(ferry::report::synthetic_run(seed + 2, shape));
    }
    write_all(argv[1], run);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "write_sample: %s\n", error.what());
    return 1;
  }
}
