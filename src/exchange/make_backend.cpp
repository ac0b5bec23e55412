// Creates the backend that a configuration names, if this build has it.
#include "base/text.hpp"
#include "exchange/backend.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "group/rank_state.hpp"

namespace ferry {

namespace {

[[noreturn]] void throw_no_backend(BackendKind backend) {
  throw UnsupportedError(str("this build of ferry has no ", to_string(backend), " backend"));
}

}  // namespace

#if !FERRY_HAS_CUDA
std::unique_ptr<Backend> make_cuda_backend(const Rank&, const Config&) {
  throw UnsupportedError(kNoCudaBackend);
}

Sizes cuda_backend_sizes(const Config&, int) {
  throw UnsupportedError(kNoCudaBackend);
}
#endif

const StepMetadata* Backend::metadata_from_device(const std::int32_t*, int, Stream) {
  throw UnsupportedError(
      "metadata: this backend cannot read a count from device memory: pass the count itself");
}

std::unique_ptr<Backend> make_backend(const Rank& rank, const Config& config) {
  if (!rank.state().one_host()) {
    throw UnsupportedError(str("the backend ", to_string(config.backend), " needs all ranks on one host; these ",
                               rank.size(), " ranks are on ", rank.topology().nodes(), " hosts"));
  }
  switch (config.backend) {
    case BackendKind::reference:
      return make_reference_backend(rank, config);
    case BackendKind::cpu:
      return make_cpu_backend(rank, config);
    case BackendKind::cuda:
      return make_cuda_backend(rank, config);
  }
  throw_no_backend(config.backend);
}

Sizes size_of(const Config& given, int ranks, int rank) {
  const Config config = complete_config(given, ranks);
  check_rank(rank, ranks);
  switch (config.backend) {
    case BackendKind::reference:
      return reference_backend_sizes(config, rank);
    case BackendKind::cpu:
      return cpu_backend_sizes(config, rank);
    case BackendKind::cuda:
      return cuda_backend_sizes(config, rank);
  }
  throw_no_backend(config.backend);
}

}  // namespace ferry
