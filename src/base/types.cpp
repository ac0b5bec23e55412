// Names of the public enumerations, and the version.
#include "ferry/types.hpp"

#include <cstddef>
#include <iterator>

#include "ferry/version.hpp"

namespace ferry {
namespace {

template <class Enum, std::size_t Count>
const char* name_of(Enum value, const char* const (&names)[Count]) {
  const auto index = static_cast<std::size_t>(value);
  return index < Count ? names[index] : "unknown";
}

}  // namespace

const char* to_string(DType type) {
  return name_of(type, {"bf16", "fp16", "fp32"});
}

const char* to_string(Layout layout) {
  return name_of(layout, {"expert_major", "expert_padded", "rank_major"});
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
  const auto index =
      static_cast<std::size_t>(static_cast<int>(backend) - static_cast<int>(BackendKind::automatic));
  constexpr const char* kNames[] = {"automatic", "reference", "cpu", "cuda", "collective", "nvshmem"};
  return index < std::size(kNames) ? kNames[index] : "unknown";
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

std::string_view version() noexcept {
  return FERRY_VERSION;
}

}  // namespace ferry
