// Picks the backend of a configuration among those this build has.
#include "core/backend.hpp"
#include "core/configuration.hpp"
#include "core/text.hpp"
#include "ferry/error.hpp"

namespace ferry {

namespace {

[[noreturn]] void refuse(BackendKind backend) {
  throw UnsupportedError(str("this build of ferry has no ", to_string(backend), " backend"));
}

}  // namespace

std::unique_ptr<Backend> make_backend(const Rank& rank, const Config& config) {
  switch (config.backend) {
    case BackendKind::reference:
      return make_reference_backend(rank, config);
    case BackendKind::cpu:
      return make_cpu_backend(rank, config);
    case BackendKind::cuda:
      break;
  }
  refuse(config.backend);
}

Sizes size_of(const Config& given, int ranks, int rank) {
  const Config config = complete(given, ranks);
  switch (config.backend) {
    case BackendKind::reference:
      return reference_backend_sizes(config, rank);
    case BackendKind::cpu:
      return cpu_backend_sizes(config, rank);
    case BackendKind::cuda:
      break;
  }
  refuse(config.backend);
}

}  // namespace ferry
