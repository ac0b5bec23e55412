#include "ferry/exchange.hpp"

#include "capi/boundary.hpp"
#include "capi/convert.hpp"
#include "capi/handles.hpp"

namespace ferry::capi {

extern "C" {

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
    // Of each thread its own: the arrays stay valid after the call.
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

}  // extern "C"

}  // namespace ferry::capi
