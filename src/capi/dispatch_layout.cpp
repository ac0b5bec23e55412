#include "ferry/dispatch_layout.hpp"

#include <optional>
#include <vector>

#include "base/text.hpp"
#include "capi/boundary.hpp"
#include "capi/convert.hpp"

namespace ferry::capi {

namespace {

// Empty without tokens_per_node.
std::optional<Topology> topology_of(const ferry_dispatch_layout_args& args) {
  if (args.tokens_per_node == nullptr || args.ranks < 1) return std::nullopt;
  if (args.node_of_rank != nullptr)
    return Topology(std::vector<int>(args.node_of_rank, args.node_of_rank + args.ranks));
  if (args.ranks_per_node < 1 || args.ranks % args.ranks_per_node != 0) {
    throw UsageError(str("ferry_dispatch_layout: ranks_per_node = ", args.ranks_per_node,
                         ", must be a divisor of the ", counted(args.ranks, "rank"),
                         "; or pass node_of_rank for nodes of any ranks"));
  }
  return Topology::blocks(args.ranks, args.ranks / args.ranks_per_node);
}

}  // namespace

extern "C" {

ferry_status ferry_dispatch_layout(const ferry_dispatch_layout_args* given) {
  return guarded([&] {
    const auto args = read_sized(given, "ferry_dispatch_layout_args");
    const auto backend = to_choice(args.backend, BackendKind::cuda, "ferry_dispatch_layout_args.backend");
    Placement placement = to_placement(args.expert_rank, args.expert_local, args.experts, args.ranks);
    if (placement.empty()) placement = Placement::blocks(args.experts, args.ranks);
    const std::optional<Topology> topology = topology_of(args);
    dispatch_layout(to_ids(args.ids, args.id_type), args.tokens, args.top_k, placement,
                    {.tokens_per_rank = args.tokens_per_rank,
                     .routes_per_expert = args.routes_per_expert,
                     .token_in_rank = reinterpret_cast<bool*>(args.token_in_rank),
                     .tokens_per_node = args.tokens_per_node},
                    topology ? &*topology : nullptr, backend.value_or(BackendKind::cpu), {args.stream});
  });
}

}  // extern "C"

}  // namespace ferry::capi
