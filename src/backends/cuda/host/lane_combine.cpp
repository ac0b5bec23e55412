// Combines: turns a checked call into the arguments of its kernels, and launches them.
#include <algorithm>

#include "backends/cuda/combine/packed_rows.hpp"
#include "backends/cuda/host/block_roles.hpp"
#include "backends/cuda/host/lane.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "exchange/compared_options.hpp"
#include "exchange/configuration.hpp"

namespace ferry::cuda {

// Decides which kernel adds the rows of shared experts, and sets the arguments for that.
Lane::SharedCopy Lane::plan_shared_copy(const CombineCall& call, Phase phase,
                                        CombineArguments* arguments) const {
  if (view_.shared_experts == 0 || arguments->outputs == nullptr || arguments->result == nullptr) return {};
  if (call.shared_outputs != nullptr)
    return {static_cast<std::byte*>(call.shared_outputs), arguments->result_type};
  arguments->shared_terms = view_.shared_experts;
  if (phase == Phase::fused && arguments->output_type == arguments->combine_type) return {};
  auto* const kept = array<std::byte>(arrays_.shared_outputs);
  arguments->kept_shared_rows = kept;
  return {kept, arguments->combine_type};
}

void Lane::copy_shared_rows(const CombineArguments& combine, const SharedCopy& copy, const LaunchShape& shape,
                            Stream stream) const {
  kSharedOutputsKernel({.lane = view_,
                        .plan = combine.plan,
                        .outputs = combine.outputs,
                        .output_stride = combine.output_stride,
                        .output_type = combine.output_type,
                        .combine_type = combine.combine_type,
                        .to = copy.to,
                        .type = copy.type},
                       {.blocks = shape.blocks}, stream);
}

void Lane::enqueue(const CombineCall& call, Phase phase, bool keeps_inputs) {
  const Stream stream = call.options.stream;
  const Config& config = exchange_.config;
  require_own_stream(Operation::combine, stream);
  pointer_check_.require_usable("combine", pointers_of(call));
  const LaunchShape shape = this->shape(call.options.sm_limit);
  CombineArguments arguments{};
  arguments.lane = view_;
  arguments.phase = phase;
  arguments.terms = agreed_options_of(Operation::combine, options_of(call));
  arguments.weights_travel = call.weights_travel();
  arguments.plan = view_plan(call.plan.storage(), view_.plan_shape);
  arguments.reduction = call.reduction;
  arguments.combine_type = config.combine_type;
  arguments.row = combine_row_layout(config.combine_type, config.hidden, config.top_k);
  arguments.outputs = static_cast<const std::byte*>(call.outputs.data);
  arguments.output_stride =
      call.outputs.stride != 0 ? call.outputs.stride : config.hidden * bytes_of(call.outputs.type);
  arguments.output_type = call.outputs.type;
  arguments.row_weights = call.row_weights;
  arguments.row_values = call.row_values;
  arguments.result = static_cast<std::byte*>(call.result.data);
  arguments.result_stride =
      call.result.stride != 0 ? call.result.stride : config.hidden * bytes_of(call.result.type);
  arguments.result_type = call.result.type;
  const std::optional<EpilogueArguments> epilogue = plan_epilogue(call, &arguments);
  arguments.topk_weights = call.topk_weights;
  arguments.route_values = call.route_values;
  // Own rows go through staging where they are converted: the sender role then sums them like all others.
  arguments.own_staged = !keeps_inputs || call.outputs.type != config.combine_type;
  const SharedCopy shared = plan_shared_copy(call, phase, &arguments);
  arguments.senders =
      combine_senders(shape.blocks, config, call.reduction, arguments.own_staged, arguments.shared_terms);
  if (is_carried()) pack_rows(arguments, stream);
  // The fused kernel adds the rows that are copied; a send phase has more urgent work.
  if (shared.to != nullptr && phase == Phase::fused) copy_shared_rows(arguments, shared, shape, stream);
  launch_combine(arguments, shape, handle_of(stream));
  if (shared.to != nullptr && phase == Phase::send) copy_shared_rows(arguments, shared, shape, stream);
  if (!is_carried()) ++calls_;
  if (epilogue && phase == Phase::fused)
    kEpilogueKernels[static_cast<int>(epilogue->type)](*epilogue, {.blocks = shape.blocks}, stream);
  if (phase == Phase::send) {
    epilogue_ = epilogue;
    combine_ = arguments;
    combine_.phase = Phase::receive;
    phase_shape_ = shape;
  }
}

void Lane::combine(const CombineCall& call, bool split) {
  const Stream stream = call.options.stream;
  if (!carrier_) {
    const Phase phase = split ? Phase::send : Phase::fused;
    return refusing(Operation::combine, stream, [&] { enqueue(call, phase, !split); });
  }
  const bool continues = call.weights_travel();
  const CombineCall rows = continues ? call.with_sent_weights(send_weights(call)) : call;
  // Sums by node look up this rank's own rows where they are packed.
  const bool keeps_inputs = !split && carrier_->keeps_inputs() && !exchange_.has_node_sums();
  send(Operation::combine, options_of(call), continues ? CallPart::last : CallPart::whole, split, stream,
       [&] {
         enqueue(rows, Phase::send, keeps_inputs);
         return Stored{.content = Stored::Content::rows,
                       .shape = phase_shape_,
                       .own_rows = combine_.own_staged,
                       .adds_by_node = adds_by_node()};
       });
  if (!split) combine_receive(stream);
}

const float* Lane::send_weights(const CombineCall& call) {
  const Stream stream = call.options.stream;
  auto* const weights =
      reinterpret_cast<float*>(exchange_.engine_lane(index_) + exchange_.engine->row_weights);
  // What is wrong with the combine must be found before its weights have been sent.
  refusing(Operation::combine, stream, [&] {
    require_own_stream(Operation::combine, stream);
    require_usable("combine", pointers_of(call));
    shape(call.options.sm_limit);
  });
  carry(RouteValuesCall{.options = call.options,
                        .from = call.topk_weights,
                        .plan = call.plan,
                        .to = weights,
                        .combine = &call});
  return weights;
}

void Lane::combine_receive(Stream stream) {
  if (carrier_) carrier_->deliver(stream);
  if (is_carried() && adds_by_node()) add_on_nodes(stream);
  launch_combine(combine_, phase_shape_, handle_of(stream));
  if (epilogue_)
    kEpilogueKernels[static_cast<int>(epilogue_->type)](*epilogue_, {.blocks = phase_shape_.blocks}, stream);
  if (is_carried()) ++calls_;
}

std::optional<EpilogueArguments> Lane::plan_epilogue(const CombineCall& call,
                                                     CombineArguments* combine) const {
  if (call.epilogue.empty() || combine->result == nullptr) return std::nullopt;
  const EpilogueArguments epilogue{.lane = view_,
                                   .plan = combine->plan,
                                   .result = combine->result,
                                   .result_stride = combine->result_stride,
                                   .type = combine->result_type,
                                   .residual = static_cast<const std::byte*>(call.epilogue.residual),
                                   .residual_stride = call.epilogue.stride != 0
                                                          ? call.epilogue.stride
                                                          : view_.hidden * bytes_of(combine->result_type),
                                   .scale = call.epilogue.scale};
  // A launch after the combine would find the sums in place of the residual.
  combine->adds_to_result = epilogue.residual == epilogue.result;
  combine->scale = epilogue.scale;
  if (combine->adds_to_result) return std::nullopt;
  return epilogue;
}

// Finds where the rows that this rank sends are packed, and sets the arguments for that.
void Lane::pack_rows(CombineArguments& arguments, Stream stream) const {
  const EngineLayout& layout = *exchange_.engine;
  std::byte* const memory = exchange_.engine_lane(index_);
  auto* first_row = reinterpret_cast<std::int32_t*>(memory + layout.first_row);
  auto* rows = reinterpret_cast<std::int32_t*>(memory + layout.rows);
  kPlaceRowsKernel({.lane = view_,
                    .plan = arguments.plan,
                    .one_row = arguments.reduction == Reduction::partial,
                    .first_row = first_row,
                    .rows = rows},
                   {}, stream);
  arguments.packed = {.outbox = memory + layout.row_outbox,
                      .row_bytes = layout.row_bytes,
                      .label_offset = layout.label_offset,
                      .first_row = first_row,
                      .rows = rows,
                      .arrived = reinterpret_cast<const LLPacket*>(memory + layout.arrived),
                      .most_rows = layout.sent_rows};
}

bool Lane::adds_by_node() const {
  return exchange_.has_node_sums() && combine_.reduction == Reduction::partial;
}

void Lane::add_on_nodes(Stream stream) {
  const Topology& topology = exchange_.rank.topology();
  const EngineLayout& layout = *exchange_.engine;
  std::byte* const memory = exchange_.engine_lane(index_);
  AddOnNodesArguments arguments{.lane = view_,
                                .plan = combine_.plan,
                                .node_of = {},
                                .combine_type = combine_.combine_type,
                                .row = combine_.row,
                                .has_values = combine_.route_values != nullptr,
                                .relays_add = has_relays(exchange_.config, topology),
                                .arrived = reinterpret_cast<LLPacket*>(memory + layout.arrived),
                                .token_ranks = reinterpret_cast<std::int32_t*>(memory + layout.token_ranks),
                                .route_rank = reinterpret_cast<std::int32_t*>(memory + layout.route_rank)};
  for (int rank = 0; rank < view_.ranks; ++rank) arguments.node_of[rank] = topology.node_of(rank);
  kAddOnNodesKernel(arguments, {}, stream);
  combine_.plan.token_ranks = arguments.token_ranks;
  combine_.plan.route_rank = arguments.route_rank;
}

}  // namespace ferry::cuda
