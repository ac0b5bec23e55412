// Names of the public enumerations, and the version.
#include "ferry/types.hpp"

#include "base/enumerators.hpp"
#include "ferry/error.hpp"
#include "ferry/version.hpp"

namespace ferry {

const char* to_string(DType type) {
  return name_of(type, {"bf16", "fp16", "fp32"});
}

const char* to_string(Layout layout) {
  return name_of(layout, {"expert_major", "expert_padded", "rank_major", "expert_indexed"});
}

const char* to_string(Reduction reduction) {
  return name_of(reduction, {"partial", "exact", "unreduced"});
}

const char* to_string(ReductionLevel level) {
  return name_of(level, {"automatic", "rank", "node"});
}

const char* to_string(Input input) {
  return name_of(input, {"own", "replicated"});
}

const char* to_string(Transfer transfer) {
  return name_of(transfer, {"routed", "gather"});
}

const char* to_string(BackendKind backend) {
  return name_of(static_cast<int>(backend) - static_cast<int>(BackendKind::automatic),
                 {"automatic", "reference", "cpu", "cuda", "collective", "nvshmem"});
}

const char* to_string(EngineKind engine) {
  return name_of(engine, {"automatic", "mpi", "custom", "nccl"});
}

const char* to_string(MemoryKind memory) {
  return name_of(memory, {"automatic", "host", "device"});
}

const char* to_string(Hops hops) {
  return name_of(hops, {"automatic", "one", "two"});
}

const char* to_string(ErrorCode code) {
  return name_of(code, {"ok", "usage", "overflow", "timeout", "peer lost", "system", "unsupported"});
}

const char* to_string(Operation operation) {
  return name_of(operation,
                 {"none", "construct", "dispatch", "combine", "metadata", "route_values", "barrier",
                  "dispatch_counts", "all_gather_v", "reduce_scatter_v", "return_values"});
}

const char* to_string(WaitRole role) {
  return name_of(role, {"none", "sender", "relay", "receiver"});
}

std::string_view version() noexcept {
  return FERRY_VERSION;
}

}  // namespace ferry
