#include "exchange/checks.hpp"

#include <cstdint>
#include <cstring>

#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "format/parts.hpp"
#include "layout/message.hpp"

namespace ferry {
namespace {

constexpr std::int64_t kAlign = 16;  // of rows, in bytes: what one access moves

bool aligned(const void* pointer, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(bytes) == 0;
}

void check_type(const char* what, DType type) {
  if (const auto number = static_cast<int>(type); number < 0 || number > 2) {
    throw UsageError(str(what, ": no type has the number ", number));
  }
}

// `what`: its name, in pieces, put together if it is needed.
template <class... What>
void check_address(int rank, const void* data, const What&... what) {
  if (aligned(data, kAlign)) return;
  throw UsageError(
      str(what..., ": at address ", data, " on rank ", rank, ", must be at a multiple of ", kAlign));
}

// Rows of `row_bytes`, `stride` apart (0: dense), that are read or written.
void check_rows(const char* what, int rank, const void* data, std::int64_t stride, std::int64_t row_bytes) {
  if (data == nullptr) throw UsageError(str(what, ": no memory given on rank ", rank));
  check_address(rank, data, what);
  if (stride != 0 && (stride < row_bytes || stride % kAlign != 0)) {
    throw UsageError(str(what, ": stride = ", stride, " bytes for rows of ", row_bytes, " on rank ", rank,
                         ", must be at least that and a multiple of ", kAlign));
  }
}

void check_message_fits(const Config& config, const Format& format) {
  const std::int64_t largest = message_layout(parts_of(config.format, config.hidden), config.top_k).bytes;
  const std::int64_t wanted = message_layout(parts_of(format, config.hidden), config.top_k).bytes;
  if (wanted > largest) {
    throw UsageError(str("dispatch: a message of format ", to_string(format), " takes ", wanted,
                         " bytes, the configuration (", to_string(config.format), ") has ", largest));
  }
}

void check_weighing(const Config& config, int rank, const DispatchCall& call) {
  const bool typed = call.format.kind != FormatKind::fp8_e4m3 && call.format.kind != FormatKind::raw;
  if ((call.apply_weights || call.dot_rows != nullptr) && !typed) {
    throw UsageError(
        str("dispatch: rows of format ", to_string(call.format), " cannot be weighed or multiplied"));
  }
  if ((call.apply_weights || call.dot_rows != nullptr) && config.layout == Layout::rank_major) {
    throw UsageError("dispatch: a rank_major row stands for several routes: it has no one weight");
  }
  if (call.apply_weights && call.weights == nullptr && call.tokens.count > 0) {
    throw UsageError(str("dispatch: apply_weights needs weights for the ", call.tokens.count,
                         " tokens of rank ", rank, ", none are given"));
  }
}

void check_receive_buffers(const Config& config, int rank, const DispatchCall& call) {
  const PartList parts = parts_of(call.format, config.hidden);
  for (int p = 0; p < parts.count; ++p) {
    const void* part = call.memory.parts[static_cast<std::size_t>(p)];
    if (part == nullptr && !config.own_receive_buffers && row_capacity(config, rank) > 0) {
      throw UsageError(str("dispatch: own_receive_buffers is off and no memory was given for part ", p,
                           " on rank ", rank));
    }
    check_address(rank, part, "dispatch: memory of part ", p);
  }
  check_address(rank, call.memory.plan, "dispatch: memory of the plan");
}

}  // namespace

void check_dispatch(const Config& config, int rank, const DispatchCall& call, PlanIn plan_in) {
  const std::int64_t tokens = call.tokens.count;
  if (tokens < 0 || tokens > config.max_tokens) {
    throw UsageError(
        str("dispatch: ", tokens, " tokens on rank ", rank, ", max_tokens is ", config.max_tokens));
  }
  check_type("tokens", call.tokens.type);
  if (const auto number = static_cast<int>(call.ids.type); number < 0 || number > 1) {
    throw UsageError(str("ids: no type has the number ", number));
  }
  check_format(call.format, config.hidden, call.tokens.type);
  check_message_fits(config, call.format);
  check_weighing(config, rank, call);
  check_receive_buffers(config, rank, call);
  if (!call.plan.empty()) {
    check_plan(config, rank, call.plan, plan_in);
    if (plan_in == PlanIn::host && call.plan.tokens() != tokens) {
      throw UsageError(
          str("dispatch: ", tokens, " tokens with a plan of ", call.plan.tokens(), " on rank ", rank));
    }
  }
  if (call.tokens.device_count != nullptr && plan_in == PlanIn::host) {
    throw UnsupportedError("dispatch: this backend reads no counts from device memory");
  }
  if (tokens == 0) return;
  if (call.plan.empty() && call.ids.data == nullptr) {
    throw UsageError(str("dispatch: no ids given for the ", tokens, " tokens of rank ", rank));
  }
  const PartList parts = parts_of(call.format, config.hidden);
  for (int p = 0; p < parts.count; ++p) {
    const auto i = static_cast<std::size_t>(p);
    const bool values = call.format.kind == FormatKind::fp8_e4m3;  // enter in their own type, scales do not
    const std::int64_t row = values ? config.hidden * bytes_of(call.tokens.type) : parts.part[p].row_bytes;
    if (values && p > 0) break;
    check_rows("tokens", rank, call.tokens.parts[i], call.tokens.strides[i], row);
  }
}

namespace {

bool is_whole(const PlanHeader& header) {
  return header.magic == kPlanMagic && header.check == header_check(header);
}

// As far as a plan's header tells: the rest of what decides places is in there as one number.
std::string difference(const PlanShape& of_plan, const PlanShape& wanted) {
  const auto differ = [](const char* name, std::int64_t has, std::int64_t wants) {
    return has == wants ? std::string() : str("; ", name, " = ", has, " there, ", wants, " here");
  };
  return str(differ("ranks", of_plan.ranks, wanted.ranks), differ("experts", of_plan.experts, wanted.experts),
             differ("top_k", of_plan.top_k, wanted.top_k),
             differ("max_tokens", of_plan.max_tokens, wanted.max_tokens),
             differ("most rows", of_plan.capacity, wanted.capacity));
}

}  // namespace

void check_plan(const Config& config, int rank, const Plan& plan, PlanIn plan_in) {
  const PlanShape shape = plan_shape(config);
  const auto bytes = static_cast<std::size_t>(view_plan(nullptr, shape).bytes);
  if (plan.empty()) throw UsageError(str("no plan given on rank ", rank));
  if (plan.bytes() < bytes) {
    PlanHeader header{};
    const bool readable = plan_in == PlanIn::host && plan.bytes() >= sizeof header;
    if (readable) std::memcpy(&header, plan.storage(), sizeof header);
    throw UsageError(str("plan: storage of ", plan.bytes(), " bytes, this exchange's plans take ", bytes,
                         is_whole(header) ? difference(header.shape, shape) : ""));
  }
  check_address(rank, plan.storage(), "plan: storage");
  if (plan_in == PlanIn::device) return;
  const PlanHeader& header = *static_cast<const PlanHeader*>(plan.storage());
  if (!is_whole(header)) {
    throw UsageError(
        str("plan: unfinished or damaged on rank ", rank, ": its header does not agree with itself"));
  }
  if (header.config_hash != row_order_hash(config)) {
    throw UsageError(str("plan: made on rank ", header.rank,
                         " by an exchange of another configuration or placement, used on rank ", rank,
                         difference(header.shape, shape)));
  }
  if (header.rank != rank) {
    throw UsageError(str("plan: made on rank ", header.rank, ", used on rank ", rank));
  }
}

namespace {

// Of two arguments that go together on a rank with rows and tokens.
void check_both(const char* one, const void* first, const char* other, const void* second, int rank) {
  if ((first == nullptr) == (second == nullptr)) return;
  throw UsageError(str("combine: ", one, " and ", other, " go together, rank ", rank, " gives only ",
                       first != nullptr ? one : other));
}

}  // namespace

void check_combine(const Config& config, int rank, const CombineCall& call, bool split, PlanIn plan_in) {
  check_plan(config, rank, call.plan, plan_in);
  check_type("outputs", call.outputs.type);
  check_type("result", call.result.type);
  if (const auto number = static_cast<int>(call.reduction); number < 0 || number > 2) {
    throw UsageError(str("combine: no reduction has the number ", number));
  }
  const bool wants_routes = call.reduction != Reduction::partial;
  if (wants_routes && config.reduction == Reduction::partial) {
    throw UsageError(str("combine: ", to_string(call.reduction),
                         " needs more staging than the configuration's ", to_string(config.reduction),
                         ": configure the larger one"));
  }
  if (config.layout == Layout::rank_major) {
    if (wants_routes || call.row_weights != nullptr || call.topk_weights != nullptr ||
        call.row_values != nullptr || call.route_values != nullptr) {
      throw UsageError(
          "combine: rank_major rows are sums already: only partial, without weights or row values");
    }
  }
  if (call.row_weights != nullptr && call.topk_weights != nullptr) {
    throw UsageError("combine: weights of the rows and home weights exclude each other");
  }
  if (call.reduction == Reduction::unreduced &&
      (call.row_weights != nullptr || call.topk_weights != nullptr)) {
    throw UsageError("combine: unreduced rows are not multiplied: weights are refused");
  }
  if (split && call.topk_weights != nullptr && call.reduction == Reduction::partial) {
    throw UsageError("combine: in the split form partial takes the weights that travelled, not home weights");
  }
  if (call.outputs.data != nullptr) {
    check_rows("outputs", rank, call.outputs.data, call.outputs.stride,
               config.hidden * bytes_of(call.outputs.type));
  }
  if (call.result.data != nullptr) {
    check_rows("result", rank, call.result.data, call.result.stride,
               config.hidden * bytes_of(call.result.type));
  }
  if (plan_in == PlanIn::device) return;
  if (call.plan.total() == 0 || call.plan.tokens() == 0) return;
  check_both("outputs", call.outputs.data, "result", call.result.data, rank);
  check_both("row_values", call.row_values, "route_values", call.route_values, rank);
}

}  // namespace ferry
