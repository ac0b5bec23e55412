// What an exchange asks of a backend: one object for each exchange and rank.
#pragma once

#include <cstdint>
#include <memory>

#include "ferry/error.hpp"
#include "ferry/exchange.hpp"

namespace ferry {

// What check() raises, gathered by a lane's calls since the last check. Zero counts mean nothing happened.
struct CallDiagnostics {
  BadId bad_id;
  BadSource bad_source;
  Overflow overflow;
};

struct Capabilities {
  bool device_memory = false;  // tokens, ids and rows lie in device memory
  bool streams = false;
};

// A dispatch, checked and complete: every default is filled in. Exactly one of `ids` and `plan` is given.
struct DispatchCall {
  int lane = 0;
  Tokens tokens{};
  Ids ids{};
  Plan plan{};
  const float* weights = nullptr;
  Format format{};
  ReceiveBuffers memory{};
  bool apply_weights = false;
  const void* dot_rows = nullptr;
  int sm_limit = 0;
};

struct CombineCall {
  int lane = 0;
  Outputs outputs{};
  Plan plan{};
  Result result{};
  const float* row_weights = nullptr;   // one a row
  const float* topk_weights = nullptr;  // [N, K]; with partial only in the fused form
  Reduction reduction = Reduction::partial;
  const float* row_values = nullptr;
  float* route_values = nullptr;
  int sm_limit = 0;
};

// Calls of a lane come in order; calls of different lanes may come from different threads at once. Waits
// inside end with TimeoutError, PeerLostError, or with the error of a peer that refused or of options that
// differ.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual Capabilities capabilities() const = 0;
  virtual Sizes sizes() const = 0;

  // The fused forms. Tokens, ids, weights and outputs stay the caller's until these return, so a backend may
  // read them late. `combine` also takes home weights with partial.
  virtual DispatchResult dispatch(const DispatchCall& call, Stream stream) = 0;
  virtual void combine(const CombineCall& call, Stream stream) = 0;

  // The halves. What a send half was given may be reused after it; plan, result and home weights stay.
  virtual void dispatch_send(const DispatchCall& call, Stream stream) = 0;
  virtual DispatchResult dispatch_receive(int lane, Stream stream) = 0;
  virtual void combine_send(const CombineCall& call, Stream stream) = 0;
  virtual void combine_receive(int lane, Stream stream) = 0;
  virtual void route_values(const float* values, const Plan& plan, float* row_values, int lane,
                            Stream stream) = 0;
  virtual const StepMetadata* metadata(std::int32_t count, int lane, Stream stream) = 0;
  // Device backends: the count lies in device memory.
  virtual const StepMetadata* metadata_from_device(const std::int32_t* count, int lane, Stream stream);

  // This rank's own call is refused: takes its number and tells the peers, whose call ends with the same
  // error.
  virtual void refuse(Operation operation, int lane, const Error& error, Stream stream) noexcept = 0;

  // Device backends: waits for the stream and throws what ended a call of the lane since the last look.
  virtual void synchronize(int, Stream) {}
  // Device backends: throws what has ended a call of the lane, without waiting.
  virtual void raise_device_error(int) {}

  // What the lane's calls have found, cleared by reading.
  virtual CallDiagnostics take_diagnostics(int lane) = 0;

  virtual LoadCounts load() const = 0;
  virtual WireCounts wire_counts() const = 0;
};

// What a build without the backend cuda says when it is asked for it.
inline constexpr const char* kNoCudaBackend =
    "this build of ferry has no cuda backend: build it with -D FERRY_CUDA=ON";

// Throws UnsupportedError when this build or machine has no such backend. `config` is complete.
std::unique_ptr<Backend> make_backend(const Rank& rank, const Config& config);
std::unique_ptr<Backend> make_reference_backend(const Rank& rank, const Config& config);
std::unique_ptr<Backend> make_cpu_backend(const Rank& rank, const Config& config);
std::unique_ptr<Backend> make_cuda_backend(const Rank& rank, const Config& config);

// What an exchange of this backend will map on a rank.
Sizes reference_backend_sizes(const Config& config, int rank);
Sizes cpu_backend_sizes(const Config& config, int rank);
Sizes cuda_backend_sizes(const Config& config, int rank);

}  // namespace ferry
