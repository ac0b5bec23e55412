#include "max/host_operations.hpp"

#include <algorithm>
#include <bit>
#include <span>
#include <tuple>
#include <vector>

#include "base/text.hpp"
#include "exchange/source_operations.hpp"
#include "ferry/error.hpp"
#include "ferry/max.hpp"
#include "plan/planning.hpp"
#include "plan/shapes.hpp"

namespace ferry::max {
namespace {

constexpr const char* kRemedy = "; pass what dispatch returned";

std::int64_t id_at(const Ids& ids, std::int64_t route) {
  return ids.type == IdType::int64 ? static_cast<const std::int64_t*>(ids.data)[route]
                                   : static_cast<const std::int32_t*>(ids.data)[route];
}

// The shape of this rank's arrays, by the names of a device's lane.
struct HostLane {
  int rank, ranks, groups, shared_experts, shared_split;
  Input input;
  std::int32_t top_k, max_tokens;
  std::int64_t capacity_rows;
};

// A row of an expert of this rank.
struct RoutedRow {
  std::int32_t source, token, slot, row, expert;
};

class ReturnPlanner {
 public:
  ReturnPlanner(const Config& config, int rank, const PlanReturnCall& call)
      : config_(config),
        lane_{.rank = rank,
              .ranks = config.placement.ranks(),
              .groups = static_cast<int>(groups_of(config, rank)),
              .shared_experts = config.shared_experts,
              .shared_split = config.shared_split,
              .input = config.input,
              .top_k = config.top_k,
              .max_tokens = config.max_tokens,
              .capacity_rows = row_capacity(config, rank)},
        experts_(config.placement.experts_of(rank)),
        call_(call),
        tokens_(call.device_tokens != nullptr ? *call.device_tokens : call.tokens),
        plan_(view_plan(call.plan.storage(), plan_shape(config))) {}

  void run() {
    check_tokens();
    check_counts();
    place_groups();
    check_row_offsets();
    write_header();
    BadId bad;  // the dispatch has reported it
    plan_sends(config_, lane_.rank, call_.ids, static_cast<int>(tokens_), plan_, bad);
    read_rows();
    write_messages();
    write_routes();
  }

 private:
  ReturnedRows<HostLane> rows() const {
    return {lane_,
            call_,
            tokens_,
            static_cast<std::int32_t>(experts_.size()),
            group_first_.data(),
            segment_first_.data(),
            plan_.route_expert};
  }
  std::int64_t total() const { return group_first_.back(); }
  std::int32_t expert_of(int group) const {
    return experts_[static_cast<std::size_t>(group - lane_.shared_experts)];
  }
  [[noreturn]] void wrong(SourceFault fault, std::int64_t index) const {
    const auto numbers = rows().numbers_of(fault, index, [&](int group) { return expert_of(group); });
    throw UsageError(text_of(fault, lane_.rank, numbers));
  }

  void check_tokens() const;
  void check_counts() const;
  void place_groups();
  void check_row_offsets() const;
  void write_header();
  void read_rows();
  void write_messages();
  void write_routes();

  const Config& config_;
  const HostLane lane_;
  const std::vector<int>& experts_;
  const PlanReturnCall& call_;
  const std::int64_t tokens_;
  PlanView plan_;
  GroupIndex index_;
  std::vector<std::int32_t> group_first_, segment_first_;
  std::vector<RoutedRow> routed_;
};

void ReturnPlanner::check_tokens() const {
  if (tokens_ < 0 || tokens_ > config_.max_tokens) wrong(SourceFault::tokens, 0);
  if (tokens_ > 0 && call_.ids.data == nullptr)
    throw UsageError(str("topk_ids is null for ", counted(tokens_, "token")));
}

void ReturnPlanner::check_counts() const {
  const std::int64_t entries = std::int64_t{lane_.groups} * lane_.ranks;
  if (call_.lengths.counts != entries) {
    throw UsageError(str("counts has ", call_.lengths.counts, " entries, must have ", lane_.groups, " x ",
                         lane_.ranks, ", groups x ranks", kRemedy));
  }
  for (int i = 0; i < entries; ++i)
    if (const SourceFault fault = rows().fault_of_count(i); fault != SourceFault::none) wrong(fault, i);
}

void ReturnPlanner::place_groups() {
  std::vector<std::int32_t> of_group;
  for (int group = 0; group < lane_.groups; ++group) {
    const std::int64_t sum = rows().rows_of_group(group);
    if (sum > lane_.capacity_rows) {
      throw UsageError(str("counts of group ", group, " add up to ", sum, " rows, rank ", lane_.rank,
                           " receives at most ", lane_.capacity_rows, kRemedy));
    }
    of_group.push_back(static_cast<std::int32_t>(sum));
  }
  index_ = group_index(of_group, config_.alignment);
  auto first = index_.row_offsets.begin();
  for (int group = 0; group < lane_.groups; ++group) {
    auto row = static_cast<std::int32_t>(*first);
    group_first_.push_back(row);
    for (int source = 0; source < lane_.ranks; ++source) {
      segment_first_.push_back(row);
      row += call_.counts[group * lane_.ranks + source];
    }
    if (of_group[static_cast<std::size_t>(group)] > 0) ++first;
  }
  group_first_.push_back(static_cast<std::int32_t>(*first));
}

void ReturnPlanner::check_row_offsets() const {
  const auto length = static_cast<std::int64_t>(index_.row_offsets.size());
  if (call_.lengths.row_offsets != length) {
    throw UsageError(
        str("row_offsets has ", call_.lengths.row_offsets, " entries, counts give ", length, kRemedy));
  }
  for (std::int64_t i = 0; i < length; ++i)
    if (call_.row_offsets[i] != index_.row_offsets[static_cast<std::size_t>(i)])
      wrong(SourceFault::row_offsets, i);
  if (total() > lane_.capacity_rows) wrong(SourceFault::capacity, 0);
  if (call_.lengths.src_info < 2 * total()) {
    throw UsageError(
        str("src_info has ", call_.lengths.src_info / 2, " rows, row_offsets say ", total(), kRemedy));
  }
}

void ReturnPlanner::write_header() {
  *plan_.header = {.magic = kPlanMagic,
                   .config_hash = row_order_hash(config_),
                   .placement_version = config_.placement.version(),
                   .call = 0,
                   .shape = plan_shape(config_),
                   .rank = lane_.rank,
                   .tokens = static_cast<std::int32_t>(tokens_),
                   .total = total(),
                   .dropped = 0,
                   .check = 0};
  plan_.header->check = header_check(*plan_.header);
}

void ReturnPlanner::read_rows() {
  std::fill_n(plan_.sources, total(), Source{});
  std::fill_n(call_.row_tags, total(), 0.0f);
  for (int segment = 0; segment < lane_.groups * lane_.ranks; ++segment) {
    const int group = segment / lane_.ranks, source = segment % lane_.ranks;
    if (call_.counts[segment] == 0) continue;
    const std::int32_t expert = group < lane_.shared_experts ? -1 : expert_of(group);
    for (std::int32_t i = 0; i < call_.counts[segment]; ++i) {
      const std::int32_t row = segment_first_[static_cast<std::size_t>(segment)] + i;
      const std::int32_t token = call_.src_info[2 * row], slot = call_.src_info[2 * row + 1];
      const SourceFault fault = rows().fault_of_row({group, source, token, slot, i}, expert);
      if (fault != SourceFault::none) wrong(fault, row);
      plan_.sources[row] = {.rank = source, .token = token, .slot = slot};
      if (expert < 0) continue;  // rows of shared experts are the rank's own tokens in order
      call_.row_tags[row] = std::bit_cast<float>(return_tag(call_.combine, expert));
      routed_.push_back({.source = source, .token = token, .slot = slot, .row = row, .expert = expert});
    }
  }
}

// A source rank's rows return in the order of its tokens and slots, in one message for each token.
void ReturnPlanner::write_messages() {
  const auto place = [](const RoutedRow& row) { return std::tuple(row.source, row.token, row.slot); };
  std::ranges::sort(routed_, {}, place);
  const auto twice = std::ranges::adjacent_find(routed_, {}, place);
  if (twice != routed_.end()) wrong(SourceFault::twice, std::max(twice->row, twice[1].row));
  const auto sent_by = [&](int source) -> std::int32_t& {
    return plan_.tokens_between[std::int64_t{source} * lane_.ranks + lane_.rank];
  };
  for (int source = 0; source < lane_.ranks; ++source) sent_by(source) = 0;
  std::int32_t source = -1, token = -1;
  std::int64_t message = -1;
  for (const RoutedRow& row : routed_) {
    if (row.source != source || row.token != token) {
      source = row.source;
      token = row.token;
      message = std::int64_t{source} * config_.max_tokens + sent_by(source)++;
      plan_.received_token[message] = token;
      plan_.received_position[message] = 0;  // of sums only
      std::fill_n(plan_.received_rows_of_message + message * config_.top_k, config_.top_k, -1);
    }
    plan_.received_rows_of_message[message * config_.top_k + row.slot] = row.row;
  }
}

void ReturnPlanner::write_routes() {
  const std::int64_t routes = tokens_ * config_.top_k;
  for (std::int64_t route = 0; route < routes; ++route) {
    const std::int32_t destination = plan_.route_rank[route];
    plan_.route_row[route] = destination == -1 || destination == lane_.rank ? -1 : kRowOfPeer;
  }
  for (const RoutedRow& row : routed_)
    if (row.source == lane_.rank)
      plan_.route_row[std::int64_t{row.token} * config_.top_k + row.slot] = row.row;
  for (std::int64_t route = 0; route < routes; ++route)
    if (plan_.route_rank[route] == lane_.rank && plan_.route_row[route] < 0)
      wrong(SourceFault::missing, route);
}

}  // namespace

void HostOperations::keep_ids(const KeepIdsCall& call) {
  for (std::int64_t route = 0; route < call.tokens * config_.top_k; ++route)
    call.kept_ids[route] = id_at(call.ids, route);
  *call.kept_tokens = static_cast<std::int32_t>(call.tokens);
}

void HostOperations::describe_rows(const DescribeRowsCall& call) {
  const ferry::DispatchResult& received = call.received;
  const std::span<const std::int32_t> routes = received.plan.counts();
  const int ranks = config_.placement.ranks();
  int number = 0;
  std::uint32_t most = 0;
  for (int group = 0; group < received.groups; ++group) {
    const std::int32_t count = received.counts[group], expert = received.group_expert[group];
    for (int source = 0; source < ranks; ++source) {
      const bool routed = expert >= 0 && expert < config_.experts;  // else shared, or an empty slot
      const std::int32_t own = source == me_ ? count : 0;
      call.counts[group * ranks + source] =
          routed ? routes[static_cast<std::size_t>(source * config_.experts + expert)] : own;
    }
    most = std::max(most, static_cast<std::uint32_t>(count));
    if (count == 0) continue;
    call.row_offsets[number] = static_cast<std::uint32_t>(received.row_offsets[group]);
    call.expert_ids[number++] = group;
  }
  call.row_offsets[number] = static_cast<std::uint32_t>(*received.total);
  call.expert_usage_stats[0] = most;
  call.expert_usage_stats[1] = static_cast<std::uint32_t>(number);
  for (std::int64_t row = 0; row < *received.total; ++row) {
    call.src_info[2 * row] = received.source[row].token;
    call.src_info[2 * row + 1] = received.source[row].slot;
  }
}

void HostOperations::plan_return(const PlanReturnCall& call) {
  ReturnPlanner(config_, me_, call).run();
}

void HostOperations::check_returned(const CheckReturnedCall& call) {
  const PlanView plan = view_plan(call.plan.storage(), plan_shape(config_));
  const std::int64_t top_k = config_.top_k;
  for (std::int64_t route = 0; route < plan.header->tokens * top_k; ++route) {
    if (plan.route_rank[route] == -1) continue;
    const std::uint32_t expected = return_tag(call.combine, plan.route_expert[route]);
    if (std::bit_cast<std::uint32_t>(call.returned[route]) == expected) continue;
    raise_source_fault(SourceFault::not_returned, me_,
                       {.peer = plan.route_rank[route],
                        .a = plan.route_expert[route],
                        .c = route / top_k,
                        .d = route % top_k});
  }
}

}  // namespace ferry::max
