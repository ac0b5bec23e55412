// The interface between Exchange, which checks arguments, and a backend, which carries out the calls.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <variant>

#include "base/host_device.hpp"
#include "ferry/dispatch_layout.hpp"
#include "ferry/error.hpp"
#include "ferry/exchange.hpp"

namespace ferry {

struct CombineCall;

// Calls that carry numbers, or rows without routing. Layers that only pass them on do so once for all.

// The arguments of a call, checked.

// Every rank gives a number, and gets what the numbers of all ranks make together. That is all such a call
// defines: `of`, the part of one rank's number in the result of rank `me`, and `join`, which is associative
// and commutative.
struct NumberCall {
  static constexpr std::size_t kMostResultBytes = 64;

  CallOptions options{};
  Count number = 0;
  void* into = nullptr;  // takes the result; null: memory of the lane
};

template <class Call>
concept JoinsNumbers = std::derived_from<Call, NumberCall> && requires(typename Call::Result* all) {
  Call::join(Call::of(0, 0, 0), all);
  { Call::most(1) } -> std::same_as<std::int32_t>;  // a rank gives a number from 0 to most(ranks)
} && sizeof(typename Call::Result) <= NumberCall::kMostResultBytes && sizeof(typename Call::Result) % 4 == 0;

struct MetadataCall : NumberCall {
  static constexpr Operation operation = Operation::metadata;
  using Result = StepMetadata;

  FERRY_HD static std::int32_t most(int ranks) { return INT32_MAX / ranks; }
  FERRY_HD static Result of(std::int32_t count, int rank, int me) {
    return {.sum = count, .prefix = rank < me ? count : 0, .maximum = count};
  }
  FERRY_HD static void join(const Result& part, Result* all) {
    all->sum += part.sum;
    all->prefix += part.prefix;
    all->maximum = part.maximum > all->maximum ? part.maximum : all->maximum;
  }
};

// route_values: from the routes [N, K] to the rows [total]; return_values: from the rows to the routes.
struct RouteValuesCall {
  Operation operation = Operation::route_values;
  CallOptions options{};
  const float* from = nullptr;
  Plan plan{};
  float* to = nullptr;
  const CombineCall* combine = nullptr;  // given: the values are its topk_weights, and this is its first part

  bool returns() const { return operation == Operation::return_values; }
  Operation needed_by() const { return combine != nullptr ? Operation::combine : operation; }
};

struct DispatchCountsCall {
  static constexpr Operation operation = Operation::dispatch_counts;
  CallOptions options{};
  Ids ids{};
  std::int32_t tokens = 0;
};

// all_gather_v, or reduce_scatter_v, whose rows are values of `type`.
struct GatherCall {
  Operation operation = Operation::all_gather_v;
  CallOptions options{};
  int sub_group = 0;  // ranks of a sub-group, which are consecutive and gather from each other; 0: all ranks
  const void* rows = nullptr;  // [count, row_bytes]; reduce_scatter_v: [held, row_bytes]
  void* out = nullptr;         // `gathered` [held, row_bytes]; `sums` [count, row_bytes]
  std::int64_t count = 0;      // this rank's rows
  std::int64_t held = 0;       // as GatherTerms::held
  std::int64_t row_bytes = 0;
  DType type = DType::bf16;                    // of reduce_scatter_v
  const std::int32_t* device_count = nullptr;  // device backends: given: where the count is, `count` at most
  std::int64_t place = -1;                     // as GatherTerms::place

  bool adds() const { return operation == Operation::reduce_scatter_v; }
};

using SmallCall = std::variant<MetadataCall, RouteValuesCall, DispatchCountsCall, GatherCall>;

inline Operation operation_of(const SmallCall& call) {
  return std::visit([](const auto& each) { return each.operation; }, call);
}
inline const CallOptions& call_options_of(const SmallCall& call) {
  return std::visit([](const auto& each) -> auto& { return each.options; }, call);
}

// What a call returns, if it is of the kind.
struct SmallResult {
  const void* joined = nullptr;  // a Call::Result of a NumberCall
  DispatchCounts counts{};
  std::int64_t gathered = -1;  // rows; -1 on device backends
};

class DeviceWork;
class Engine;
class SourceOperations;

// The first scale of nvfp4 with which a block could not be encoded.
struct BadScale {
  int rank = -1;               // that encoded the block; -1: none
  int expert = -1;             // whose input_scales it is; -1: global_scale, or on device backends either
  std::optional<float> scale;  // device backends do not tell
};

// Findings of a lane's calls since the last check(), which raises them. A count of 0 means "none".
struct CallDiagnostics {
  BadId bad_id;
  BadSource bad_source;
  Overflow overflow;
  BadScale bad_scale;

  void record(const BadScale& bad) {
    if (bad_scale.rank < 0) bad_scale = bad;
  }
};

struct Capabilities {
  bool device_memory = false;  // tokens, ids, rows and plans are in device memory
  bool streams = false;        // calls are enqueued on a stream
  bool late_errors = false;    // a call may end with an error after it has returned
  bool capture = false;        // calls may be captured into a CUDA graph
};

// The arguments of a dispatch, checked, with every default filled in.
struct DispatchCall {
  CallOptions options{};
  Tokens tokens{};
  Ids ids{};                       // empty if `plan` is given
  Plan plan{};                     // empty if `ids` are given
  const float* weights = nullptr;  // may be null without tokens
  bool weighted = false;           // the ranks pass weights, and receive them
  Format format{};
  ReceiveBuffers memory{};
  bool apply_weights = false;
  const void* dot_rows = nullptr;
  const float* global_scale = nullptr;
  std::span<const float> input_scales{};  // [E + S] or empty
  int layer = 0;
  // For combine_backward, whose `outputs` are dot_rows:
  bool backward = false;
  std::int64_t output_rows = 0;      // Outputs::rows
  const float* d_weights = nullptr;  // [N, K], which return_values() after the dispatch writes

  // Rows of this rank past which the dispatch overflows on all ranks, below `capacity`; -1: the capacity.
  std::int32_t row_limit(std::int64_t capacity) const {
    const bool limits = plan.empty() && !memory.allow_truncation && memory.rows > 0 && memory.rows < capacity;
    return limits ? static_cast<std::int32_t>(memory.rows) : -1;
  }
};

// The arguments of a combine, checked, with every default filled in.
struct CombineCall {
  CallOptions options{};
  Outputs outputs{};
  Plan plan{};
  Result result{};
  const float* row_weights = nullptr;   // [total]
  const float* topk_weights = nullptr;  // [N, K]; may be null without tokens
  bool topk_weighted = false;           // this rank passes them; with partial in the fused form only
  Reduction reduction = Reduction::partial;
  const float* row_values = nullptr;
  float* route_values = nullptr;
  void* shared_outputs = nullptr;  // [S, N, H] of the result's type
  Epilogue epilogue{};             // not with unreduced

  // Partial sums are computed on the ranks of the experts, so topk_weights are sent there first.
  bool weights_travel() const { return topk_weighted && reduction == Reduction::partial; }
  // The call after that. `weights`: one for each row here.
  CombineCall with_sent_weights(const float* weights) const {
    CombineCall call = *this;
    call.topk_weights = nullptr;
    call.topk_weighted = false;
    call.row_weights = weights;
    return call;
  }
};

// The lane's own arrays that a dispatch writes where the caller passes no memory. Their addresses stay the
// same. Null: the lane has none.
struct OwnArrays {
  std::span<const std::byte> parts{};  // of received rows, of every format
  const float *weight = nullptr, *dots = nullptr;
  const std::int32_t *local_ids = nullptr, *counts = nullptr, *row_offsets = nullptr, *tile_offsets = nullptr;
  std::span<const std::byte> index{};  // expert_indexed: the index of positions, and the sources of rows
  const Source* source = nullptr;      // null: in the plan
  std::span<const std::byte> plan{};
  const HostTotals* totals = nullptr;
};

// A backend: one object for each exchange and rank.
//
// Exchange issues the calls of a lane one after another; calls of different lanes may run in different
// threads at once. A wait inside a call ends with TimeoutError, PeerLostError, the error of a peer that
// refused the call, or a UsageError if the ranks' options differ.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual Capabilities capabilities() const = 0;
  virtual Sizes sizes() const = 0;

  // Whole calls, or with `split` their send phases, whose result means nothing. The caller keeps tokens, ids,
  // weights and outputs unchanged until a whole call returns, so a backend may read them late. Only a whole
  // combine takes topk_weights with partial. The caller may reuse the inputs of a send phase when it returns,
  // apart from the plan, dot_rows, the receive buffers, the result, shared_outputs, the residual,
  // topk_weights and route_values, which it keeps until the receive phase is done.
  virtual DispatchResult dispatch(const DispatchCall& call, bool split) = 0;
  virtual DispatchResult dispatch_receive(const CallOptions& call) = 0;
  virtual void combine(const CombineCall& call, bool split) = 0;
  virtual void combine_receive(const CallOptions& call) = 0;

  // dispatch_counts blocks until the counts of all ranks are known, and throws every error.
  virtual SmallResult run(const SmallCall& call) = 0;

  virtual OwnArrays own_arrays(int lane) const = 0;

  // Host backends: number of the lane's last call on this rank, refused ones included.
  virtual std::uint64_t last_call(int) const { return 0; }

  // Null: host memory.
  virtual SourceOperations* source_operations() { return nullptr; }
  virtual std::unique_ptr<DeviceWork> make_device_work() const;

  // Refuses this rank's next call: it uses up the call's number and publishes `error`, with which the peers'
  // call of that number ends.
  virtual void refuse(Operation operation, const Error& error, const CallOptions& call) noexcept = 0;

  // Device backends: waits for the stream, then as raise_device_error().
  virtual void synchronize(const CallOptions&) {}
  // Device backends: throws the error that has ended a call of the lane since the last report. Does not wait.
  virtual void raise_device_error(int) {}

  // Returns the lane's diagnostics and clears them.
  virtual CallDiagnostics take_diagnostics(int lane) = 0;

  virtual LoadCounts load_counts() const = 0;
  virtual WireCounts wire_counts() const = 0;
  virtual void add_waits(WaitTimes&) const {}  // host backends
};

// Message of the UnsupportedError in a build without the cuda backend.
inline constexpr const char* kNoCudaBackend =
    "this build of ferry has no cuda backend: install a wheel or tarball that has it, or build the sources "
    "with -D FERRY_CUDA=ON (docs/install.md)";

// Throw UnsupportedError unless this process can load what the backend nvshmem, or collective over NCCL,
// needs.
void require_nvshmem();
void require_nccl();

// Throws UsageError, which names the backends, if `kind` is none of them.
void check_backend(BackendKind kind);

// Collective. Creates the backend that `config`, which is complete, names. Throws UnsupportedError if this
// build or machine does not have it.
std::unique_ptr<Backend> make_backend(const Rank& rank, const Config& config);
// Wraps the backend `inner`, whose configuration is routed_config(config), for experts in slices.
std::unique_ptr<Backend> make_sliced_backend(const Rank& rank, const Config& config,
                                             std::unique_ptr<Backend> inner);
// As make_sliced_backend(), for device memory.
std::unique_ptr<Backend> make_device_sliced_backend(const Rank& rank, const Config& config,
                                                    std::unique_ptr<Backend> inner);
std::unique_ptr<Backend> make_cpu_backend(const Rank& rank, const Config& config);
// Its part for messages that take two hops.
std::unique_ptr<Backend> make_relayed_cpu_backend(const Rank& rank, const Config& config);
std::unique_ptr<Backend> make_cuda_backend(const Rank& rank, const Config& config);
// Its part for messages that take two hops.
std::unique_ptr<Backend> make_relayed_cuda_backend(const Rank& rank, const Config& config);
std::unique_ptr<Backend> make_nvshmem_backend(const Rank& rank, const Config& config);
std::unique_ptr<Backend> make_collective_backend(const Rank& rank, const Config& config);
// Its part for Config::memory = device. `engine`: the group's; null: NCCL.
std::unique_ptr<Backend> make_device_collective_backend(const Rank& rank, const Config& config,
                                                        Engine* engine);

// Bytes that an exchange of this backend maps on a rank. `config` is complete.
Sizes sliced_backend_sizes(const Config& config, int rank, const Sizes& inner);
Sizes cpu_backend_sizes(const Config& config, const Topology& topology, int rank);
Sizes relayed_cpu_backend_sizes(const Config& config, const Topology& topology, int rank);
Sizes cuda_backend_sizes(const Config& config, const Topology& topology, int rank);
Sizes nvshmem_backend_sizes(const Config& config, const Topology& topology, int rank);
Sizes relayed_cuda_backend_sizes(const Config& config, const Topology& topology, int rank);
Sizes collective_backend_sizes(const Config& config, const Topology& topology, int rank);
Sizes device_collective_sizes(const Config& config, const Topology& topology, int rank);

// Arguments of dispatch_layout(). `topology`: null without tokens_per_node.
struct DispatchLayoutCall : RankIds {
  DispatchLayout result;

  int nodes() const { return topology != nullptr ? topology->nodes() : 0; }
};

// These take checked arguments.
void dispatch_layout_on_host(const DispatchLayoutCall& call);
// Throws UnsupportedError in a build without the cuda backend.
void dispatch_layout_on_device(const DispatchLayoutCall& call, Stream stream);

}  // namespace ferry
