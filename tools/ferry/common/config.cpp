#include "tools/ferry/common/config.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "format/encoding.hpp"
#include "format/parts.hpp"
#include "plan/shapes.hpp"
#include "tools/ferry/common/arguments.hpp"
#include "tools/ferry/limits/gpu_limits.hpp"
#include "tools/report/units.hpp"

namespace ferry::app {

namespace {

// Whether a token lists an expert twice, as recorded traces may. Such tokens can produce more rows.
bool repeats_experts(const Trace& trace) {
  const auto k = static_cast<std::size_t>(trace.top_k);
  std::vector<std::int32_t> token(k);
  for (std::size_t begin = 0; begin < trace.ids.size(); begin += k) {
    std::copy_n(trace.ids.begin() + static_cast<std::ptrdiff_t>(begin), k, token.begin());
    std::sort(token.begin(), token.end());
    const auto first_valid = std::upper_bound(token.begin(), token.end(), -1);  // masked slots may repeat
    if (std::adjacent_find(first_valid, token.end()) != token.end()) return true;
  }
  return false;
}

}  // namespace

void prepare_for_hops(const std::string& name) {
  if (name == "two") setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

Format format_of(const std::string& name) {
  const std::string choices =
      "must be bf16, fp16, fp32, fp8[-columns][-pow2[-packed]], mxfp8 or mxfp4[-up|-ocp][-columns|-tiles], "
      "nvfp4[-token][-columns|-tiles]";
  if (name.starts_with("raw")) {
    throw UsageError(fmt::format(
        "--format {}: {}; the experts cannot compute with raw parts, which have no values", name, choices));
  }
  try {
    return parse_format(name);
  } catch (const UsageError&) {
    throw UsageError(fmt::format("--format {}: {}", name, choices));
  }
}

bool takes_global_scale(const Format& format) {
  return encoding_of(format).takes_global_scale();
}

void check_global_scale(std::optional<double> g, const std::vector<std::string>& formats) {
  if (!g) return;
  const auto as_fp32 = static_cast<float>(*g);
  if (!(as_fp32 > 0) || !std::isfinite(as_fp32))
    throw UsageError(
        fmt::format("--global-scale {}: must be positive and finite as fp32, 1.4e-45 to 3.4e+38", *g));
  const bool taken = std::any_of(formats.begin(), formats.end(),
                                 [](const std::string& name) { return takes_global_scale(format_of(name)); });
  if (!taken) throw UsageError(fmt::format("--global-scale {}: is for --format nvfp4 without -token", *g));
}

void check_reduction(Layout layout, Reduction reduction) {
  if (layout != Layout::rank_major || reduction == Reduction::partial) return;
  throw UsageError(fmt::format(
      "--reduction {} with --layout rank_major: its rows are already sums over the experts of a rank; use "
      "--reduction partial",
      to_string(reduction)));
}

DType token_type(const Format& format) {
  return format.value_type().value_or(DType::bf16);
}

namespace {

// Throws what constructing the exchange would throw. The message begins with --hidden where another number of
// columns would be accepted.
void check_config(const Config& config, int ranks) {
  try {
    size_of(config, ranks);
  } catch (const UsageError& error) {
    constexpr std::int64_t kAcceptedHidden = 1024;  // by every format
    Config other = config;
    other.hidden = kAcceptedHidden;
    try {
      size_of(other, ranks);
    } catch (const UsageError&) {
      throw error;
    }
    throw UsageError(fmt::format("--hidden {}: {}", config.hidden, error.what()));
  }
}

}  // namespace

Config make_config(const ConfigOptions& options, const Trace& trace) {
  Config config;
  config.experts = trace.experts;
  config.top_k = trace.top_k;
  config.hidden = options.hidden;
  config.max_tokens = options.tokens;
  config.backend = options.backend;
  config.engine = options.engine;
  config.memory = options.memory;
  config.placement = Placement::blocks(trace.experts, options.ranks);
  config.layout = options.layout;
  config.alignment = options.alignment;
  config.shared_experts = options.shared_experts;
  config.input = options.input;
  config.transfer = options.transfer;
  config.repeats = repeats_experts(trace);
  config.format = options.format;
  config.combine_type = token_type(options.format);
  config.reduction = options.reduction;
  config.reduction_level = options.reduction_level;
  config.hops = options.hops;
  config.deadline = options.deadline_seconds;
  check_config(config, options.ranks);
  return config;
}

bool on_device(const Config& config) {
  return chosen_memory(config) == MemoryKind::device;
}

std::int64_t received_row_capacity(const Exchange& exchange) {
  const Config& config = exchange.config();
  const bool padded = config.layout == Layout::expert_padded;
  return exchange.capacity() * (padded ? groups_of(config, exchange.rank().index()) : 1);
}

std::int64_t received_row_bytes(const Config& config) {
  const PartList parts = parts_of(config.format, config.hidden);
  std::int64_t bytes = 0;
  for (int p = 0; p < parts.count; ++p) bytes += parts.part[p].row_bytes;
  return bytes;
}

bool combine_applies_weights(Layout layout, Reduction reduction) {
  return layout != Layout::rank_major && reduction != Reduction::unreduced;
}

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

Group mpi_group(int ranks, const std::string& backend) {
  Group group = Group::mpi();
  if (ranks == 0 || group.size() == ranks) return group;
  throw UsageError(fmt::format("--backend {}: there {} {}: start ferry with mpirun -n {}, or pass --ranks {}",
                               backend, group.size() == 1 ? "is" : "are",
                               report::counted(group.size(), "rank"), ranks, group.size()));
}

Group local_group(const LocalGroup& options) {
  const auto& [ranks, hosts, processes] = options;
  if (ranks % hosts != 0) throw UsageError(fmt::format("--hosts {}: must divide --ranks {}", hosts, ranks));
  return processes ? Group::processes(ranks, hosts) : Group::threads(ranks, hosts);
}

void refuse_local_options(const LocalGroup& options) {
  if (!options.processes && options.hosts == 1) return;
  throw UsageError(fmt::format(
      "{} with --backend collective: its ranks are the processes that mpirun has started; to simulate "
      "hosts, give them different values of FERRY_HOST_ID",
      options.processes ? "--processes" : "--hosts"));
}

}  // namespace ferry::app
