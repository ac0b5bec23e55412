#include "exchange/checks.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "exchange/sliced.hpp"
#include "ferry/error.hpp"
#include "format/encoding.hpp"
#include "layout/exchange_layout.hpp"
#include "plan/plan_checks.hpp"

namespace ferry {
namespace {

constexpr std::int64_t kAlign = 16;  // bytes of one access: rows start at multiples of it

bool aligned(const void* pointer, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(bytes) == 0;
}

// `name`: the argument's name in messages.
void check_type(const char* name, DType type) {
  if (const auto number = static_cast<int>(type); number < 0 || number > 2) {
    throw UsageError(str(name, ": type = ", number, ", must be 0 (bf16), 1 (fp16) or 2 (fp32)"));
  }
}

// `name`: the argument's name in messages, as parts, so that it is composed only when it is needed.
template <class... Name>
void check_address(int rank, const void* data, const Name&... name) {
  if (aligned(data, kAlign)) return;
  throw UsageError(str(name..., ": address ", data, " on rank ", rank, " is not a multiple of ", kAlign));
}

// Checks rows of `row_bytes` bytes each, `stride` bytes apart (0: dense).
void check_rows(const char* name, int rank, const void* data, std::int64_t stride, std::int64_t row_bytes) {
  if (data == nullptr) throw UsageError(str(name, ": the address is null on rank ", rank));
  check_address(rank, data, name);
  if (stride != 0 && (stride < row_bytes || stride % kAlign != 0)) {
    throw UsageError(str(name, ": stride = ", counted(stride, "byte"), " on rank ", rank,
                         ", must be 0 (dense), or at least the ", counted(row_bytes, "byte"),
                         " of a row and a multiple of ", kAlign));
  }
  if (stride == 0 && row_bytes % kAlign != 0) {
    throw UsageError(str(name, ": a row of ", counted(row_bytes, "byte"), " on rank ", rank,
                         " is no multiple of ", kAlign, ": pass a stride that is, or another type"));
  }
}

// The number of tokens, and the type of their ids.
void check_tokens(const Config& config, int rank, const char* call, const Ids& ids, std::int64_t tokens) {
  if (tokens < 0 || tokens > config.max_tokens) {
    throw UsageError(str(call, ": ", counted(tokens, "token"), " on rank ", rank, ", max_tokens is ",
                         config.max_tokens,
                         ": pass fewer tokens, or construct the exchange with a larger max_tokens"));
  }
  if (const auto number = static_cast<int>(ids.type); number < 0 || number > 1)
    throw UsageError(str("ids: type = ", number, ", must be 0 (int32) or 1 (int64)"));
}

void check_message_fits(const Config& config, const DispatchCall& call) {
  const PartList parts = message_parts(config, call);
  const std::string format = by_expert(call) ? to_string(call.tokens.type) : to_string(call.format);
  const std::int64_t largest = message_layout(parts_of(config.format, config.hidden), config.top_k).bytes;
  const std::int64_t needed = message_layout(parts, config.top_k).bytes;
  if (needed > largest) {
    // Tokens that travel as they are have the room of a format without tiles.
    const bool lacks_tiles =
        by_expert(call) && encoding_of(call.format).scale_tiles && call.memory.parts[1] == nullptr;
    throw UsageError(str("dispatch: a message of format ", format, " takes ", counted(needed, "byte"),
                         by_expert(call) ? " (with input_scales tokens travel as they are)" : "",
                         ", but the configuration's format ", to_string(config.format), " has room for ",
                         largest, ": construct the exchange with format = ", format,
                         lacks_tiles ? ", and pass memory.parts[1]" : ""));
  }
}

void check_row_arithmetic(const Config& config, int rank, const DispatchCall& call) {
  if (call.apply_weights || call.dot_rows != nullptr) {
    if (!call.format.value_type()) {
      throw UsageError(
          str("dispatch: apply_weights and dot_rows need format bf16, fp16 or fp32, this call's is ",
              to_string(call.format), ": choose one of them, or pass neither"));
    }
    if (!has_route_rows(config.layout)) {
      throw UsageError(
          str("dispatch: apply_weights and dot_rows need an expert layout, and the exchange's is ",
              to_string(config.layout),
              ", whose rows stand for several routes each: use expert_major or expert_padded"));
    }
  }
  if (call.weighted && call.weights == nullptr && call.tokens.count > 0) {
    throw UsageError(str("dispatch: ", call.apply_weights ? "apply_weights" : "weighted",
                         " needs weights for the ", counted(call.tokens.count, "token"), " of rank ", rank,
                         ", but weights is null"));
  }
}

void check_receive_buffers(const Config& config, int rank, const DispatchCall& call) {
  const PartList parts = received_parts(config, call);
  for (int p = 0; p < parts.count; ++p) {
    const void* part = call.memory.parts[static_cast<std::size_t>(p)];
    if (part == nullptr && !config.own_receive_buffers && row_capacity(config, rank) > 0) {
      throw UsageError(str("dispatch: own_receive_buffers is off, so memory.parts[", p,
                           "] must be passed; it is null on rank ", rank));
    }
    check_address(rank, part, "dispatch: memory of part ", p);
  }
  check_address(rank, call.memory.plan, "dispatch: memory of the plan");
  // The lane's memory has room for whole tiles of every group only if the configuration says so.
  if (encoding_of(call.format).scale_tiles && !encoding_of(config.format).scale_tiles &&
      call.memory.parts[1] == nullptr) {
    // An exchange of the call's format has no room for tokens that travel as they are.
    throw UsageError(str("dispatch: format ", to_string(call.format), " on rank ", rank,
                         ": the exchange has no memory for tiles, because its format is ",
                         to_string(config.format), ": pass memory.parts[1]",
                         by_expert(call) ? "" : ", or construct it with format = " + to_string(call.format)));
  }
  const std::int64_t rows = call.memory.rows;
  if (rows == 0) return;
  if (rows < 0)
    throw UsageError(str("dispatch: memory.rows = ", rows, " on rank ", rank, ", must be 0 or more"));
  if (config.layout == Layout::expert_padded || config.layout == Layout::expert_indexed ||
      encoding_of(call.format).scale_columns || encoding_of(call.format).scale_tiles ||
      call.dot_rows != nullptr) {
    throw UsageError(
        "dispatch: memory.rows is not supported with expert_padded, expert_indexed, scales in columns or "
        "tiles, or dot_rows: pass memory for the capacity");
  }
  const std::int64_t shared = config.shared_experts * shared_rows(config, rank, call.tokens.count).stride;
  if (rows < shared && call.plan.empty()) {
    throw UsageError(str("dispatch: memory.rows = ", rows, " on rank ", rank, ", must be ", shared,
                         " or more: the first ", counted(shared, "row"), " are those of the shared experts"));
  }
}

}  // namespace

void check_ids(const Config& config, int rank, const char* call, const Ids& ids, std::int64_t tokens) {
  check_tokens(config, rank, call, ids, tokens);
  if (tokens > 0 && ids.data == nullptr)
    throw UsageError(str(call, ": ids is null for the ", counted(tokens, "token"), " of rank ", rank));
}

void check_dispatch(const Config& config, int rank, const DispatchCall& call, PlanIn plan_in) {
  const std::int64_t tokens = call.tokens.count;
  check_tokens(config, rank, "dispatch", call.ids, tokens);
  check_type("tokens", call.tokens.type);
  check_format(call.format, config.hidden, call.tokens.type);
  check_tiles(config, call.format);
  const Encoding encoding = encoding_of(call.format);
  if (encoding.by_caller && call.format != config.format) {
    throw UsageError(str("dispatch: format ", to_string(call.format),
                         " of a registered encoder, but the exchange's is ", to_string(config.format),
                         ": construct the exchange with format = ", to_string(call.format)));
  }
  check_scales(config, rank, call);
  if (call.layer < 0 || call.layer >= config.layers) {
    throw UsageError(str("dispatch: layer = ", call.layer, " on rank ", rank, ", must be 0 to ",
                         config.layers - 1, ": Config::layers is ", config.layers));
  }
  check_message_fits(config, call);
  if (config.placement.tp() > 1) check_sliced_dispatch(call);
  check_row_arithmetic(config, rank, call);
  check_receive_buffers(config, rank, call);
  if (!call.plan.empty()) {
    check_plan(config, rank, call.plan, plan_in);
    if (plan_in == PlanIn::host && call.plan.tokens() != tokens) {
      throw UsageError(str("dispatch: ", counted(tokens, "token"), " on rank ", rank,
                           ", but its plan is for ", call.plan.tokens()));
    }
  }
  if (call.tokens.device_count != nullptr && plan_in == PlanIn::host) {
    throw UnsupportedError(
        "dispatch: this backend cannot read the number of tokens from device memory (device_count; in Python "
        "count): pass it on the host, in Python as that many tokens");
  }
  if (tokens == 0) return;
  if (call.plan.empty()) check_ids(config, rank, "dispatch", call.ids, tokens);
  const PartList parts = parts_of(call.format, config.hidden);
  for (int p = 0; p < parts.count; ++p) {
    const auto i = static_cast<std::size_t>(p);
    // Dispatch quantises values of another type, so the caller passes part 0 only, in that type.
    const bool quantised = call.format.quantises();
    const std::int64_t row_bytes =
        quantised ? config.hidden * bytes_of(call.tokens.type) : parts.part[p].row_bytes;
    if (quantised && p > 0) break;
    check_rows("tokens", rank, call.tokens.parts[i], call.tokens.strides[i], row_bytes);
  }
}

namespace {

// Names the fields in which a plan's shape differs from this exchange's. The header holds everything else
// that decides row positions as one hash, in which no difference can be named.
std::string difference(const PlanShape& of_plan, const PlanShape& of_exchange) {
  const auto differ = [](const char* name, std::int64_t plan, std::int64_t exchange) {
    return plan == exchange ? std::string() : str("; ", name, " = ", plan, " there, ", exchange, " here");
  };
  return str(differ("ranks", of_plan.ranks, of_exchange.ranks),
             differ("experts", of_plan.experts, of_exchange.experts),
             differ("top_k", of_plan.top_k, of_exchange.top_k),
             differ("max_tokens", of_plan.max_tokens, of_exchange.max_tokens),
             differ("shared_experts", of_plan.shared_experts, of_exchange.shared_experts),
             differ("to_every_rank (transfer = gather)", of_plan.to_every_rank, of_exchange.to_every_rank),
             differ("largest capacity", of_plan.capacity, of_exchange.capacity));
}

}  // namespace

void check_number(Operation operation, int rank, std::int32_t number, std::int32_t most) {
  if (number >= 0 && number <= most) return;
  throw UsageError(
      str(to_string(operation), ": a count of ", number, " on rank ", rank, ", must be 0 to ", most));
}

void check_plan(const Config& config, int rank, const Plan& plan, PlanIn plan_in) {
  if (config.placement.tp() > 1 || config.placement.has_replicas())
    return check_plan(inner_config(config), rank, plan, plan_in);
  const PlanShape shape = plan_shape(config);
  const auto bytes = static_cast<std::size_t>(view_plan(nullptr, shape).bytes);
  if (plan.empty()) throw UsageError(str("plan: empty on rank ", rank, ": pass the plan of a dispatch"));
  if (plan.bytes() < bytes) {
    PlanHeader header{};
    const bool readable = plan_in == PlanIn::host && plan.bytes() >= sizeof header;
    if (readable) std::memcpy(&header, plan.storage(), sizeof header);
    throw UsageError(str("plan: storage of ", counted(plan.bytes(), "byte"), ", this exchange's plans take ",
                         bytes, is_intact(header) ? difference(header.shape, shape) : ""));
  }
  check_address(rank, plan.storage(), "plan: storage");
  if (plan_in == PlanIn::device) return;
  const PlanHeader& header = *static_cast<const PlanHeader*>(plan.storage());
  if (!is_intact(header)) {
    throw UsageError(
        str("plan: unfinished or damaged on rank ", rank, ": the checksum of its header is wrong"));
  }
  check_plan_call(plan, header);
  if (header.config_hash != row_order_hash(config)) {
    throw UsageError(str("plan: made on rank ", header.rank,
                         " by an exchange of another configuration or placement, used on rank ", rank,
                         difference(header.shape, shape)));
  }
  if (header.rank != rank) {
    throw UsageError(str("plan: made on rank ", header.rank, ", used on rank ", rank));
  }
  const std::int64_t capacity = row_capacity(config, rank);
  if (header.shape != shape || header.tokens < 0 || header.tokens > config.max_tokens || header.total < 0 ||
      header.total > capacity) {
    throw UsageError(str("plan: damaged on rank ", rank, ": its header says ",
                         counted(header.tokens, "token"), " and ", counted(header.total, "row"),
                         ", must be 0 to ", config.max_tokens, " and 0 to ", capacity,
                         difference(header.shape, shape)));
  }
}

namespace {

// An array of the caller with an entry for each of `count` units.
struct NeededArray {
  const char* name;
  const void* data;
  std::int64_t count;
  const char* unit;
};
void require_given(Operation operation, int rank, const NeededArray& array, const char* remedy = "") {
  if (array.data != nullptr || array.count == 0) return;
  throw UsageError(str(to_string(operation), ": ", array.name, " is null for the ",
                       counted(array.count, array.unit), " of rank ", rank, remedy));
}

// unreduced on a rank that has a result needs them, because it adds nothing.
void check_shared_outputs(const Config& config, int rank, const CombineCall& call) {
  if (call.shared_outputs == nullptr) {
    if (config.shared_experts == 0 || call.reduction != Reduction::unreduced || call.result.data == nullptr)
      return;
    throw UsageError(str("combine: unreduced adds nothing: pass shared_outputs for the ",
                         config.shared_experts, " shared experts of rank ", rank));
  }
  if (config.shared_experts == 0)
    throw UsageError(str("combine: shared_outputs on rank ", rank, ", but shared_experts is 0: pass none"));
  check_rows("shared_outputs", rank, call.shared_outputs, 0, config.hidden * bytes_of(call.result.type));
}

void check_epilogue(const Config& config, int rank, const CombineCall& call) {
  if (call.epilogue.empty()) return;
  if (call.reduction == Reduction::unreduced)
    throw UsageError(str("combine: unreduced has no epilogue, rank ", rank, " gives one: pass none"));
  if (call.epilogue.residual == nullptr) return;
  check_rows("residual", rank, call.epilogue.residual, call.epilogue.stride,
             config.hidden * bytes_of(call.result.type));
}

}  // namespace

void check_combine(const Config& config, int rank, const CombineCall& call, bool split, PlanIn plan_in) {
  check_plan(config, rank, call.plan, plan_in);
  if (config.placement.tp() > 1) check_sliced_combine(call);
  check_type("outputs", call.outputs.type);
  check_type("result", call.result.type);
  if (const auto number = static_cast<int>(call.reduction); number < 0 || number > 2) {
    throw UsageError(
        str("combine: reduction = ", number, ", must be 0 (partial), 1 (exact) or 2 (unreduced)"));
  }
  const bool returns_every_row = call.reduction != Reduction::partial;
  if (returns_every_row && config.input == Input::replicated) {
    throw UsageError(
        str("combine: reduction ", to_string(call.reduction),
            ": replicated input has the reduction partial only, because each rank has only its own rows"));
  }
  if (returns_every_row && config.transfer == Transfer::gather) {
    throw UsageError(
        str("combine: reduction ", to_string(call.reduction),
            ": transfer = gather has the reduction partial only, because each rank returns one sum "
            "for a token"));
  }
  if (returns_every_row && config.reduction == Reduction::partial) {
    throw UsageError(str("combine: ", to_string(call.reduction), " needs more staging than the configured ",
                         to_string(config.reduction),
                         ": construct the exchange with reduction = ", to_string(call.reduction)));
  }
  check_epilogue(config, rank, call);
  if (config.layout == Layout::rank_major) {
    if (returns_every_row || call.row_weights != nullptr || call.topk_weighted ||
        call.row_values != nullptr || call.route_values != nullptr) {
      throw UsageError(
          "combine: rank_major takes partial without weights, row_values and route_values: its rows are sums "
          "over a token's local experts");
    }
  }
  if (call.row_weights != nullptr && call.topk_weighted) {
    throw UsageError("combine: row_weights and topk_weights exclude each other: pass one of them");
  }
  if (call.reduction == Reduction::unreduced && (call.row_weights != nullptr || call.topk_weighted)) {
    throw UsageError("combine: unreduced returns rows as they are: pass no weights");
  }
  if (split && call.weights_travel()) {
    throw UsageError("combine: the split form of partial takes no topk_weights: pass row_weights");
  }
  if (call.outputs.data != nullptr) {
    check_rows("outputs", rank, call.outputs.data, call.outputs.stride,
               config.hidden * bytes_of(call.outputs.type));
    if (call.outputs.rows < 0)
      throw UsageError(
          str("combine: outputs.rows = ", call.outputs.rows, " on rank ", rank, ", must be 0 or more"));
  }
  if (call.result.data != nullptr) {
    check_rows("result", rank, call.result.data, call.result.stride,
               config.hidden * bytes_of(call.result.type));
    if (call.result.rows < 0)
      throw UsageError(
          str("combine: result.rows = ", call.result.rows, " on rank ", rank, ", must be 0 or more"));
  }
  check_shared_outputs(config, rank, call);
  if (plan_in == PlanIn::device) return;
  if (call.topk_weighted && call.topk_weights == nullptr && call.plan.tokens() > 0) {
    throw UsageError(str("combine: topk_weighted needs topk_weights for the ",
                         counted(call.plan.tokens(), "token"), " of rank ", rank,
                         ", but topk_weights is null"));
  }
  if (config.placement.tp() > 1) return;  // its backend knows the tokens and rows of a rank
  constexpr const char* kRemedy = ": pass it, or call return_values() for row_values alone";
  require_given(Operation::combine, rank, {"outputs", call.outputs.data, call.plan.total(), "row"}, kRemedy);
  require_given(Operation::combine, rank, {"result", call.result.data, call.plan.tokens(), "token"}, kRemedy);
  const std::int64_t written =
      call.plan.tokens() * (call.reduction == Reduction::unreduced ? config.top_k : 1);
  if (call.result.data != nullptr && call.result.rows > 0 && call.result.rows < written) {
    throw UsageError(str("combine: result.rows = ", call.result.rows, " on rank ", rank,
                         ", whose result has ", counted(written, "row"), ": pass memory for them"));
  }
  const bool gives_row_values = call.row_values != nullptr;
  if (call.plan.total() > 0 && call.plan.tokens() > 0 && gives_row_values != (call.route_values != nullptr)) {
    throw UsageError(str("combine: row_values and route_values must be given together, rank ", rank,
                         " gives only ", gives_row_values ? "row_values" : "route_values"));
  }
}

void check_route_values(const Config& config, int rank, const RouteValuesCall& call, PlanIn plan_in) {
  check_plan(config, rank, call.plan, plan_in);
  if (config.layout == Layout::rank_major) {
    throw UsageError(
        str(to_string(call.operation), ": rank_major is not supported: its rows stand for several routes"));
  }
  if (plan_in == PlanIn::device) return;
  const void *of_rows = call.returns() ? call.from : call.to,
             *of_routes = call.returns() ? call.to : call.from;
  const char* const name = call.returns() ? "route_values" : "values";
  require_given(call.operation, rank, {name, of_routes, call.plan.tokens(), "token"});
  require_given(call.operation, rank, {"row_values", of_rows, call.plan.total(), "row"});
}

namespace {

void check_global_scale(const DispatchCall& call) {
  if (call.global_scale == nullptr || encoding_of(call.format).takes_global_scale()) return;
  throw UsageError(
      str("dispatch: global_scale is for the format nvfp4 without a scale for each token, this call's is ",
          to_string(call.format), ": pass none"));
}

// The blocks of mxfp8 have a power of two of their own, so the scale of an expert need not fit its values.
const char* advised_scale(const Encoding& encoding) {
  if (encoding.is_mx()) return "pass 1, with which rows are those without input_scales";
  return encoding.is_two_level() ? "pass the expert's largest |x| / 2688"
                                 : "pass the expert's largest |x| / 448";
}

// The scales of this rank's experts: the others are not read here. Kernels check those in device memory.
void check_scale_values(const Config& config, int rank, const DispatchCall& call) {
  const auto check = [&](int expert) {
    const float scale = call.input_scales[static_cast<std::size_t>(expert)];
    if (scale > 0 && std::isfinite(scale)) return;
    throw UsageError(str("dispatch: input_scales[", expert, "] = ", scale, " on rank ", rank,
                         ", must be positive and finite: ", advised_scale(encoding_of(call.format))));
  };
  for (const int expert : config.placement.experts_of(rank)) check(expert);
  for (int shared = 0; shared < config.shared_experts; ++shared) check(config.experts + shared);
}

void check_input_scales(const Config& config, int rank, const DispatchCall& call) {
  if (!by_expert(call)) return;
  if (!encoding_of(call.format).takes_input_scales()) {
    throw UsageError(
        str("dispatch: input_scales are for the formats fp8 (without options), mxfp8 and nvfp4 "
            "(without a scale for each token), this call's is ",
            to_string(call.format), ": pass none"));
  }
  if (!has_route_rows(config.layout)) {
    throw UsageError(str("dispatch: input_scales need an expert layout, and the exchange's is ",
                         to_string(config.layout),
                         ", whose rows stand for several experts each: use expert_major or expert_padded, or "
                         "pass none"));
  }
  if (call.global_scale != nullptr)
    throw UsageError("dispatch: input_scales and global_scale exclude each other: pass one of them");
  const std::int64_t expected = std::int64_t{config.experts} + config.shared_experts;
  if (static_cast<std::int64_t>(call.input_scales.size()) != expected) {
    throw UsageError(str("dispatch: input_scales has ", counted(call.input_scales.size(), "value"),
                         " on rank ", rank, ", must have one for each of the ", expected,
                         " experts, shared ones included"));
  }
  if (call.input_scales.data() == nullptr)
    throw UsageError(str("dispatch: input_scales: the address is null on rank ", rank, ": pass ", expected,
                         " values, or an empty span"));
  if (config.memory == MemoryKind::host) check_scale_values(config, rank, call);
}

}  // namespace

bool by_expert(const DispatchCall& call) {
  return call.input_scales.data() != nullptr || !call.input_scales.empty();
}

bool marks_bad_scales(const Format& format) {
  return encoding_of(format).marks_bad_scales();
}

PartList message_parts(const Config& config, const DispatchCall& call) {
  return by_expert(call) ? value_parts(call.tokens.type, config.hidden)
                         : parts_of(call.format, config.hidden);
}

PartList received_parts(const Config& config, const DispatchCall& call) {
  return by_expert(call) ? parts_by_expert(call.format, config.hidden) : parts_of(call.format, config.hidden);
}

void check_scales(const Config& config, int rank, const DispatchCall& call) {
  check_global_scale(call);
  check_input_scales(config, rank, call);
}

namespace {

std::string describe(const Overflow& overflow, const Config& config) {
  const Config of_rows = inner_config(config);
  if (overflow.capacity < group_capacity(of_rows, overflow.rank)) {
    return str("dispatch: memory.rows = ", overflow.capacity, " on rank ", overflow.rank, ", which is sent ",
               counted(overflow.needed, "row"), "; not stored on all ranks together: ", overflow.dropped,
               "; pass memory for the rows that dispatch_counts() tells, or allow_truncation");
  }
  const bool by_expert = config.layout == Layout::expert_padded;
  const char* unit = config.layout == Layout::rank_major ? "rows"
                     : config.shared_experts > 0         ? "routes and shared rows"
                                                         : "routes";
  // The default capacity has room for any routing, unless a token lists an expert twice.
  const std::string remedy =
      config.capacity == 0
          ? "some token lists an expert more than once: configure repeats = true, with which the default "
            "capacity has room for that"
          : str("configure capacity = ", overflow.needed,
                " or more; 0 has room for any routing, with repeats = "
                "true also for tokens that list an expert more than once");
  return str("capacity of ", counted(overflow.capacity, "row"), by_expert ? " for each expert" : "",
             " exceeded: ", by_expert ? "the fullest expert of " : "", "rank ", overflow.rank, " needs ",
             overflow.needed, "; ", unit, " dropped on all ranks: ", overflow.dropped, "; ", remedy);
}

std::string describe(const BadScale& bad) {
  if (!bad.scale) {  // device backends do not tell the format either
    return str(
        "dispatch: on rank ", bad.rank,
        " global_scale (or with input_scales a scale of an expert) is not positive and finite, or so "
        "large that the scale of a block of nvfp4 overflows: with nvfp4 pass largest finite |x| / 2688, "
        "with fp8 largest |x| / 448, with mxfp8 1; the blocks of nvfp4 concerned have scale 7F and "
        "values 0");
  }
  const bool usable = *bad.scale > 0 && std::isfinite(*bad.scale);
  return str("dispatch: ", bad.expert < 0 ? "global_scale" : str("input_scales[", bad.expert, "]"), " = ",
             *bad.scale, " on rank ", bad.rank,
             usable ? " is so large that the scale of a block overflows" : ", must be positive and finite",
             ": pass largest finite |x| / 2688", bad.expert < 0 ? ", or choose nvfp4-token" : "",
             "; the blocks concerned have scale 7F and values 0");
}

std::string describe(const CallDiagnostics& diagnostics, const Config& config) {
  std::string text;
  auto add = [&](const std::string& part) { text += text.empty() ? part : "; " + part; };
  if (diagnostics.overflow.dropped > 0) add(describe(diagnostics.overflow, config));
  if (const BadId& b = diagnostics.bad_id; b.count > 0) {
    add(str("dispatch: ", counted(b.count, "expert id"), " out of range, must be -1 (masked) to ",
            config.experts - 1, "; the first on rank ", b.rank, ", token ", b.token, ", slot ", b.slot,
            ": id ", b.id, "; skipped"));
  }
  if (const BadSource& b = diagnostics.bad_source; b.count > 0) {
    add(str(b.count, " entries of the plan on rank ", b.rank, " point outside the exchange",
            ", the first at index ", b.index, "; they were skipped: the plan is damaged"));
  }
  if (diagnostics.bad_scale.rank >= 0) add(describe(diagnostics.bad_scale));
  return text;
}

}  // namespace

void raise(const CallDiagnostics& found, const Config& config) {
  if (found.overflow.dropped > 0) throw OverflowError(describe(found, config), found.overflow);
  if (found.bad_id.count > 0) throw BadIdError(describe(found, config), found.bad_id);
  if (found.bad_source.count > 0) throw BadSourceError(describe(found, config), found.bad_source);
  if (found.bad_scale.rank >= 0) throw UsageError(describe(found, config));
}

}  // namespace ferry
