// The layout expert_indexed: every token is stored once, in the order of rank_major, and positions index the
// rows.
#include <algorithm>
#include <numeric>

#include "backends/cpu/dispatch.hpp"

namespace ferry::cpu {

bool Dispatch::keeps_all_own_tokens() const {
  return context_.config.layout == Layout::expert_indexed && context_.config.shared_experts > 0;
}

// The tokens of this rank that have a row here: those of its messages to itself, then with shared experts all
// others.
void Dispatch::list_own_tokens() {
  const std::int32_t tokens = plan_.header->tokens;
  const std::int32_t* const sent =
      plan_.sent_tokens + std::int64_t{context_.me()} * context_.config.max_tokens;
  own_tokens_.assign(sent, sent + lane_.message_count(plan_, context_.me(), context_.me()));
  std::vector<bool> listed(static_cast<std::size_t>(tokens));
  for (const std::int32_t token : own_tokens_)
    if (token >= 0 && token < tokens) listed[static_cast<std::size_t>(token)] = true;
  for (std::int32_t token = 0; token < tokens; ++token)
    if (!listed[static_cast<std::size_t>(token)]) own_tokens_.push_back(token);
  // A damaged plan may list a token twice.
  own_tokens_.resize(std::min(own_tokens_.size(), static_cast<std::size_t>(tokens)));
}

// What follows from the counts alone. Messages fill in the positions of routed experts.
void Dispatch::prepare_index() {
  const Config& config = context_.config;
  if (config.layout != Layout::expert_indexed) return;
  const int ranks = context_.ranks(), me = context_.me();
  const auto ints = [&](std::int64_t offset) { return lane_.array<std::int32_t>(offset); };
  std::int32_t* const offsets = ints(lane_.arrays.source_offsets);
  offsets[0] = 0;
  for (int source = 0; source < ranks; ++source) {
    const bool all = source == me && keeps_all_own_tokens();
    offsets[source + 1] =
        offsets[source] + (all ? plan_.header->tokens : plan_.tokens_between[source * ranks + me]);
  }
  std::int32_t* const index = ints(lane_.arrays.index);
  std::int32_t* const slot = ints(lane_.arrays.slot);
  const SharedRows shared = shared_rows(config, me, plan_.header->tokens);
  for (std::int32_t expert = 0; expert < config.shared_experts; ++expert) {
    for (std::int32_t token = 0; token < plan_.header->tokens; ++token) {
      const std::int64_t position = shared.row(expert, token);
      if (position < 0 || position >= plan_.header->total) continue;
      index[position] = offsets[me] + token;
      slot[position] = config.top_k + expert;
    }
  }
  std::int32_t* const block_group = ints(lane_.arrays.block_group);
  std::fill_n(block_group, row_capacity(config, me) / config.alignment, -1);
  for (int group = 0; group < result_.groups; ++group) {
    std::fill(block_group + result_.row_offsets[group] / config.alignment,
              block_group + result_.row_offsets[group + 1] / config.alignment, group);
  }
  result_.index = index;
  result_.slot = slot;
  result_.block_group = block_group;
  result_.source_offsets = offsets;
  result_.row_total = offsets + ranks;
  result_.row_capacity = row_room(config, me).rows;
  result_.source = lane_.array<Source>(lane_.arrays.source);
}

// Stores the token of message `i` of a source in its one row. `rows` [K]: the positions of its slots; null:
// it has shared experts only.
void Dispatch::write_indexed_row(int source, std::int64_t i, std::int32_t token_number,
                                 const TokenData& token, const std::int32_t* rows) {
  const bool by_number = source == context_.me() && keeps_all_own_tokens();
  const auto row = result_.source_offsets[source] + (by_number ? token_number : static_cast<std::int32_t>(i));
  lane_.array<Source>(lane_.arrays.source)[row] = {source, token_number, -1};
  write_parts(token, &row, 1);
  for (int slot = 0; slot < context_.config.top_k && rows != nullptr; ++slot) {
    const std::int32_t position = rows[slot];
    if (position == -1 ||
        !lane_.valid_entry(position, plan_.header->total, rows - plan_.received_rows_of_message + slot))
      continue;
    lane_.array<std::int32_t>(lane_.arrays.index)[position] = row;
    lane_.array<std::int32_t>(lane_.arrays.slot)[position] = slot;
    if (result_.weight != nullptr) const_cast<float*>(result_.weight)[position] = token.weights[slot];
  }
}

}  // namespace ferry::cpu
