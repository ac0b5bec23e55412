#include "backends/reference/plan_storage.hpp"

#include <algorithm>
#include <set>

namespace ferry::reference {
namespace {

// The ranks that a token goes to, ascending: those of its experts, or with Transfer::gather all.
std::vector<int> destinations_of(const Config& config, const oracle::RowPositions& positions, int source,
                                 std::int64_t token) {
  std::set<int> ranks;
  if (config.transfer == Transfer::gather) {
    for (int rank = 0; rank < positions.size(); ++rank) ranks.insert(rank);
  }
  for (int slot = 0; slot < positions.top_k; ++slot)
    ranks.insert(positions.route(source, token, slot).destination);
  ranks.erase(-1);
  return {ranks.begin(), ranks.end()};
}

void write_routes(const oracle::GlobalInputs& inputs, const oracle::RowPositions& positions, int rank,
                  const PlanView& plan) {
  const std::vector<std::int64_t>& ids = inputs.ranks[rank].ids;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const oracle::RouteTarget& route = positions.routes[rank][i];
    plan.route_expert[i] = route.destination < 0 ? -1 : static_cast<std::int32_t>(ids[i]);
    plan.route_rank[i] = route.destination;
    plan.route_row[i] = static_cast<std::int32_t>(route.row);
  }
}

// Fills each token's list of destinations, and the list of tokens sent to each rank.
void write_send_lists(const oracle::GlobalInputs& inputs, const oracle::RowPositions& positions, int rank,
                      const PlanView& plan) {
  const std::int64_t max_tokens = inputs.config.max_tokens,
                     max_ranks = PlanShape{.ranks = positions.size(),
                                           .top_k = positions.top_k,
                                           .to_every_rank = inputs.config.transfer == Transfer::gather}
                                     .most_ranks();
  std::vector<std::int64_t> sent(positions.size());
  for (std::int64_t token = 0; token < positions.tokens(rank); ++token) {
    const std::vector<int> ranks = destinations_of(inputs.config, positions, rank, token);
    std::int32_t* list = plan.token_ranks + token * max_ranks;
    std::fill_n(list, max_ranks, -1);
    std::copy(ranks.begin(), ranks.end(), list);
    for (const int destination : ranks)
      plan.sent_tokens[destination * max_tokens + sent[destination]++] = static_cast<std::int32_t>(token);
  }
}

// Fills the entries of each message that `rank` receives from `source`.
void write_received_messages(const oracle::GlobalInputs& inputs, const oracle::RowPositions& positions,
                             int rank, int source, const PlanView& plan) {
  std::int64_t message = std::int64_t{source} * inputs.config.max_tokens;
  for (std::int64_t token = 0; token < positions.tokens(source); ++token) {
    const std::vector<int> ranks = destinations_of(inputs.config, positions, source, token);
    const auto position = std::find(ranks.begin(), ranks.end(), rank);
    if (position == ranks.end()) continue;
    plan.received_token[message] = static_cast<std::int32_t>(token);
    plan.received_position[message] = static_cast<std::int32_t>(position - ranks.begin());
    for (int slot = 0; slot < positions.top_k; ++slot) {
      const oracle::RouteTarget& route = positions.route(source, token, slot);
      plan.received_rows_of_message[message * positions.top_k + slot] =
          route.destination == rank ? static_cast<std::int32_t>(route.row) : -1;
    }
    ++message;
  }
}

}  // namespace

void write_plan(const oracle::GlobalInputs& inputs, const oracle::RowPositions& positions, int rank,
                const PlanView& plan) {
  std::copy(positions.counts.begin(), positions.counts.end(), plan.counts);
  std::copy(positions.tokens_between.begin(), positions.tokens_between.end(), plan.tokens_between);
  for (int source = 0; source < positions.size() && inputs.config.shared_experts > 0; ++source)
    plan.rank_tokens[source] = static_cast<std::int32_t>(positions.tokens(source));
  write_routes(inputs, positions, rank, plan);
  write_send_lists(inputs, positions, rank, plan);
  for (int source = 0; source < positions.size(); ++source)
    write_received_messages(inputs, positions, rank, source, plan);
  const std::vector<oracle::RowInfo>& rows = positions.ranks[rank].rows;
  for (std::size_t row = 0; row < rows.size(); ++row) plan.sources[row] = rows[row].source;
}

}  // namespace ferry::reference
