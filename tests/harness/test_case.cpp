#include "harness/test_case.hpp"

#include <algorithm>

#include "base/text.hpp"
#include "harness/own_format.hpp"
#include "oracle/row_positions.hpp"

namespace ferry::contract {
namespace {

struct Shape {
  int max_tokens, top_k, hidden_div_16;
};

Shape draw_shape(Random& random, CaseSize size) {
  switch (size) {
    case CaseSize::many_routes: {
      const int top_k = random.pick({4, 6, 8, 16});
      return {(1024 + top_k - 1) / top_k + random.below(16), top_k, random.between(1, 4)};
    }
    case CaseSize::wide:
      return {random.between(1, 3), random.pick({1, 2, 4, 6}),
              random.pick({128, 168, 180, 256, 320, 448, 464})};
    case CaseSize::small:
      break;
  }
  return {random.between(1, 24), random.pick({1, 1, 2, 3, 4, 6, 8, 16, 32}), random.between(1, 20)};
}

// Scales of blocks of 16 or 32 columns as rows, columns or tiles.
void draw_scale_layout(Random& random, bool& column_major, bool& tiles) {
  column_major = random.chance(0.3);
  tiles = !column_major && random.chance(0.5);
}

Format draw_mx(Random& random, Format format) {
  format.mx.rule = random.pick({MxRule::up, MxRule::ocp});
  draw_scale_layout(random, format.mx.column_major, format.mx.tiles);
  return format;
}

Format draw_nvfp4(Random& random) {
  Format format = Format::nvfp4({.per_token = random.chance(0.5)});
  draw_scale_layout(random, format.nvfp4_options.column_major, format.nvfp4_options.tiles);
  return format;
}

Format draw_format(Random& random) {
  switch (random.below(15)) {
    case 0:
    case 1:
      return Format::bf16();
    case 2:
      return Format::fp16();
    case 3:
      return Format::fp32();
    case 4:
      return Format::fp8_e4m3();
    case 5:
      return Format::fp8_e4m3({.column_major = true});
    case 6:
      return Format::fp8_e4m3({.column_major = random.chance(0.5), .power_of_two = true});
    case 7:
      return Format::fp8_e4m3({.column_major = random.chance(0.5), .power_of_two = true, .packed = true});
    case 8:
    case 9:
      return draw_mx(random, Format::mxfp8());
    case 10:
      return draw_mx(random, Format::mxfp4());
    case 11:
    case 12:
      return draw_nvfp4(random);
    default:
      break;
  }
  Format format = Format::raw({16});
  for (int part = 0, parts = random.between(1, kMaxParts); part < parts; ++part) {
    format.part_bytes[part] = 16 * random.between(1, 20);
  }
  return format;
}

void draw_capacity(Random& random, TestCase& c) {
  Config& config = c.config;
  if (c.duplicates) config.repeats = random.chance(0.7);
  if (!random.chance(0.3)) return;
  const std::int64_t largest = std::int64_t{c.ranks} * config.max_tokens * config.top_k + config.alignment;
  config.capacity = std::int64_t{1 + random.below(largest / config.alignment)} * config.alignment;
}

void draw_combine(Random& random, TestCase& c) {
  const auto type = [&] { return random.pick({DType::bf16, DType::bf16, DType::fp16, DType::fp32}); };
  c.config.combine_type = type();
  c.outputs = random.chance(0.7) ? c.config.combine_type : type();
  c.result = type();
  c.output_gap = random.chance(0.3) ? 16 * random.between(1, 4) : 0;
  c.result_gap = random.chance(0.3) ? 16 * random.between(1, 4) : 0;
  c.weights_from = WeightsFrom::none;
  if (c.config.layout == Layout::rank_major) return;
  c.reduction = random.pick({Reduction::partial, Reduction::partial, Reduction::exact, Reduction::unreduced});
  c.config.reduction =
      c.reduction == Reduction::partial && random.chance(0.3) ? Reduction::exact : c.reduction;
  c.row_values = random.chance(0.4);
  if (c.reduction == Reduction::unreduced) return;
  const bool topk_weights_refused = c.split_phases && c.reduction == Reduction::partial;
  c.weights_from = random.pick(
      {WeightsFrom::none, WeightsFrom::row_weights, WeightsFrom::row_weights, WeightsFrom::topk_weights});
  if (c.weights_from == WeightsFrom::row_weights && !c.weighted) c.weights_from = WeightsFrom::none;
  if (c.weights_from == WeightsFrom::topk_weights && topk_weights_refused) c.weights_from = WeightsFrom::none;
}

// Lowers the capacity until the rows that one rank can receive fit 8 MiB.
void bound_memory(TestCase& c) {
  constexpr std::int64_t kMaxBytes = 8 << 20;
  const std::int64_t row_bytes = 4 * c.config.hidden + 64;
  for (int rank = 0; rank < c.ranks; ++rank) {
    const bool padded = c.config.layout == Layout::expert_padded;
    const std::int64_t groups =
        padded ? c.config.shared_experts + oracle::expert_groups(c.config, c.config.placement, rank) : 1;
    const std::int64_t rows = oracle::capacity_of(c.config, c.config.placement, rank) * groups;
    if (rows * row_bytes <= kMaxBytes) continue;
    const std::int64_t fit =
        std::max<std::int64_t>(kMaxBytes / row_bytes / std::max<std::int64_t>(groups, 1), 1);
    c.config.capacity = (fit + c.config.alignment - 1) / c.config.alignment * c.config.alignment;
  }
}

}  // namespace

DType natural_type(const Format& format) {
  return format.value_type().value_or(DType::bf16);
}

Placement draw_placement(Random& random, int experts, int ranks) {
  if (random.chance(0.4)) return Placement::blocks(experts, ranks);
  const bool one_rank_only = random.chance(0.1);
  const int used = one_rank_only ? 1 : random.between(std::max(1, ranks - 2), ranks);
  std::vector<int> ranks_used(ranks);
  for (int r = 0; r < ranks; ++r) ranks_used[r] = r;
  random.shuffle(ranks_used);
  std::vector<std::vector<int>> held(ranks);
  for (int e = 0; e < experts; ++e) held[ranks_used[random.below(used)]].push_back(e);
  std::vector<ExpertLocation> positions(experts);
  for (int r = 0; r < ranks; ++r) {
    random.shuffle(held[r]);
    for (std::size_t local = 0; local < held[r].size(); ++local)
      positions[held[r][local]] = {r, static_cast<int>(local)};
  }
  return Placement::table(positions, ranks, random.next());
}

Placement draw_replicas(Random& random, int experts, int ranks) {
  std::vector<std::vector<int>> held(ranks);
  std::vector<int> order(ranks);
  for (int r = 0; r < ranks; ++r) order[r] = r;
  for (int e = 0; e < experts; ++e) {
    random.shuffle(order);
    const int replicas = random.chance(0.5) ? 1 : random.between(1, std::min(ranks, 5));
    for (int i = 0; i < replicas; ++i) held[order[i]].push_back(e);
  }
  for (std::vector<int>& experts_of_rank : held) random.shuffle(experts_of_rank);
  return Placement::replicas(held, experts, random.next());
}

TestCase draw_case(std::uint64_t seed, CaseSize size) {
  Random random(seed);
  TestCase c;
  c.seed = seed;
  c.ranks = random.pick({1, 2, 3, 4, 8});
  const Shape shape = draw_shape(random, size);
  Config& config = c.config;
  config.max_tokens = shape.max_tokens;
  config.top_k = shape.top_k;
  config.hidden = 16 * shape.hidden_div_16;
  config.experts = std::max(
      {c.ranks, config.top_k, random.pick({c.ranks, 2 * c.ranks + random.below(5), 8 * c.ranks, 32, 256})});
  config.placement = draw_placement(random, config.experts, c.ranks);
  config.layout =
      random.pick({Layout::expert_major, Layout::expert_padded, Layout::rank_major, Layout::expert_indexed});
  const bool indexed = config.layout == Layout::expert_indexed;
  const bool route_rows = !indexed && config.layout != Layout::rank_major;
  if (config.layout != Layout::rank_major) {
    config.alignment = random.chance(0.5) ? 1 : random.pick({2, 4, 8, 16, 32, 64, 128, 7});
  }
  config.zero_padding = !indexed && random.chance(0.4);
  config.format = draw_format(random);
  if (!route_rows) config.format.mx.tiles = config.format.nvfp4_options.tiles = false;
  if (config.format.kind == FormatKind::nvfp4 && !config.format.nvfp4_options.per_token)
    c.global_scale = random.pick({1.0f, 0.0123f, 2.5e-3f});
  if (config.format.kind == FormatKind::mxfp4 || config.format.kind == FormatKind::nvfp4)
    config.hidden = (config.hidden + 31) / 32 * 32;
  c.own_format = random.chance(0.08);
  if (c.own_format) config.format = own_format_as_raw(config.hidden);
  config.lanes = random.pick({1, 1, 2, 3});
  c.lane = random.below(config.lanes);

  c.routing = random.pick(
      {Routing::uniform, Routing::uniform, Routing::skewed, Routing::one_expert, Routing::one_rank});
  c.masked = random.pick({0.0, 0.0, 0.1, 0.3});
  c.masked_tokens = random.pick({0.0, 0.0, 0.2});
  c.bad_ids = random.chance(0.1) ? 0.05 : 0;
  c.duplicates = random.chance(0.3);
  c.full = size == CaseSize::many_routes || random.chance(0.3);
  c.ids = random.pick({IdType::int32, IdType::int64});
  c.type = config.format.quantises() || c.own_format ? random.pick({DType::bf16, DType::fp16, DType::fp32})
                                                     : natural_type(config.format);
  c.any_bits = random.chance(0.2);
  c.weighted = random.chance(0.8);
  c.input_gap = random.chance(0.3) ? 16 * random.between(1, 5) : 0;
  c.split_phases = random.chance(0.3);
  c.caller_memory = random.chance(0.7);
  const bool typed = config.format.value_type().has_value();
  if (typed && route_rows) {
    c.apply_weights = c.weighted && random.chance(0.3);
    c.dots = random.chance(0.3);
  }
  draw_capacity(random, c);
  draw_combine(random, c);
  if (random.chance(0.3)) {
    for (int rank = 0; rank < c.ranks; ++rank) c.nodes.push_back(random.below(3));
    config.reduction_level =
        random.pick({ReductionLevel::automatic, ReductionLevel::rank, ReductionLevel::node});
  }
  if (random.chance(0.3) && config.layout != Layout::rank_major &&
      (c.own_format || !config.format.is_raw())) {
    config.shared_experts = random.pick({1, 1, 2, 5});
    c.shared_outputs = c.reduction == Reduction::unreduced || random.chance(0.3);
  }
  if (config.reduction == Reduction::partial && !indexed && random.chance(0.15)) {
    config.input = Input::replicated;
    config.reduction_level = ReductionLevel::automatic;
    config.shared_split = config.shared_experts > 0 ? random.between(0, c.ranks) : 0;
  }
  if (config.reduction == Reduction::partial && config.input == Input::own && route_rows &&
      random.chance(0.2)) {
    config.transfer = Transfer::gather;
    config.reduction_level = ReductionLevel::automatic;
  }
  const bool by_expert = config.format == Format::fp8_e4m3() || config.format.kind == FormatKind::mxfp8 ||
                         (config.format.kind == FormatKind::nvfp4 && !config.format.nvfp4_options.per_token);
  if (by_expert && route_rows && random.chance(0.4)) {
    c.input_scales = true;
    c.global_scale = 1;
    c.caller_memory = c.caller_memory || config.format.mx.tiles || config.format.nvfp4_options.tiles;
  }
  if (random.chance(0.3))
    config.local_slots = std::max(config.placement.most_local_experts(), 1) + random.below(4);
  bound_memory(c);
  return c;
}

void give_replicas(Random& random, TestCase& c) {
  c.config.placement = draw_replicas(random, c.config.experts, c.ranks);
  if (c.config.local_slots > 0)
    c.config.local_slots = std::max(c.config.local_slots, c.config.placement.most_local_experts());
  bound_memory(c);
}

Config exchange_config(const TestCase& c) {
  Config config = c.config;
  if (c.own_format) config.format = own_format();
  if (!c.input_scales) return config;
  config.format = c.type == DType::fp32   ? Format::fp32()
                  : c.type == DType::fp16 ? Format::fp16()
                                          : Format::bf16();
  return config;
}

std::string describe(const TestCase& c) {
  const Config& g = c.config;
  std::string text = str("seed ", c.seed, ": ", to_string(g.backend), " R=", c.ranks, " E=", g.experts,
                         " K=", g.top_k, " H=", g.hidden, " T=", g.max_tokens, " ", to_string(g.layout),
                         " alignment=", g.alignment, " capacity=", g.capacity, " ", to_string(g.format),
                         " from ", to_string(c.type), ", ", to_string(c.reduction), " ", to_string(c.outputs),
                         "->", to_string(g.combine_type), "->", to_string(c.result));
  const auto flag = [&](bool set, const char* name) { text += set ? str(" ", name) : std::string(); };
  if (!c.nodes.empty()) text += str(" level=", to_string(g.reduction_level), " nodes=");
  for (const int node : c.nodes) text += std::to_string(node);
  flag(g.repeats, "repeats");
  flag(g.zero_padding, "zero_padding");
  flag(c.duplicates, "duplicates");
  flag(c.sm_limit == 1, "one_block");
  flag(c.split_phases, "split");
  flag(c.caller_memory, "caller_memory");
  flag(c.weighted, "weighted");
  flag(c.apply_weights, "apply_weights");
  flag(c.dots, "dots");
  flag(c.row_values, "values");
  if (g.shared_experts > 0) text += str(" S=", g.shared_experts);
  flag(c.shared_outputs, "shared_outputs");
  if (g.placement.has_replicas()) text += str(" P=", g.placement.total_replicas());
  flag(g.input == Input::replicated, "replicated");
  flag(g.transfer == Transfer::gather, "gather");
  if (g.shared_split > 0) text += str(" split=", g.shared_split);
  if (g.local_slots > 0) text += str(" slots=", g.local_slots);
  flag(c.own_format, "own_format");
  flag(c.input_scales, "input_scales");
  flag(c.any_bits, "any_bits");
  flag(c.bad_ids > 0, "bad_ids");
  flag(c.ids == IdType::int64, "int64");
  flag(c.weights_from == WeightsFrom::topk_weights, "topk_weights");
  flag(c.weights_from == WeightsFrom::row_weights, "row_weights");
  return text;
}

}  // namespace ferry::contract
