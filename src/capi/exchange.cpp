// Exchanges and plans of C: sizes, construction, and what a plan holds.
#include "ferry/plan.hpp"

#include <cstring>
#include <optional>

#include "base/text.hpp"
#include "capi/boundary.hpp"
#include "capi/convert.hpp"
#include "ferry/config.hpp"
#include "ferry/dispatch_layout.hpp"
#include "ferry/exchange.hpp"
#include "plan/plan_checks.hpp"

namespace ferry::capi {
namespace {

ferry_sizes sizes_in_c(const Sizes& sizes, const Config& config, int ranks, int rank) {
  ferry_sizes c{};
  c.dispatch_staging = sizes.dispatch_staging;
  c.combine_staging = sizes.combine_staging;
  c.signals = sizes.signals;
  c.results = sizes.results;
  c.plans = sizes.plans;
  c.total = sizes.total();
  c.messages = sizes.messages;
  c.capacity = capacity_of(config, ranks, rank);
  c.plan_bytes = plan_bytes(config, ranks);
  return c;
}

const PlanHeader& header_of(const ferry_plan* given) {
  return checked_header(to_plan(required(given, "ferry_plan")));
}

}  // namespace

extern "C" {

ferry_status ferry_sizes_of(const ferry_config* given, const int32_t* node_of_rank, int ranks, int rank,
                            ferry_sizes* sizes) {
  return guarded([&] {
    const Config config = to_config(read_sized(given, "ferry_config"), ranks);
    const Sizes bytes = node_of_rank == nullptr ? size_of(config, ranks, rank)
                                                : size_of(config, to_topology(node_of_rank, ranks), rank);
    write_sized(sizes, sizes_in_c(bytes, config, ranks, rank), "ferry_sizes");
  });
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
    const bool replicas = !exchange->held_counts.empty();
    c.expert_rank = replicas ? nullptr : exchange->expert_rank.data();
    c.expert_local = replicas ? nullptr : exchange->expert_local.data();
    c.held_experts = replicas ? exchange->held_experts.data() : nullptr;
    c.held_counts = replicas ? exchange->held_counts.data() : nullptr;
    write_sized(config, c, "ferry_config");
  });
}

ferry_status ferry_exchange_sizes(const ferry_exchange* given, ferry_sizes* sizes) {
  return guarded([&] {
    const Exchange& exchange = required(given, "exchange").exchange;
    const Rank& rank = exchange.rank();
    write_sized(sizes, sizes_in_c(exchange.sizes(), exchange.config(), rank.size(), rank.index()),
                "ferry_sizes");
  });
}

ferry_status ferry_check(ferry_exchange* exchange, int lane) {
  return guarded([&] { required(exchange, "exchange").exchange.check(lane); });
}

ferry_status ferry_synchronize(ferry_exchange* exchange, const ferry_call_options* call) {
  return guarded([&] { required(exchange, "exchange").exchange.synchronize(to_call_options(call)); });
}

ferry_status ferry_last_dispatch_result(const ferry_exchange* exchange, int lane,
                                        ferry_dispatch_result* result) {
  return guarded([&] {
    const DispatchResult& last = required(exchange, "exchange").exchange.last_dispatch_result(lane);
    write_sized(result, to_c(last), "ferry_dispatch_result");
  });
}

ferry_status ferry_exchange_counts(const ferry_exchange* given, ferry_counts* counts) {
  return guarded([&] {
    const Exchange& exchange = required(given, "exchange").exchange;
    // One of each for each thread: the arrays stay valid after the call.
    thread_local LoadCounts load;
    load = exchange.load_counts();
    const WireCounts wire = exchange.wire_counts();
    thread_local WaitTimes waits;
    waits = exchange.wait_times();
    ferry_counts c{};
    c.experts = load.experts.data();
    c.ranks = load.ranks.data();
    c.dispatches = load.dispatches;
    c.dispatch_bytes = wire.dispatch_bytes;
    c.dispatch_messages = wire.dispatch_messages;
    c.combine_bytes = wire.combine_bytes;
    c.combine_messages = wire.combine_messages;
    c.dispatch_bytes_between_nodes = wire.between_nodes.dispatch_bytes;
    c.dispatch_messages_between_nodes = wire.between_nodes.dispatch_messages;
    c.combine_bytes_between_nodes = wire.between_nodes.combine_bytes;
    c.combine_messages_between_nodes = wire.between_nodes.combine_messages;
    c.layers = load.layers.data();
    c.dispatch_waits = waits.dispatch.data();
    c.combine_waits = waits.combine.data();
    write_sized(counts, c, "ferry_counts");
  });
}

ferry_status ferry_dispatch_layout(const ferry_dispatch_layout_args* given) {
  return guarded([&] {
    const auto args = read_sized(given, "ferry_dispatch_layout_args");
    const auto memory = to_enum(args.memory, MemoryKind::device, "ferry_dispatch_layout_args.memory");
    Placement placement = to_placement(args, args.ranks);
    if (placement.empty()) placement = Placement::blocks(args.experts, args.ranks);
    std::optional<Topology> topology;
    if (args.tokens_per_node != nullptr) topology = to_topology(args.node_of_rank, args.ranks);
    dispatch_layout({.ids = to_ids(args.ids, args.id_type),
                     .tokens = args.tokens,
                     .top_k = args.top_k,
                     .placement = placement,
                     .topology = topology ? &*topology : nullptr,
                     .source = static_cast<int>(args.source)},
                    {.tokens_per_rank = args.tokens_per_rank,
                     .routes_per_expert = args.routes_per_expert,
                     .token_in_rank = reinterpret_cast<bool*>(args.token_in_rank),
                     .tokens_per_node = args.tokens_per_node},
                    memory, {args.stream});
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
    *copy = {storage, needed, plan->call, {}};
  });
}

}  // extern "C"

}  // namespace ferry::capi
