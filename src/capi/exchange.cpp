// Exchanges and plans of C: sizes, construction, and what a plan holds.
#include "ferry/plan.hpp"

#include <cstring>
#include <optional>
#include <vector>

#include "base/text.hpp"
#include "capi/boundary.hpp"
#include "capi/convert.hpp"
#include "ferry/config.hpp"
#include "ferry/dispatch_layout.hpp"
#include "ferry/exchange.hpp"
#include "plan/plan_checks.hpp"

namespace ferry::capi {
namespace {

Config read_config(const ferry_config* config, int ranks) {
  return to_config(read_sized(config, "ferry_config"), ranks);
}

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

const PlanHeader& header_of(const ferry_plan* given) {
  return checked_header(to_plan(required(given, "ferry_plan")));
}

}  // namespace

extern "C" {

ferry_status ferry_sizes_of(const ferry_config* config, int ranks, int rank, ferry_sizes* sizes) {
  return guarded(
      [&] { write_sized(sizes, to_c(size_of(read_config(config, ranks), ranks, rank)), "ferry_sizes"); });
}

ferry_status ferry_sizes_on_nodes(const ferry_config* config, const int32_t* node_of_rank, int ranks,
                                  int rank, ferry_sizes* sizes) {
  return guarded([&] {
    const Topology topology = to_topology(node_of_rank, ranks);
    write_sized(sizes, to_c(size_of(read_config(config, ranks), topology, rank)), "ferry_sizes");
  });
}

ferry_status ferry_capacity_of(const ferry_config* config, int ranks, int rank, int64_t* rows) {
  return guarded([&] { required(rows, "rows") = capacity_of(read_config(config, ranks), ranks, rank); });
}

ferry_status ferry_plan_bytes(const ferry_config* config, int ranks, int64_t* bytes) {
  return guarded([&] { required(bytes, "bytes") = plan_bytes(read_config(config, ranks), ranks); });
}

ferry_status ferry_parse_format(const char* name, ferry_format* format) {
  return guarded([&] { required(format, "format") = to_c(parse_format(&required(name, "name"))); });
}

ferry_status ferry_format_name(const ferry_format* format, char* name, size_t bytes) {
  return guarded([&] {
    const std::string text = to_string(to_format(required(format, "format")).value_or(Config().format));
    if (name == nullptr || bytes <= text.size())
      throw UsageError(str("name: ", counted(text.size() + 1, "byte"), " are needed for '", text, "', got ",
                           name == nullptr ? 0 : bytes));
    text.copy(name, text.size());
    name[text.size()] = '\0';
  });
}

ferry_status ferry_placement_blocks(int experts, int ranks, int32_t* expert_rank, int32_t* expert_local) {
  return guarded([&] {
    required(expert_rank, "expert_rank");
    required(expert_local, "expert_local");
    const Placement placement = Placement::blocks(experts, ranks);
    for (int e = 0; e < experts; ++e) {
      expert_rank[e] = placement.location(e).rank;
      expert_local[e] = placement.location(e).local;
    }
  });
}

ferry_status ferry_exchange_create(const ferry_rank* rank, const ferry_config* config,
                                   ferry_exchange** exchange) {
  return guarded([&] {
    required(rank, "rank");
    required(exchange, "exchange");
    *exchange = new ferry_exchange(rank->rank, config_or_refuse(rank->rank, config));
  });
}

void ferry_exchange_destroy(ferry_exchange* exchange) {
  delete exchange;
}

ferry_status ferry_exchange_config(const ferry_exchange* exchange, ferry_config* config) {
  return guarded([&] {
    ferry_config c = to_c(required(exchange, "exchange").exchange.config());
    c.expert_rank = exchange->expert_rank.data();
    c.expert_local = exchange->expert_local.data();
    write_sized(config, c, "ferry_config");
  });
}

ferry_status ferry_exchange_sizes(const ferry_exchange* exchange, ferry_sizes* sizes) {
  return guarded(
      [&] { write_sized(sizes, to_c(required(exchange, "exchange").exchange.sizes()), "ferry_sizes"); });
}

ferry_status ferry_exchange_capacity(const ferry_exchange* exchange, int64_t* rows) {
  return guarded([&] {
    required(exchange, "exchange");
    required(rows, "rows") = exchange->exchange.capacity();
  });
}

ferry_status ferry_check(ferry_exchange* exchange, int lane) {
  return guarded([&] { required(exchange, "exchange").exchange.check(lane); });
}

ferry_status ferry_synchronize(ferry_exchange* exchange, int lane, void* stream) {
  return guarded([&] { required(exchange, "exchange").exchange.synchronize(lane, {stream}); });
}

ferry_status ferry_last_dispatch_result(const ferry_exchange* exchange, int lane,
                                        ferry_dispatch_result* result) {
  return guarded([&] {
    const DispatchResult& last = required(exchange, "exchange").exchange.last_dispatch_result(lane);
    write_sized(result, to_c(last), "ferry_dispatch_result");
  });
}

ferry_status ferry_get_load_counts(const ferry_exchange* exchange, ferry_load_counts* counts) {
  return guarded([&] {
    // One for each thread: the arrays stay valid after the call.
    thread_local LoadCounts load;
    load = required(exchange, "exchange").exchange.load_counts();
    ferry_load_counts c{};
    c.experts = load.experts.data();
    c.ranks = load.ranks.data();
    c.dispatches = load.dispatches;
    write_sized(counts, c, "ferry_load_counts");
  });
}

ferry_status ferry_get_wire_counts(const ferry_exchange* exchange, ferry_wire_counts* counts) {
  return guarded([&] {
    const WireCounts wire = required(exchange, "exchange").exchange.wire_counts();
    ferry_wire_counts c{};
    c.dispatch_bytes = wire.dispatch_bytes;
    c.dispatch_messages = wire.dispatch_messages;
    c.combine_bytes = wire.combine_bytes;
    c.combine_messages = wire.combine_messages;
    c.dispatch_bytes_between_nodes = wire.between_nodes.dispatch_bytes;
    c.dispatch_messages_between_nodes = wire.between_nodes.dispatch_messages;
    c.combine_bytes_between_nodes = wire.between_nodes.combine_bytes;
    c.combine_messages_between_nodes = wire.between_nodes.combine_messages;
    write_sized(counts, c, "ferry_wire_counts");
  });
}

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

ferry_status ferry_plan_query(const ferry_plan* given, ferry_plan_info* info) {
  return guarded([&] {
    const PlanHeader& header = header_of(given);
    const Plan plan = to_plan(*given);
    ferry_plan_info c{};
    c.rank = plan.rank();
    c.ranks = plan.ranks();
    c.experts = header.shape.experts;
    c.top_k = header.shape.top_k;
    c.tokens = plan.tokens();
    c.placement_version = plan.placement_version();
    c.total = plan.total();
    c.dropped = plan.dropped();
    c.counts = plan.counts().data();
    c.tokens_between = plan.tokens_between().data();
    c.sources = reinterpret_cast<const ferry_source*>(plan.sources().data());
    write_sized(info, c, "ferry_plan_info");
  });
}

ferry_status ferry_plan_route(const ferry_plan* given, int token, int slot, int32_t* rank, int64_t* row) {
  return guarded([&] {
    const Plan plan = to_plan(required(given, "ferry_plan"));
    required(rank, "rank");
    required(row, "row");
    *rank = plan.destination(token, slot);
    *row = plan.row(token, slot);
  });
}

ferry_status ferry_plan_copy(const ferry_plan* plan, void* storage, size_t bytes, ferry_plan* copy) {
  return guarded([&] {
    const PlanHeader& header = header_of(plan);
    const auto needed = static_cast<std::size_t>(view_plan(nullptr, header.shape).bytes);
    required(copy, "copy");
    if (storage == nullptr || bytes < needed) {
      throw UsageError(str("plan: storage of ", counted(storage == nullptr ? 0 : bytes, "byte"),
                           " for a copy that takes ", needed));
    }
    check_plan_address(storage);
    std::memcpy(storage, plan->storage, needed);
    *copy = {storage, needed, plan->call};
  });
}

}  // extern "C"

}  // namespace ferry::capi
