#include "backends/reference/plan_storage.hpp"

#include <algorithm>
#include <set>

namespace ferry::reference {
namespace {

// Ranks with an expert of a token, ascending.
std::vector<int> ranks_of(const oracle::Places& places, int source, std::int64_t token) {
  std::set<int> ranks;
  for (int slot = 0; slot < places.top_k; ++slot) ranks.insert(places.route(source, token, slot).destination);
  ranks.erase(-1);
  return {ranks.begin(), ranks.end()};
}

void write_routes(const oracle::World& world, const oracle::Places& places, int rank, const PlanView& plan) {
  const std::vector<std::int64_t>& ids = world.ranks[rank].ids;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const oracle::RoutePlace& route = places.routes[rank][i];
    plan.route_expert[i] = route.destination < 0 ? -1 : static_cast<std::int32_t>(ids[i]);
    plan.route_rank[i] = route.destination;
    plan.route_row[i] = static_cast<std::int32_t>(route.row);
  }
}

// Each token's list of ranks, and the tokens sent to every rank.
void write_send_lists(const oracle::World& world, const oracle::Places& places, int rank,
                      const PlanView& plan) {
  const std::int64_t most_tokens = world.config.max_tokens,
                     most_ranks = std::min(places.top_k, places.size());
  std::vector<std::int64_t> sent(places.size());
  for (std::int64_t token = 0; token < places.tokens(rank); ++token) {
    const std::vector<int> ranks = ranks_of(places, rank, token);
    std::int32_t* list = plan.token_ranks + token * most_ranks;
    std::fill_n(list, most_ranks, -1);
    std::copy(ranks.begin(), ranks.end(), list);
    for (const int to : ranks)
      plan.sent_tokens[to * most_tokens + sent[to]++] = static_cast<std::int32_t>(token);
  }
}

// What comes from one source, message by message.
void write_came(const oracle::World& world, const oracle::Places& places, int rank, int source,
                const PlanView& plan) {
  std::int64_t message = std::int64_t{source} * world.config.max_tokens;
  for (std::int64_t token = 0; token < places.tokens(source); ++token) {
    const std::vector<int> ranks = ranks_of(places, source, token);
    const auto here = std::find(ranks.begin(), ranks.end(), rank);
    if (here == ranks.end()) continue;
    plan.came_token[message] = static_cast<std::int32_t>(token);
    plan.came_position[message] = static_cast<std::int32_t>(here - ranks.begin());
    for (int slot = 0; slot < places.top_k; ++slot) {
      const oracle::RoutePlace& route = places.route(source, token, slot);
      plan.came_rows[message * places.top_k + slot] =
          route.destination == rank ? static_cast<std::int32_t>(route.row) : -1;
    }
    ++message;
  }
}

}  // namespace

void write_plan(const oracle::World& world, const oracle::Places& places, int rank, const PlanView& plan) {
  std::copy(places.counts.begin(), places.counts.end(), plan.counts);
  std::copy(places.tokens_between.begin(), places.tokens_between.end(), plan.tokens_between);
  write_routes(world, places, rank, plan);
  write_send_lists(world, places, rank, plan);
  for (int source = 0; source < places.size(); ++source) write_came(world, places, rank, source, plan);
  const std::vector<oracle::PlacedRow>& rows = places.ranks[rank].rows;
  for (std::size_t row = 0; row < rows.size(); ++row) plan.sources[row] = rows[row].source;
}

}  // namespace ferry::reference
