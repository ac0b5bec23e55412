// Makes an exchange's configuration and group of ranks from the program's options, and computes sizes that
// follow.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ferry/exchange.hpp"
#include "ferry/group.hpp"
#include "ferry/trace.hpp"

namespace CLI {
class App;
}

namespace ferry::app {

// Call before CUDA starts. In two hops kernels of ranks that share a GPU wait for one another, several of a
// stream at a time, so each stream needs a queue of its own.
void prepare_for_hops(const std::string& name);
// Refuses raw formats: the program's experts need values to compute with.
Format format_of(const std::string& name);

// Whether dispatches of the format take a scale g of the call: nvfp4 without a scale for each token.
bool takes_global_scale(const Format& format);
// Throws UsageError if g is given and not positive and finite, or if none of the formats takes it.
void check_global_scale(std::optional<double> g, const std::vector<std::string>& formats);

// Throws UsageError for a reduction that rank_major does not have.
void check_reduction(Layout layout, Reduction reduction);

// The type of a format's values before quantisation. Results have it too.
DType token_type(const Format& format);

// Long, because on few cores a rank may spend minutes in its checks while its peers wait.
inline constexpr double kHostDeadlineSeconds = 300.0;

struct ConfigOptions {
  BackendKind backend = BackendKind::cpu;
  EngineKind engine = EngineKind::automatic;
  MemoryKind memory = MemoryKind::automatic;
  int ranks = 0;
  int tokens = 0;  // at most, per rank and call
  int hidden = 0;
  Layout layout = Layout::expert_major;
  Format format = Format::bf16();
  Reduction reduction = Reduction::partial;
  ReductionLevel reduction_level = ReductionLevel::automatic;
  Hops hops = Hops::automatic;
  int alignment = 1;
  int shared_experts = 0;
  Input input = Input::own;
  Transfer transfer = Transfer::routed;
  double deadline_seconds = 0;
};

// The configuration for the experts of `trace`, in equal blocks over the ranks. Combine carries token_type().
// Throws what constructing the exchange would throw.
Config make_config(const ConfigOptions& options, const Trace& trace);

// The most rows that one dispatch can deliver, over all groups.
std::int64_t received_row_capacity(const Exchange& exchange);

// Whether a rank's arrays are on a GPU.
bool on_device(const Config& config);

// Bytes of one received row, scales included.
std::int64_t received_row_bytes(const Config& config);

// Whether combine multiplies the experts' rows by row weights. Otherwise the experts have applied them
// (rank_major) or the caller will (unreduced).
bool combine_applies_weights(Layout layout, Reduction reduction);

// ---- --engine and --memory of the backend `collective`

struct EngineChoice {
  std::string engine = "automatic", memory = "automatic";

  // The option that asks for GPUs; empty: none does.
  std::string gpu_option() const {
    if (engine == "nccl") return "--engine nccl";
    return memory == "device" ? "--memory device" : "";
  }
};

void add_engine_options(CLI::App& command, EngineChoice& choice);

// @throws UsageError  options that contradict one another, or another backend than `collective`
void check_engine(const std::string& backend, const EngineChoice& choice);

// @throws UnsupportedError  an option of `collective` asks for GPUs, and this build or machine has none
void check_gpus(const std::string& backend, const EngineChoice& choice);

// ---- groups of ranks

// The ranks that mpirun has started, this process among them. `ranks`: as many as the user asked for; 0: any
// number. `backend`: for the error.
// @throws UsageError        mpirun has started another number
// @throws UnsupportedError  as Group::mpi()
Group mpi_group(int ranks, const std::string& backend = "collective");

// Ranks that this command starts, on `hosts` simulated hosts.
struct LocalGroup {
  int ranks;
  int hosts = 1;
  bool processes = false;
};

// @throws UsageError  the number of hosts does not divide that of the ranks
Group local_group(const LocalGroup& options);

// @throws UsageError  options of LocalGroup with ranks that mpirun has started
void refuse_local_options(const LocalGroup& options);

}  // namespace ferry::app
