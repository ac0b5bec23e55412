#include "tools/ferry/common/engine_choice.hpp"

#include <fmt/core.h>

#include "ferry/error.hpp"
#include "tools/ferry/common/arguments.hpp"
#include "tools/ferry/limits/gpu_probes.hpp"

namespace ferry::app {

void add_engine_options(CLI::App& command, EngineChoice& choice) {
  add_choice(command, "--engine", choice.engine,
             "collective: mpi, or nccl between GPUs;\ndefault: automatic, which is mpi",
             {"automatic", "mpi", "nccl"});
  add_choice(command, "--memory", choice.memory,
             "collective: host (default), or device: the rank's GPU,\nalso with mpi",
             {"automatic", "host", "device"});
}

void check_engine(const std::string& backend, const EngineChoice& choice) {
  if (backend == "collective") {
    if (choice.engine == "nccl" && choice.memory == "host")
      throw UsageError("--engine nccl with --memory host: NCCL connects GPUs; use device, or --engine mpi");
    return;
  }
  if (choice.engine == "automatic" && choice.memory == "automatic") return;
  throw UsageError(fmt::format(
      "{} with --backend {}: only collective has a choice",
      choice.engine != "automatic" ? "--engine " + choice.engine : "--memory " + choice.memory, backend));
}

void check_gpus(const std::string& backend, const EngineChoice& choice) {
  const std::string option = choice.gpu_option();
  if (backend != "collective" || option.empty()) return;
  try {
    if (gpu_names().empty()) throw UnsupportedError("this machine has no GPU");
  } catch (const Error& error) {
    throw UnsupportedError(
        fmt::format("{}: {}; use --engine mpi with --memory host, which need none", option, error.what()));
  }
}

}  // namespace ferry::app
