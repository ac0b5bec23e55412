#include <algorithm>
#include <cstring>
#include <vector>

#include "backends/cpu/lane.hpp"
#include "exchange/backend.hpp"
#include "exchange/compared_options.hpp"
#include "exchange/gather.hpp"
#include "group/fault_points.hpp"
#include "plan/shapes.hpp"

namespace ferry::cpu {
namespace {

// Values travel with the messages of dispatch, K for each; with return_values one goes back for each of them.
int messages_to(Lane& lane, const PlanView& plan, int peer, bool returns) {
  const int me = lane.context.me();
  return returns ? lane.message_count(plan, peer, me) : lane.message_count(plan, me, peer);
}
int messages_from(Lane& lane, const PlanView& plan, int peer, bool returns) {
  return messages_to(lane, plan, peer, !returns);
}

void reserve_values(Lane& lane, const PlanView& plan, const RouteValuesCall& call) {
  if (!lane.link->packs()) return;
  const std::int64_t message_bytes = 4 * std::int64_t{lane.context.config.top_k};
  std::vector<std::int64_t> bytes;
  for (int peer = 0; peer < lane.context.ranks(); ++peer)
    bytes.push_back(messages_to(lane, plan, peer, call.returns()) * message_bytes);
  lane.link->reserve({.direction = call.returns() ? Direction::to_sources : Direction::to_experts,
                      .message_bytes = message_bytes,
                      .bytes = bytes});
}

// Calls use(token) for message i to `rank`.
template <class UseToken>
void with_sent_token(Lane& lane, const PlanView& plan, int rank, std::int64_t i, UseToken use) {
  const std::int64_t entry = std::int64_t{rank} * lane.context.config.max_tokens + i;
  const std::int32_t token = plan.sent_tokens[entry];
  if (lane.valid_entry(token, plan.header->tokens, entry)) use(token);
}
// Calls use(slot, row) for each row here of message i from `rank`.
template <class UseRow>
void with_received_rows(Lane& lane, const PlanView& plan, int rank, std::int64_t i, UseRow use) {
  const Config& config = lane.context.config;
  const std::int64_t first = (std::int64_t{rank} * config.max_tokens + i) * config.top_k;
  for (int slot = 0; slot < config.top_k; ++slot) {
    const std::int32_t row = plan.received_rows_of_message[first + slot];
    if (row != -1 && lane.valid_entry(row, plan.header->total, first + slot)) use(slot, row);
  }
}

// Writes the values for rank `peer`, in the order of dispatch's messages.
void stage_values(Lane& lane, const PlanView& plan, const RouteValuesCall& call, int peer) {
  const std::int64_t top_k = lane.context.config.top_k;
  auto* values = reinterpret_cast<float*>(lane.link->outgoing(Staging::dispatch, peer));
  const int count = messages_to(lane, plan, peer, call.returns());
  for (int i = 0; i < count; ++i, values += top_k) {
    if (call.returns()) {
      std::fill_n(values, top_k, 0.0f);
      with_received_rows(lane, plan, peer, i,
                         [&](int slot, std::int32_t row) { values[slot] = call.from[row]; });
    } else {
      with_sent_token(lane, plan, peer, i,
                      [&](std::int64_t token) { std::copy_n(call.from + token * top_k, top_k, values); });
    }
  }
}

void read_values(Lane& lane, const PlanView& plan, const RouteValuesCall& call, int peer) {
  const std::int64_t top_k = lane.context.config.top_k;
  std::int64_t count = messages_from(lane, plan, peer, call.returns());
  if (lane.link->packs()) {
    const std::int64_t sent = lane.link->incoming_bytes(peer) / (4 * top_k);
    if (sent < count) lane.record_bad_source(std::int64_t{peer} * lane.context.config.max_tokens + sent);
    count = std::min(count, sent);
  }
  const auto* values = reinterpret_cast<const float*>(lane.link->incoming(Staging::dispatch, peer));
  for (std::int64_t i = 0; i < count; ++i, values += top_k) {
    if (call.returns()) {
      with_sent_token(lane, plan, peer, i, [&](std::int64_t token) {
        for (std::int64_t slot = 0; slot < top_k; ++slot) {
          const std::int64_t route = token * top_k + slot;
          if (plan.route_rank[route] == peer) call.to[route] = values[slot];
        }
      });
    } else {
      with_received_rows(lane, plan, peer, i,
                         [&](int slot, std::int32_t row) { call.to[row] = values[slot]; });
    }
  }
}

}  // namespace

SmallResult run(Lane& lane, const RouteValuesCall& call) {
  const int me = lane.context.me(), ranks = lane.context.ranks();
  ComparedOptions options;
  if (call.combine != nullptr) options = options_of(*call.combine);
  add_plan(call.plan, &options);
  lane.link->begin(call.needed_by(), options, call.combine != nullptr);
  const PlanView plan = view_plan(call.plan.storage(), lane.context.plan_shape);
  fault_point(FaultPoint::route_values_begin, me);
  reserve_values(lane, plan, call);
  for (int peer = 0; peer < ranks; ++peer) stage_values(lane, plan, call, peer);
  fault_point(FaultPoint::route_values_sent, me);
  lane.link->post(false);
  fault_point(FaultPoint::route_values_posted, me);
  lane.link->wait();
  fault_point(FaultPoint::route_values_waited, me);
  // Those that no message brings.
  if (call.returns()) {
    std::fill_n(call.to, plan.header->tokens * std::int64_t{lane.context.config.top_k}, 0.0f);
  }
  for (std::int64_t row = 0; row < plan.header->total && !call.returns(); ++row) {
    const Source& source = plan.sources[row];
    if (source.rank < 0 || is_shared_slot(source.slot, lane.context.config.top_k)) call.to[row] = 0;
  }
  for (int peer = 0; peer < ranks; ++peer) read_values(lane, plan, call, peer);
  return {};
}

SmallResult run(Lane& lane, const DispatchCountsCall& call) {
  const Config& config = lane.context.config;
  const int me = lane.context.me(), ranks = lane.context.ranks();
  lane.link->begin(call.operation, {});
  // The summary of a dispatch, with N in place of its head.
  std::vector<std::int32_t> mine(static_cast<std::size_t>(kCallSummaryWords + config.experts + ranks));
  std::int32_t* const routes = mine.data() + kCallSummaryWords;
  mine[0] = call.tokens;
  dispatch_layout_on_host(
      {{.ids = call.ids, .tokens = call.tokens, .top_k = config.top_k, .placement = config.placement},
       {.tokens_per_rank = routes + config.experts, .routes_per_expert = routes}});
  for (int peer = 0; peer < ranks; ++peer)
    std::memcpy(lane.link->summary_to(peer), mine.data(), 4 * mine.size());
  lane.link->post(false);
  lane.link->wait();
  fault_point(FaultPoint::dispatch_waited, me);
  const std::int64_t most_tokens = config.max_tokens, most_routes = most_tokens * config.top_k;
  const std::vector<int>& experts = config.placement.experts_of(me);
  lane.routes.assign(static_cast<std::size_t>(local_slots_of(config, me)), 0);
  lane.tokens.clear();
  std::int64_t messages = 0;
  for (int peer = 0; peer < ranks; ++peer) {
    const auto* theirs = reinterpret_cast<const std::int32_t*>(lane.link->summary_from(peer));
    const auto told = [&](const char* name, int word, std::int64_t most) {
      const std::int32_t count = theirs[word];
      check_told(Operation::dispatch_counts, name, count, most, peer);
      return count;
    };
    lane.tokens.push_back(told("tokens", 0, most_tokens));
    if (config.input == Input::replicated && peer != me) continue;  // its tokens are this rank's
    for (std::size_t e = 0; e < experts.size(); ++e)
      lane.routes[e] += told("routes", kCallSummaryWords + experts[e], most_routes);
    messages += told("messages", kCallSummaryWords + config.experts + me, most_tokens);
  }
  return {.counts = {total_rows(config, me, call.tokens, messages, lane.routes), lane.routes, lane.tokens}};
}

// all_gather_v and reduce_scatter_v: rows of all ranks without routing.

namespace {

// Stores the bytes from `begin` on of this rank's blocks, up to `round_bytes` of each.
void stage_round(Lane& lane, const GatherRounds& rounds, std::int64_t begin, std::int64_t round_bytes) {
  const std::int64_t message_bytes = exchange_shape(lane.context.config, 0).message_bytes;
  if (lane.link->packs()) {
    std::vector<std::int64_t> reserved;
    for (const GatherRounds::Block& block : rounds.blocks()) {
      const std::int64_t bytes = bytes_in_round(block.bytes, begin, round_bytes);
      reserved.push_back((bytes + message_bytes - 1) / message_bytes * message_bytes);
    }
    lane.link->reserve(
        {.direction = Direction::to_experts, .message_bytes = message_bytes, .bytes = reserved});
  }
  for (int peer = 0; peer < lane.context.ranks(); ++peer) {
    const GatherRounds::Block& block = rounds.blocks()[static_cast<std::size_t>(peer)];
    const std::int64_t bytes = bytes_in_round(block.bytes, begin, round_bytes);
    if (bytes > 0) {
      lane.context.kernels.copy(lane.link->outgoing(Staging::dispatch, peer), block.data + begin, bytes,
                                Store::cached);
    }
  }
}

}  // namespace

SmallResult run(Lane& lane, const GatherCall& call) {
  const int me = lane.context.me();
  const std::int64_t round_bytes =
      lane.context.config.max_tokens * exchange_shape(lane.context.config, 0).message_bytes;
  const GatherRounds rounds = exchange_terms(*lane.link, call, lane.context.rank);
  for (std::int64_t begin = 0; begin < rounds.largest(); begin += round_bytes) {
    lane.link->begin(call.operation, {});
    fault_point(FaultPoint::gather_begin, me);
    stage_round(lane, rounds, begin, round_bytes);
    fault_point(FaultPoint::gather_sent, me);
    lane.link->post(false);
    fault_point(FaultPoint::gather_posted, me);
    lane.link->wait();
    fault_point(FaultPoint::gather_waited, me);
    rounds.receive(
        begin, round_bytes, [&](int source) { return lane.link->incoming(Staging::dispatch, source); },
        [&](std::byte* to, const std::byte* from, std::int64_t bytes) {
          lane.context.kernels.copy(to, from, bytes, Store::cached);
        },
        [&](const std::vector<const void*>& addends, std::byte* to, std::int64_t bytes) {
          lane.context.kernels.weighted_sum({.out = to,
                                             .out_type = call.type,
                                             .rows = addends.data(),
                                             .row_type = call.type,
                                             .combine_type = call.type,
                                             .count = static_cast<int>(addends.size()),
                                             .columns = bytes / bytes_of(call.type)});
        });
  }
  return {.gathered = rounds.gathered()};
}

}  // namespace ferry::cpu
