
#include <algorithm>
#include <memory>
#include <vector>

#include "base/text.hpp"
#include "exchange/backend.hpp"
#include "exchange/overlap.hpp"
#include "ferry/error.hpp"
#include "plan/slot.hpp"

namespace ferry {
namespace {

void check_layout(const DispatchLayoutCall& call) {
  const auto require = [](const void* pointer, const char* name) {
    if (pointer == nullptr) throw UsageError(str("dispatch_layout: ", name, " is null"));
  };
  if (call.placement.empty()) throw UsageError("dispatch_layout: the placement has no experts");
  if (call.source < 0 || call.source >= call.placement.ranks())
    throw UsageError(
        str("dispatch_layout: source = ", call.source, ", must be 0 to ", call.placement.ranks() - 1));
  if (call.tokens < 0 || call.tokens > 1 << 24) {
    throw UsageError(str("dispatch_layout: tokens = ", call.tokens, ", must be 0 to ", 1 << 24));
  }
  if (call.top_k < 1 || call.top_k > kMaxTopK)
    throw UsageError(str("dispatch_layout: top_k = ", call.top_k, ", must be 1 to ", kMaxTopK));
  require(call.result.tokens_per_rank, "tokens_per_rank");
  require(call.result.routes_per_expert, "routes_per_expert");
  if (call.tokens > 0) require(call.ids.data, "ids");
  if (call.result.tokens_per_node == nullptr) return;
  require(call.topology, "topology");
  if (call.topology->ranks() != call.placement.ranks()) {
    throw UsageError(str("dispatch_layout: the topology has ", counted(call.topology->ranks(), "rank"),
                         ", and the placement ", call.placement.ranks()));
  }
}

void check_overlap(const DispatchLayoutCall& call) {
  const std::int64_t ranks = call.placement.ranks();
  CallArrays arrays;
  arrays.read("ids", call.ids.data, call.tokens, call.top_k * bytes_of(call.ids.type));
  arrays.write("tokens_per_rank", call.result.tokens_per_rank, ranks, 4);
  arrays.write("routes_per_expert", call.result.routes_per_expert, call.placement.total_replicas(), 4);
  arrays.write("token_in_rank", call.result.token_in_rank, call.tokens, ranks);
  arrays.write("tokens_per_node", call.result.tokens_per_node, call.nodes(), 4);
  arrays.require_apart("dispatch_layout: ", -1);
}

template <class Id>
void count(const DispatchLayoutCall& call, const Id* ids) {
  const Placement& placement = call.placement;
  const auto ranks = static_cast<std::size_t>(placement.ranks());
  const DispatchLayout& result = call.result;
  const auto unwanted = std::make_unique<bool[]>(ranks);
  for (std::int64_t token = 0; token < call.tokens; ++token) {
    bool* const in_rank =
        result.token_in_rank != nullptr ? result.token_in_rank + token * placement.ranks() : unwanted.get();
    std::fill_n(in_rank, ranks, false);
    for (int slot = 0; slot < call.top_k; ++slot) {
      const Id id = ids[token * call.top_k + slot];
      if (classify_id(id, placement.experts()) != IdKind::expert) continue;
      const int replica = placement.replica(
          static_cast<int>(id), {.token = static_cast<int>(token), .source = call.source, .slot = slot});
      ++result.routes_per_expert[replica];
      in_rank[placement.locations()[static_cast<std::size_t>(replica)].rank] = true;
    }
    for (std::size_t rank = 0; rank < ranks; ++rank) result.tokens_per_rank[rank] += in_rank[rank];
    for (int node = 0; node < call.nodes(); ++node) {
      const std::vector<int>& on_node = call.topology->ranks_of(node);
      result.tokens_per_node[node] +=
          std::any_of(on_node.begin(), on_node.end(), [&](int rank) { return in_rank[rank]; });
    }
  }
}

}  // namespace

void dispatch_layout_on_host(const DispatchLayoutCall& call) {
  std::fill_n(call.result.tokens_per_rank, call.placement.ranks(), 0);
  std::fill_n(call.result.routes_per_expert, call.placement.total_replicas(), 0);
  if (call.topology != nullptr) std::fill_n(call.result.tokens_per_node, call.nodes(), 0);
  if (call.ids.type == IdType::int64) {
    count(call, static_cast<const std::int64_t*>(call.ids.data));
  } else {
    count(call, static_cast<const std::int32_t*>(call.ids.data));
  }
}

#if !FERRY_HAS_CUDA
void dispatch_layout_on_device(const DispatchLayoutCall&, Stream) {
  throw UnsupportedError(kNoCudaBackend);
}
#endif

void dispatch_layout(const RankIds& ids, const DispatchLayout& result, MemoryKind memory, Stream stream) {
  DispatchLayoutCall call{ids, result};
  if (result.tokens_per_node == nullptr) call.topology = nullptr;
  check_layout(call);
  if (memory < MemoryKind::automatic || memory > MemoryKind::device) {
    throw UsageError(str("dispatch_layout: memory ", static_cast<int>(memory),
                         " does not exist, expected automatic, host or device"));
  }
  check_overlap(call);
  if (memory == MemoryKind::device) return dispatch_layout_on_device(call, stream);
  dispatch_layout_on_host(call);
}

}  // namespace ferry
