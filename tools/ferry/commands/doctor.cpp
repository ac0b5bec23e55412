// ferry doctor: lists what Ferry found on this machine, what is missing, and how to get it.
#include <fmt/core.h>
#include <sys/statvfs.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/cpu/kernels/kernels.hpp"
#include "base/environment.hpp"
#include "engine/nccl_library.hpp"
#include "ferry/config.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"
#include "ferry/group.hpp"
#include "ferry/version.hpp"
#include "group/mpi_library.hpp"
#include "tools/ferry/commands/commands.hpp"
#include "tools/ferry/common/files.hpp"
#include "tools/ferry/common/machine.hpp"
#include "tools/ferry/common/traces.hpp"
#include "tools/ferry/limits/gpu_limits.hpp"
#include "tools/ferry/run/swiglu.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

enum class State { present, missing, broken };

// The state of one thing that Ferry can use.
struct Diagnosis {
  State state;
  std::string subject;
  std::string found;
  std::string advice{};  // unless present: why it matters and what to do
};

std::string joined(const std::vector<std::string>& words, const char* between = " ") {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

std::string bytes(std::int64_t amount) {
  return report::in_bytes(static_cast<double>(amount));
}

Diagnosis check_processor() {
  return {State::present, "processor",
          fmt::format("{}, {}; {}; kernels: {}", cpu_name(), report::counted(cores(), "core"),
                      joined(cpu_features()), cpu::kernels().name)};
}

Diagnosis check_memory() {
  return {State::present, "memory",
          fmt::format("{}, {} free", bytes(memory_bytes()), bytes(available_memory_bytes()))};
}

Diagnosis check_shared_memory() {
  const std::string directory = Environment::read().shm_dir;
  if (directory.empty())
    return {State::present, "shared memory", "files in memory, which no rank can shrink"};
  struct statvfs status{};
  if (statvfs(directory.c_str(), &status) != 0) {
    return {State::missing, "shared memory", directory + " does not exist",
            "Ranks that are processes share memory there; ranks that are threads do not need it. Mount a "
            "tmpfs, or "
            "unset FERRY_SHM_DIR."};
  }
  const auto free = static_cast<std::int64_t>(status.f_bavail * status.f_frsize);
  constexpr std::int64_t kLeastBytes = 256LL << 20;
  if (free < kLeastBytes) {
    return {State::missing, "shared memory", fmt::format("{}, only {} free", directory, bytes(free)),
            "Ranks that are processes share memory there, and larger runs will not fit. Make it larger "
            "(containers: --shm-size), or unset FERRY_SHM_DIR."};
  }
  return {State::present, "shared memory", fmt::format("{}, {} free", directory, bytes(free))};
}

Diagnosis check_huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string modes;
  std::getline(file, modes);
  if (modes.find("[never]") == std::string::npos && !modes.empty())
    return {State::present, "huge pages", modes};
  const std::string cost = "Without them large buffers cost more page faults and TLB misses.";
  if (modes.empty()) return {State::missing, "huge pages", "not supported by this kernel", cost};
  return {State::missing, "huge pages", modes,
          cost + " As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"};
}

Diagnosis check_openblas() {
  if (!blas_version().empty()) return {State::present, "OpenBLAS", blas_version()};
  return {
      State::missing, "OpenBLAS", "not in this build",
      "The experts of ferry run use plain loops, which are slow. Install it (Debian: libopenblas-dev) and "
      "build again."};
}

Diagnosis check_mpi() {
  for (const std::filesystem::path& path : mpi_module_paths()) {
    const bool by_loader = !path.has_parent_path();
    if (!by_loader && !std::filesystem::exists(path)) continue;
    const MpiModuleFault fault = mpi_module_fault(path);
    if (fault.text.empty()) return {State::present, "MPI module", path.string()};
    if (fault.lacks_library)
      return {State::missing, "MPI module", fault.text,
              "Needed only for ranks that mpirun starts and for the engine mpi. Install MPI (Debian: "
              "openmpi-bin)."};
    if (by_loader) continue;  // most likely it is in no folder of LD_LIBRARY_PATH
    return {State::broken, "MPI module", fault.text,
            "Ranks that mpirun starts need it, and so does the engine mpi. Build Ferry again where MPI is."};
  }
  const char* found = "no MPI was found when this program was built";
  const char* remedy =
      "Build again with -D FERRY_MPI=ON, which needs MPI (Debian: libopenmpi-dev openmpi-bin)";
  const std::string_view build = FERRY_MPI_WAS;
  if (build == "left out") found = "left out of this build (FERRY_MPI=OFF)";
  if (build == "built") {
    found = "built, but not installed";
    remedy = "Install the build (cmake --install)";
  }
  return {State::missing, "MPI module", found,
          fmt::format("Needed only for ranks that mpirun starts and for the engine mpi. {}, or set "
                      "FERRY_MPI_MODULE to the path of "
                      "libferry_mpi.so.",
                      remedy)};
}

Diagnosis check_nccl(bool gpus) {
  const char* const use = "Needed only for the engine nccl, which connects GPUs.";
  try {
    const Nccl& nccl = load_nccl();
    const std::string found = fmt::format("{}, {}", nccl.version_text(), nccl.path);
    if (!gpus) return {State::missing, "NCCL", found + ": cannot be used, because there are no GPUs", use};
    return {State::present, "NCCL", found};
  } catch (const Error& error) {
    return {State::missing, "NCCL", error.what(), use};
  }
}

Diagnosis check_nvshmem() {
  try {
    return {State::present, "NVSHMEM", found_nvshmem()};
  } catch (const Error& error) {
    return {State::missing, "NVSHMEM", error.what(),
            "Needed only for --backend nvshmem, whose kernels send between hosts."};
  }
}

Diagnosis check_engines(const Diagnosis& mpi, const Diagnosis& nccl) {
  std::string engines = "custom";
  if (mpi.state == State::present) engines += ", mpi";
  if (nccl.state == State::present) engines += ", nccl";
  return {State::present, "engines", engines};
}

Diagnosis check_gpus() {
  try {
    return {State::present, "GPUs", joined(gpu_names(), ", ")};
  } catch (const Error& error) {
    return {State::missing, "GPUs", error.what(),
            "Needed only for --backend cuda, with NVIDIA's driver and a GPU visible to this process."};
  }
}

Diagnosis check_traces() {
  const std::string folder = Environment::read().traces;
  const std::vector<RecordedTrace> traces = recorded_traces();
  if (!traces.empty())
    return {State::present, "traces",
            fmt::format("{} in {}",
                        report::counted(static_cast<std::int64_t>(traces.size()), "recorded trace"), folder)};
  return {State::missing, "traces", why_no_traces(),
          fmt::format("Runs use a synthesised trace. {}", how_to_get_traces())};
}

// Each of two ranks sends one token to both ranks and gets the sum back.
void exchange_one_token(const Rank& rank) {
  constexpr int kHidden = 64;
  Exchange exchange(rank, {.experts = 2, .top_k = 2, .hidden = kHidden, .max_tokens = 1});
  const std::vector<std::uint16_t> token(kHidden, 0x3F80);  // 1.0 in bf16
  const std::vector<std::int32_t> ids{0, 1};
  std::vector<std::uint16_t> result(kHidden);
  const DispatchResult rows = exchange.dispatch(Tokens::rows(token.data(), 1), ids.data());
  exchange.combine({.data = rows.data}, rows.plan, {.data = result.data()});
  if (result != std::vector<std::uint16_t>(kHidden, 0x4000))
    throw CheckFailed("the exchange returned something else than 1 + 1 = 2");
}

Diagnosis check_backend(const char* kind, Group group) {
  const std::string subject = fmt::format("cpu backend, {}", kind);
  try {
    group.run(exchange_one_token);
    return {State::present, subject, "two ranks exchanged tokens"};
  } catch (const std::exception& error) {
    return {State::broken, subject, error.what(), "ferry run needs it. The message says what failed."};
  }
}

void print(const Diagnosis& diagnosis) {
  using report::Tone;
  const auto [mark, tone] = diagnosis.state == State::present   ? std::pair("ok", Tone::good)
                            : diagnosis.state == State::missing ? std::pair("--", Tone::doubtful)
                                                                : std::pair("!!", Tone::bad);
  fmt::print("{}  {:<24}{}\n", report::toned(mark, tone, colours(stdout)), diagnosis.subject,
             diagnosis.found);
  if (!diagnosis.advice.empty()) fmt::print("    {:<24}{}\n", "", diagnosis.advice);
}

// Names the kinds of ranks that can run here, and those that cannot.
void print_verdict(std::initializer_list<std::pair<const char*, Diagnosis>> kinds) {
  std::vector<std::string> can, cannot;
  for (const auto& [kind, diagnosis] : kinds)
    (diagnosis.state == State::present ? can : cannot).emplace_back(kind);
  const std::string text = (can.empty() ? "cannot run here" : "can run here: " + joined(can, ", ")) +
                           (can.empty() || cannot.empty() ? "" : "; not: " + joined(cannot, ", "));
  fmt::print("ferry {} {}\n\n", version(),
             report::toned(text, can.empty() ? report::Tone::bad : report::Tone::good, colours(stdout)));
}

void print_environment(bool all) {
  const Environment environment = Environment::read();
  std::vector<std::string> set;
  for (const EnvironmentVariable& variable : environment_variables()) {
    const std::string& value = environment.*variable.value;
    if (all) fmt::print("    {:<24}{}\n", variable.name, value.empty() ? "not set" : value);
    if (all) fmt::print("    {:<24}{}\n", "", variable.meaning);
    if (!value.empty()) set.push_back(fmt::format("{}={}", variable.name, value));
  }
  if (all) return;
  fmt::print("    {:<24}{}; ferry doctor --all lists all {}\n", "variables",
             set.empty() ? "none is set" : joined(set, ", "), environment_variables().size());
}

void run_doctor(bool all) {
  // Processes first, because a process with threads cannot fork ranks.
  const Diagnosis processes = check_backend("processes", Group::processes(2));
  const Diagnosis threads = check_backend("threads", Group::threads(2));
  const Diagnosis mpi = check_mpi(), gpus = check_gpus();
  const Diagnosis nccl = check_nccl(gpus.state == State::present);
  print_verdict(
      {{"on threads", threads}, {"on processes", processes}, {"under mpirun", mpi}, {"on GPUs", gpus}});
  for (const Diagnosis& diagnosis :
       {check_processor(), check_memory(), check_shared_memory(), check_huge_pages(), check_openblas(), mpi,
        nccl, check_nvshmem(), check_engines(mpi, nccl), gpus, check_traces(), threads, processes}) {
    print(diagnosis);
  }
  if (const std::string folder = documents_folder().string(); !folder.empty())
    print({State::present, "documents", folder});
  print_environment(all);
  if (threads.state == State::broken)
    throw SystemError("the cpu backend cannot run here: " + threads.found, 0);
}

}  // namespace

void add_doctor(CLI::App& program) {
  CLI::App* command =
      program.add_subcommand("doctor", "List what Ferry found here, what is missing and how to get it");
  command->footer(
      "ok  present\n--  missing, and not required\n!!  broken\n\nExit code 0 if the cpu backend can run.\n\n"
      "Example:\n  ferry doctor\n");
  const auto all = std::make_shared<bool>(false);
  command->add_flag("--all", *all, "list all environment variables, with their meaning");
  command->callback([all] { run_doctor(*all); });
}

}  // namespace ferry::app
