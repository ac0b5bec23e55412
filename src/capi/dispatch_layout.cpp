#include "ferry/dispatch_layout.hpp"

#include "capi/boundary.hpp"
#include "capi/convert.hpp"

namespace ferry::capi {

extern "C" {

ferry_status ferry_dispatch_layout(const ferry_dispatch_layout_args* given) {
  return guarded([&] {
    const auto args = read_sized(given, "ferry_dispatch_layout_args");
    const auto backend = to_choice(args.backend, BackendKind::cuda, "ferry_dispatch_layout_args.backend");
    Placement placement = to_placement(args.expert_rank, args.expert_local, args.experts, args.ranks);
    if (placement.empty()) placement = Placement::blocks(args.experts, args.ranks);
    dispatch_layout(to_ids(args.ids, args.id_type), args.tokens, args.top_k, placement,
                    {.tokens_per_rank = args.tokens_per_rank,
                     .routes_per_expert = args.routes_per_expert,
                     .token_in_rank = reinterpret_cast<bool*>(args.token_in_rank),
                     .tokens_per_node = args.tokens_per_node},
                    args.ranks_per_node, backend.value_or(BackendKind::cpu), {args.stream});
  });
}

}  // extern "C"

}  // namespace ferry::capi
