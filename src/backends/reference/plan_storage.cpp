#include "backends/reference/plan_storage.hpp"

#include <algorithm>
#include <set>

namespace ferry::reference {
namespace {

// Ranks with an expert of a token, ascending.
std::vector<int> ranks_of(const oracle::RowPositions& positions, int source, std::int64_t token) {
  std::set<int> ranks;
  for (int slot = 0; slot < positions.top_k; ++slot)
    ranks.insert(positions.route(source, token, slot).destination);
  ranks.erase(-1);
  return {ranks.begin(), ranks.end()};
}

void write_routes(const oracle::GlobalInputs& global, const oracle::RowPositions& positions, int rank,
                  const PlanView& plan) {
  const std::vector<std::int64_t>& ids = global.ranks[rank].ids;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const oracle::RouteTarget& route = positions.routes[rank][i];
    plan.route_expert[i] = route.destination < 0 ? -1 : static_cast<std::int32_t>(ids[i]);
    plan.route_rank[i] = route.destination;
    plan.route_row[i] = static_cast<std::int32_t>(route.row);
  }
}

// Each token's list of ranks, and the tokens sent to every rank.
void write_send_lists(const oracle::GlobalInputs& global, const oracle::RowPositions& positions, int rank,
                      const PlanView& plan) {
  const std::int64_t most_tokens = global.config.max_tokens,
                     most_ranks = std::min(positions.top_k, positions.size());
  std::vector<std::int64_t> sent(positions.size());
  for (std::int64_t token = 0; token < positions.tokens(rank); ++token) {
    const std::vector<int> ranks = ranks_of(positions, rank, token);
    std::int32_t* list = plan.token_ranks + token * most_ranks;
    std::fill_n(list, most_ranks, -1);
    std::copy(ranks.begin(), ranks.end(), list);
    for (const int to : ranks)
      plan.sent_tokens[to * most_tokens + sent[to]++] = static_cast<std::int32_t>(token);
  }
}

// What comes from one source, message by message.
void write_came(const oracle::GlobalInputs& global, const oracle::RowPositions& positions, int rank,
                int source, const PlanView& plan) {
  std::int64_t message = std::int64_t{source} * global.config.max_tokens;
  for (std::int64_t token = 0; token < positions.tokens(source); ++token) {
    const std::vector<int> ranks = ranks_of(positions, source, token);
    const auto here = std::find(ranks.begin(), ranks.end(), rank);
    if (here == ranks.end()) continue;
    plan.came_token[message] = static_cast<std::int32_t>(token);
    plan.came_position[message] = static_cast<std::int32_t>(here - ranks.begin());
    for (int slot = 0; slot < positions.top_k; ++slot) {
      const oracle::RouteTarget& route = positions.route(source, token, slot);
      plan.came_rows[message * positions.top_k + slot] =
          route.destination == rank ? static_cast<std::int32_t>(route.row) : -1;
    }
    ++message;
  }
}

}  // namespace

void write_plan(const oracle::GlobalInputs& global, const oracle::RowPositions& positions, int rank,
                const PlanView& plan) {
  std::copy(positions.counts.begin(), positions.counts.end(), plan.counts);
  std::copy(positions.tokens_between.begin(), positions.tokens_between.end(), plan.tokens_between);
  write_routes(global, positions, rank, plan);
  write_send_lists(global, positions, rank, plan);
  for (int source = 0; source < positions.size(); ++source) write_came(global, positions, rank, source, plan);
  const std::vector<oracle::RowInfo>& rows = positions.ranks[rank].rows;
  for (std::size_t row = 0; row < rows.size(); ++row) plan.sources[row] = rows[row].source;
}

}  // namespace ferry::reference
