// ferry doctor: what is here, what is not, why that matters, and what to do.
#include <fmt/core.h>
#include <sys/statvfs.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "backends/cpu/kernels.hpp"
#include "base/environment.hpp"
#include "ferry/config.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "ferry/group.hpp"
#include "ferry/version.hpp"
#include "group/launcher.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/common/recorded_traces.hpp"
#include "tools/ferry/limits/gpu_probes.hpp"
#include "tools/ferry/run/multiply.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

enum class State { here, missing, broken };

// `advice` says why it matters and what to do, for what is not here.
struct Finding {
  State state;
  std::string what;
  std::string found;
  std::string advice{};
};

std::string joined(const std::vector<std::string>& words, const char* between = " ") {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

std::string bytes(std::int64_t amount) {
  return report::in_bytes(static_cast<double>(amount));
}

Finding look_at_processor() {
  return {State::here, "processor",
          fmt::format("{}, {}; {}; kernels: {}", cpu_name(), report::counted(cores(), "core"),
                      joined(cpu_features()), cpu::kernels().name)};
}

Finding look_at_memory() {
  return {State::here, "memory",
          fmt::format("{}, {} free", bytes(memory_bytes()), bytes(available_memory_bytes()))};
}

Finding look_at_shared_memory() {
  const std::string directory = Environment::read().shm_dir;
  struct statvfs status{};
  if (statvfs(directory.c_str(), &status) != 0) {
    return {State::missing, "shared memory", directory + " is not there",
            "ranks as processes share memory in it. Mount a tmpfs, or name another directory in "
            "FERRY_SHM_DIR; ranks as "
            "threads need none."};
  }
  const auto free = static_cast<std::int64_t>(status.f_bavail * status.f_frsize);
  constexpr std::int64_t kLittle = 256LL << 20;
  if (free < kLittle) {
    return {State::missing, "shared memory", fmt::format("{}, only {} free", directory, bytes(free)),
            "ranks as processes share memory in it and larger runs will not fit. Make it larger (containers: "
            "--shm-size), "
            "or name another directory in FERRY_SHM_DIR."};
  }
  return {State::here, "shared memory", fmt::format("{}, {} free", directory, bytes(free))};
}

Finding look_at_huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string modes;
  std::getline(file, modes);
  if (modes.find("[never]") == std::string::npos && !modes.empty()) return {State::here, "huge pages", modes};
  return {State::missing, "huge pages", modes.empty() ? "unknown to this kernel" : modes,
          "large buffers cost more page faults and address look-ups. As root: echo madvise > "
          "/sys/kernel/mm/transparent_hugepage/enabled"};
}

Finding look_at_openblas() {
  if (!multiply_about().empty()) return {State::here, "OpenBLAS", multiply_about()};
  return {State::missing, "OpenBLAS", "not in this build",
          "the experts of ferry run are plain loops and slow. Install it (Debian: libopenblas-dev) and build "
          "again."};
}

Finding look_at_mpi() {
  for (const std::filesystem::path& place : mpi_module_places()) {
    if (std::filesystem::exists(place)) return {State::here, "MPI module", place.string()};
  }
  const char* found = "no MPI was found when this program was built";
  const char* remedy =
      "Build again with -D FERRY_MPI=ON, which needs an MPI (Debian: libopenmpi-dev openmpi-bin)";
  const std::string_view build = FERRY_MPI_WAS;
  if (build == "left out") found = "left out of this build (FERRY_MPI=OFF)";
  if (build == "built") {
    found = "built, but not where it is looked for";
    remedy = "Install what was built (cmake --install)";
  }
  return {State::missing, "MPI module", found,
          fmt::format("only for ranks that mpirun starts. {}, or name libferry_mpi.so in FERRY_MPI_MODULE.",
                      remedy)};
}

Finding look_at_gpus() {
  try {
    return {State::here, "GPUs", joined(gpu_names(), ", ")};
  } catch (const Error& error) {
    return {
        State::missing, "GPUs", error.what(),
        "only for --backend cuda. It needs a build with FERRY_CUDA=ON, NVIDIA's driver, and a GPU that this "
        "process sees."};
  }
}

Finding look_at_traces() {
  const std::string folder = Environment::read().traces;
  const std::vector<RecordedTrace> traces = recorded_traces();
  if (!traces.empty())
    return {State::here, "traces", fmt::format("{} recorded in {}", traces.size(), folder)};
  return {State::missing, "traces", why_no_traces(),
          fmt::format("runs play a synthesised one. {}", kWhereTracesAre)};
}

// One token from each of two ranks to both and back.
void exchange_one_token(const Rank& rank) {
  constexpr int kHidden = 64;
  Exchange exchange(rank, {.experts = 2, .top_k = 2, .hidden = kHidden, .max_tokens = 1});
  const std::vector<std::uint16_t> token(kHidden, 0x3F80);  // 1.0 in bf16
  const std::vector<std::int32_t> ids{0, 1};
  std::vector<std::uint16_t> result(kHidden);
  const DispatchResult rows = exchange.dispatch(Tokens::rows(token.data(), 1), ids.data());
  exchange.combine({.data = rows.data}, rows.plan, {.data = result.data()});
  if (result != std::vector<std::uint16_t>(kHidden, 0x4000))
    throw CheckFailed("1 + 1 did not come back as 2");
}

Finding look_at_backend(const char* kind, Group group) {
  const std::string what = fmt::format("cpu backend, {}", kind);
  try {
    group.run(exchange_one_token);
    return {State::here, what, "two ranks exchanged a token"};
  } catch (const std::exception& error) {
    return {State::broken, what, error.what(), "this is what ferry run needs; the message says what failed."};
  }
}

void print(const Finding& finding) {
  const char* mark = finding.state == State::here ? "ok" : (finding.state == State::missing ? "--" : "!!");
  fmt::print("{}  {:<24}{}\n", mark, finding.what, finding.found);
  if (!finding.advice.empty()) fmt::print("    {:<24}{}\n", "", finding.advice);
}

void run_doctor() {
  fmt::print("ferry {}\n", version());
  // The group of processes forks, so it comes before the group of threads.
  const Finding processes = look_at_backend("processes", Group::processes(2));
  const Finding threads = look_at_backend("threads", Group::threads(2));
  for (const Finding& finding :
       {look_at_processor(), look_at_memory(), look_at_shared_memory(), look_at_huge_pages(),
        look_at_openblas(), look_at_mpi(), look_at_gpus(), look_at_traces(), threads, processes}) {
    print(finding);
  }
  if (threads.state == State::broken)
    throw SystemError("the cpu backend cannot run here: " + threads.found, 0);
}

}  // namespace

void add_doctor(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("doctor", "Say what is here, what is missing, why it matters, what to do");
  command->footer(
      "ok is here, -- is missing and can be done without, !! is broken. Exit code 0 if the cpu backend can "
      "run.\n\n"
      "Example:\n  ferry doctor\n");
  command->callback(run_doctor);
}

}  // namespace ferry::app
