#include "max/returned_rows.hpp"

#include <algorithm>
#include <bit>
#include <tuple>

#include "base/text.hpp"
#include "exchange/source_fault.hpp"
#include "ferry/error.hpp"
#include "ferry/max.hpp"
#include "layout/plan_layout.hpp"
#include "plan/planning.hpp"
#include "plan/shapes.hpp"

namespace ferry::max {
namespace {

constexpr const char* kRemedy = "; pass what dispatch returned";

// No NaN, and not 0.
float tag_of(std::uint64_t combine, std::int32_t expert) {
  constexpr std::uint64_t kNumbers = 2039;  // below it the exponent is not all ones
  constexpr int kExpertBits = 20;
  return std::bit_cast<float>(static_cast<std::uint32_t>((combine % kNumbers + 1) << kExpertBits) |
                              static_cast<std::uint32_t>(expert));
}

// A row of an expert of this rank.
struct RoutedRow {
  std::int32_t source, token, slot, row, expert;
};

class ReturnPlanner {
 public:
  ReturnPlanner(const Config& config, int rank, const ReturnedRows& rows, const PlanView& plan)
      : config_(config),
        me_(rank),
        ranks_(static_cast<std::size_t>(config.placement.ranks())),
        shared_(static_cast<std::size_t>(config.shared_experts)),
        experts_(config.placement.experts_of(rank)),
        rows_(rows),
        plan_(plan) {}

  void run() {
    check_tokens();
    check_lengths();
    check_row_offsets();
    write_header();
    BadId bad;  // the dispatch has reported it
    plan_sends(config_, me_, rows_.topk_ids, static_cast<int>(rows_.tokens), plan_, bad);
    read_rows();
    write_messages();
    write_routes();
  }

  std::int64_t total() const { return rows_.row_offsets.back(); }
  const std::vector<RoutedRow>& routed() const { return routed_; }

 private:
  std::int32_t count(std::size_t group, std::size_t source) const {
    return rows_.counts[group * ranks_ + source];
  }

  [[noreturn]] void wrong(SourceFault fault, const SourceFaultNumbers& numbers) const {
    throw UsageError(text_of(fault, me_, numbers));
  }

  void check_tokens() const;
  void check_lengths() const;
  void check_row_offsets();
  void write_header();
  void read_rows();
  void read_group(std::size_t group, std::int64_t row);
  void read_shared_row(std::size_t group, std::int64_t row, std::int32_t token);
  void read_routed_row(std::size_t group, std::size_t source, std::int64_t row);
  void write_messages();
  void write_routes();

  const Config& config_;
  int me_;
  std::size_t ranks_, shared_;
  const std::vector<int>& experts_;
  const ReturnedRows& rows_;
  PlanView plan_;
  GroupIndex index_;
  std::vector<RoutedRow> routed_;
};

void ReturnPlanner::check_tokens() const {
  if (rows_.tokens < 0 || rows_.tokens > config_.max_tokens)
    wrong(SourceFault::tokens, {.a = rows_.tokens, .b = config_.max_tokens});
  if (rows_.tokens > 0 && rows_.topk_ids.data == nullptr)
    throw UsageError(str("topk_ids is null for ", counted(rows_.tokens, "token")));
}

void ReturnPlanner::check_lengths() const {
  const std::size_t groups = shared_ + experts_.size();
  if (rows_.counts.size() != groups * ranks_) {
    throw UsageError(str("counts has ", rows_.counts.size(), " entries, must have ", groups, " x ", ranks_,
                         ", groups x ranks", kRemedy));
  }
  const std::int64_t most = std::int64_t{config_.max_tokens} * config_.top_k;
  for (std::size_t i = 0; i < rows_.counts.size(); ++i) {
    if (rows_.counts[i] < 0 || rows_.counts[i] > most) {
      wrong(SourceFault::counts, {.a = static_cast<std::int64_t>(i / ranks_),
                                  .b = static_cast<std::int64_t>(i % ranks_),
                                  .c = rows_.counts[i],
                                  .d = most});
    }
    if (i / ranks_ >= shared_) continue;
    const std::int64_t own = i % ranks_ == static_cast<std::size_t>(me_) ? rows_.tokens : 0;
    if (rows_.counts[i] != own) {
      wrong(SourceFault::shared_counts, {.limit = rows_.tokens,
                                         .a = static_cast<std::int64_t>(i / ranks_),
                                         .b = static_cast<std::int64_t>(i % ranks_),
                                         .c = rows_.counts[i],
                                         .d = own});
    }
  }
}

void ReturnPlanner::check_row_offsets() {
  std::vector<std::int32_t> of_group;
  const std::int64_t capacity = row_capacity(config_, me_);
  for (std::size_t group = 0; group < shared_ + experts_.size(); ++group) {
    std::int64_t sum = 0;
    for (std::size_t source = 0; source < ranks_; ++source) sum += count(group, source);
    if (sum > capacity) {
      throw UsageError(str("counts of group ", group, " add up to ", sum, " rows, rank ", me_,
                           " receives at most ", capacity, kRemedy));
    }
    of_group.push_back(static_cast<std::int32_t>(sum));
  }
  index_ = group_index(of_group, config_.alignment);
  const std::size_t length = index_.row_offsets.size();
  if (rows_.row_offsets.size() != length) {
    throw UsageError(
        str("row_offsets has ", rows_.row_offsets.size(), " entries, counts give ", length, kRemedy));
  }
  for (std::size_t i = 0; i < length; ++i) {
    if (rows_.row_offsets[i] != index_.row_offsets[i]) {
      wrong(SourceFault::row_offsets,
            {.a = static_cast<std::int64_t>(i), .b = rows_.row_offsets[i], .c = index_.row_offsets[i]});
    }
  }
  if (total() > capacity) {
    wrong(SourceFault::capacity, {.a = total(), .b = capacity});
  }
  if (rows_.src_info.size() < static_cast<std::size_t>(2 * total())) {
    throw UsageError(
        str("src_info has ", rows_.src_info.size() / 2, " rows, row_offsets say ", total(), kRemedy));
  }
}

void ReturnPlanner::write_header() {
  *plan_.header = {.magic = kPlanMagic,
                   .config_hash = row_order_hash(config_),
                   .placement_version = config_.placement.version(),
                   .call = 0,
                   .shape = plan_shape(config_),
                   .rank = me_,
                   .tokens = static_cast<std::int32_t>(rows_.tokens),
                   .total = total(),
                   .dropped = 0,
                   .check = 0};
  plan_.header->check = header_check(*plan_.header);
}

void ReturnPlanner::read_rows() {
  std::fill_n(plan_.sources, total(), Source{});
  for (std::size_t i = 0; i < index_.expert_ids.size(); ++i)
    read_group(static_cast<std::size_t>(index_.expert_ids[i]), index_.row_offsets[i]);
}

void ReturnPlanner::read_group(std::size_t group, std::int64_t row) {
  for (std::size_t source = 0; source < ranks_; ++source) {
    for (std::int32_t i = 0; i < count(group, source); ++i, ++row) {
      if (group < shared_) {
        read_shared_row(group, row, i);
      } else {
        read_routed_row(group, source, row);
      }
    }
  }
}

// Shared rows are the rank's own tokens in order.
void ReturnPlanner::read_shared_row(std::size_t group, std::int64_t row, std::int32_t token) {
  const Source source{.rank = me_, .token = token, .slot = config_.top_k + static_cast<std::int32_t>(group)};
  const std::int32_t* const info = rows_.src_info.data() + 2 * row;
  if (info[0] != source.token || info[1] != source.slot) {
    wrong(SourceFault::shared_row,
          {.limit = source.token, .a = row, .b = source.slot, .c = info[0], .d = info[1]});
  }
  plan_.sources[row] = source;
}

void ReturnPlanner::read_routed_row(std::size_t group, std::size_t source, std::int64_t row) {
  const std::int32_t token = rows_.src_info[static_cast<std::size_t>(2 * row)],
                     slot = rows_.src_info[static_cast<std::size_t>(2 * row + 1)];
  const bool own = source == static_cast<std::size_t>(me_);
  const std::int64_t most = own ? rows_.tokens : config_.max_tokens;
  if (token < 0 || token >= most || slot < 0 || slot >= config_.top_k) {
    wrong(SourceFault::info, {.peer = static_cast<int>(source),
                              .limit = most,
                              .a = row,
                              .b = config_.top_k,
                              .c = token,
                              .d = slot});
  }
  const std::int32_t expert = experts_[group - shared_];
  if (own && plan_.route_expert[std::int64_t{token} * config_.top_k + slot] != expert) {
    wrong(SourceFault::other_expert, {.a = row, .b = expert, .c = token, .d = slot});
  }
  plan_.sources[row] = {.rank = static_cast<std::int32_t>(source), .token = token, .slot = slot};
  routed_.push_back({.source = static_cast<std::int32_t>(source),
                     .token = token,
                     .slot = slot,
                     .row = static_cast<std::int32_t>(row),
                     .expert = expert});
}

// A source rank's rows return in the order of its tokens and slots, in one message for each token.
void ReturnPlanner::write_messages() {
  const auto place = [](const RoutedRow& row) { return std::tuple(row.source, row.token, row.slot); };
  std::ranges::sort(routed_, {}, place);
  const auto twice = std::ranges::adjacent_find(routed_, {}, place);
  if (twice != routed_.end()) {
    wrong(SourceFault::twice, {.peer = twice->source,
                               .a = std::max(twice->row, twice[1].row),
                               .b = std::min(twice->row, twice[1].row),
                               .c = twice->token,
                               .d = twice->slot});
  }
  for (std::size_t source = 0; source < ranks_; ++source)
    plan_.tokens_between[source * ranks_ + static_cast<std::size_t>(me_)] = 0;
  std::int32_t source = -1, token = -1;
  std::int64_t message = -1;
  for (const RoutedRow& row : routed_) {
    if (row.source != source || row.token != token) {
      source = row.source;
      token = row.token;
      std::int32_t& sent =
          plan_.tokens_between[static_cast<std::size_t>(source) * ranks_ + static_cast<std::size_t>(me_)];
      message = std::int64_t{source} * config_.max_tokens + sent++;
      plan_.received_token[message] = token;
      plan_.received_position[message] = 0;  // of sums only
      std::fill_n(plan_.received_rows_of_message + message * config_.top_k, config_.top_k, -1);
    }
    plan_.received_rows_of_message[message * config_.top_k + row.slot] = row.row;
  }
}

void ReturnPlanner::write_routes() {
  const std::int64_t routes = rows_.tokens * config_.top_k;
  for (std::int64_t route = 0; route < routes; ++route) {
    const std::int32_t destination = plan_.route_rank[route];
    plan_.route_row[route] = destination == -1 || destination == me_ ? -1 : kRowOfPeer;
  }
  for (const RoutedRow& row : routed_) {
    if (row.source == me_) plan_.route_row[std::int64_t{row.token} * config_.top_k + row.slot] = row.row;
  }
  for (std::int64_t route = 0; route < routes; ++route) {
    if (plan_.route_rank[route] != me_ || plan_.route_row[route] >= 0) continue;
    wrong(SourceFault::missing,
          {.a = plan_.route_expert[route], .c = route / config_.top_k, .d = route % config_.top_k});
  }
}

}  // namespace

void plan_return(const Config& config, int rank, const ReturnedRows& rows, std::uint64_t combine,
                 const PlanView& plan, ReturnTags& tags) {
  ReturnPlanner planner(config, rank, rows, plan);
  planner.run();
  tags.rows.assign(static_cast<std::size_t>(planner.total()), 0.0f);
  for (const RoutedRow& row : planner.routed())
    tags.rows[static_cast<std::size_t>(row.row)] = tag_of(combine, row.expert);
  tags.routes.assign(static_cast<std::size_t>(rows.tokens * config.top_k), 0.0f);
  for (std::size_t route = 0; route < tags.routes.size(); ++route) {
    const std::int32_t expert = plan.route_expert[route];
    if (expert >= 0) tags.routes[route] = tag_of(combine, expert);
  }
}

void check_returned(const Config& config, const PlanView& plan, const ReturnTags& tags,
                    std::span<const float> returned) {
  const auto bits = [](float tag) { return std::bit_cast<std::uint32_t>(tag); };
  for (std::size_t route = 0; route < tags.routes.size(); ++route) {
    const bool expected = plan.route_rank[route] != -1;
    if (!expected || bits(returned[route]) == bits(tags.routes[route])) continue;
    const auto top_k = static_cast<std::size_t>(config.top_k);
    throw UsageError(text_of(SourceFault::not_returned, plan.header->rank,
                             {.peer = plan.route_rank[route],
                              .a = plan.route_expert[route],
                              .c = static_cast<std::int64_t>(route / top_k),
                              .d = static_cast<std::int64_t>(route % top_k)}));
  }
}

}  // namespace ferry::max
