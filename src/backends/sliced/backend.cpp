// The backend of experts in slices on host memory, and its steps.
#include "backends/sliced/backend.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "backends/sliced/positions.hpp"
#include "base/integers.hpp"
#include "base/mapping.hpp"
#include "exchange/gather.hpp"
#include "exchange/lane_counts.hpp"
#include "format/numbers.hpp"
#include "plan/shapes.hpp"

namespace ferry {
namespace sliced {

SlicedArrays sliced_arrays(const Config& config, int rank) {
  const Config routed = routed_config(config);
  const std::int64_t rows = row_capacity(config, rank), routed_rows = row_capacity(routed, rank);
  const std::int64_t message = exchange_shape(config, 0).message_bytes,
                     values = 4 * std::int64_t{config.hidden};
  const std::int64_t packed =
      std::max<std::int64_t>(message + static_cast<std::int64_t>(sizeof(SliceRowTail)), values);
  const std::int64_t slots = config.reduction == Reduction::partial ? 1 : config.top_k;
  const std::int64_t results = config.max_tokens * slots * values, sent = routed.max_tokens;
  const std::int64_t local = config.placement.local_experts(rank), tp = config.placement.tp();
  const std::int64_t segments = local * config.placement.ranks();
  SlicedArrays arrays;
  std::int64_t end = 0;
  const auto take = [&](std::int64_t bytes) {
    return std::exchange(end, align_up(end + bytes, kSliceAlignment));
  };
  arrays.parts = take(config.own_receive_buffers ? rows * message + kMaxParts * kSliceAlignment : 0);
  arrays.source = take(rows * static_cast<std::int64_t>(sizeof(Source)));
  arrays.weight = take(rows * 4);
  arrays.counts = take(4 * local);
  arrays.row_offsets = take(4 * (local + 1));
  arrays.group_expert = take(4 * local);
  arrays.result_bytes = end;
  arrays.state = take(sizeof(SliceState));
  arrays.all_calls = take(sizeof(SliceTotals));
  arrays.terms = take((config.placement.ranks() + 1) * static_cast<std::int64_t>(sizeof(SliceTerms)));
  arrays.ids = take(sent * config.top_k * 8);
  arrays.weights = take(sent * config.top_k * 4);
  arrays.tokens = take(sent * std::max(message, values) + kMaxParts * kSliceAlignment);
  arrays.segments = take(4 * (2 * segments + 1 + 2 * tp * local + local));
  arrays.own = take(std::max(routed_rows * packed, results));
  arrays.all = take(std::max(rows * packed, results));
  arrays.row_weights = take(routed_rows * 4);
  arrays.bytes = end;
  return arrays;
}

namespace {

// Executes the work on a row.
struct OneThread {
  bool first() const { return true; }
  int index() const { return 0; }
  int threads() const { return 1; }
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) const {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  void zero(std::byte* bytes, std::int64_t begin, std::int64_t end) const {
    std::memset(bytes + begin, 0, static_cast<std::size_t>(end - begin));
  }
  void store(std::byte* to, const SliceRowTail& tail) const { std::memcpy(to, &tail, sizeof tail); }
  SliceRowTail load(const std::byte* from) const {
    SliceRowTail tail;
    std::memcpy(&tail, from, sizeof tail);
    return tail;
  }
  void widen(DType type, const std::byte* from, std::byte* to, int values) const {
    for (int i = 0; i < values; ++i) {
      std::uint16_t bits = 0;
      std::memcpy(&bits, from + 2 * i, sizeof bits);
      const float value = type == DType::fp16 ? fp16_to_fp32(bits) : bf16_to_fp32(bits);
      std::memcpy(to + 4 * i, &value, sizeof value);
    }
  }
};

// The numbers of tokens that the ranks tell.
void check_terms(Operation operation, const SliceShape& shape, const SliceTerms* terms) {
  for (int rank = 0; rank < shape.ranks; ++rank)
    check_told(operation, "tokens", terms[rank].tokens, shape.max_tokens, rank);
}

void require_same(const SliceDifference& difference) {
  if (!difference.found) return;
  raise_slice_fault(difference.fault, difference.rank, difference.other, difference.mine, difference.theirs);
}

// Fills the tables. Returns false if the plan is damaged: its counts do not agree with its total, or are more
// than a rank can receive.
bool place_segments(const FindSegments& call, std::int64_t& rows) {
  const SliceShape& shape = call.shape;
  const SegmentTables& tables = call.tables;
  std::int64_t gathered = 0, own = 0;
  for (int pair = 0; pair < shape.pairs(); ++pair) {
    std::int64_t of_pair = 0;
    for (int source = 0; source < shape.sub_groups(); ++source) {
      const std::int32_t more = call.count(pair / shape.local_experts, pair % shape.local_experts, source);
      if (more < 0) return false;
      of_pair += more;
    }
    if (gathered + of_pair > shape.capacity) return false;
    tables.pair_rows[pair] = static_cast<std::int32_t>(of_pair);
    tables.pair_first[pair] = static_cast<std::int32_t>(gathered);
    gathered += of_pair;
    if (pair / shape.local_experts == shape.tp_rank()) own += of_pair;
  }
  for (int local = 0; local < shape.local_experts; ++local) {
    tables.group_first[local] = static_cast<std::int32_t>(rows);
    rows += call.aligned(call.rows_of_expert(local));
    if (rows > shape.capacity) return false;
  }
  if (own != call.plan.header->total) return false;
  for (int pair = 0; pair < shape.pairs(); ++pair) call.place_pair(pair);
  for (int local = 0; local < shape.local_experts; ++local) call.place_expert(local);
  tables.gathered_row[shape.segments()] = static_cast<std::int32_t>(gathered);
  call.state->own_rows = static_cast<std::int32_t>(own);
  call.state->gathered = static_cast<std::int32_t>(gathered);
  return true;
}

class HostSteps final : public SliceSteps {
 public:
  explicit HostSteps(const Rank& rank) : rank_(rank) {}

  void post_dispatch(const PostDispatch& call, Stream) override {
    std::uint64_t hash = 0;
    for (std::int64_t route = 0; route < call.tokens * call.shape.top_k; ++route)
      hash += mixed_bits(static_cast<std::uint64_t>(route),
                         static_cast<std::uint64_t>(caller_id(call.ids, call.wide_ids, route)));
    *call.terms = SliceTerms{call.tokens, hash, 0, 0, 0};
  }

  // Throw on every rank alike.
  void take_slice(const TakeSlice& call, Stream) override {
    check_terms(Operation::dispatch, call.shape, call.terms);
    require_same(dispatch_difference(call.shape, call.terms));
    *call.state = slice_of(call.shape, call.terms[call.shape.rank].tokens);
    for (std::int64_t i = 0; i < std::int64_t{call.state->count} * call.shape.top_k; ++i)
      take_slot(call, *call.state, i);
  }

  void take_combine(const TakeCombine& call, Stream) override {
    const SliceShape& shape = call.shape;
    check_terms(Operation::combine, shape, call.terms);
    require_same(combine_difference(shape, call.terms));
    *call.state = combine_slice(call);
    const std::int64_t first = std::int64_t{call.state->first} * shape.top_k;
    if (call.topk_weights != nullptr)
      std::copy_n(call.topk_weights + first, std::int64_t{call.state->count} * shape.top_k,
                  call.slice_weights);
    count_sent(shape, false, call.output_bytes, [&](int i) {
      std::int64_t rows = 0;
      for (int local = 0; local < shape.local_experts; ++local)
        rows += call.tables.pair_rows[i * shape.local_experts + local];
      return rows;
    });
    count_sent(shape, false, call.result_bytes, [&](int) { return std::int64_t{call.state->slots}; });
  }

  // Throws SystemError for a damaged plan of a dispatch.
  void find_segments(const FindSegments& call, Stream) override {
    std::int64_t rows = 0;
    const bool damaged = !place_segments(call, rows);
    if (call.terms != nullptr) {
      if (damaged) call.state->own_rows = call.state->gathered = 0;
      *call.terms = SliceTerms{damaged ? 0 : call.plan.header->tokens, 0, call.state->gathered, call.types,
                               call.arguments | (damaged ? kPlanDamaged : 0)};
      return;
    }
    if (damaged) {
      throw SystemError(
          str("dispatch: the counts of rows that rank ", call.shape.rank, " has received are damaged"), EIO);
    }
    for (int local = 0; local < call.shape.local_experts; ++local) {
      call.counts[local] = static_cast<std::int32_t>(call.rows_of_expert(local));
      call.row_offsets[local] = call.tables.group_first[local];
    }
    call.row_offsets[call.shape.local_experts] = static_cast<std::int32_t>(rows);
    call.totals->total = rows;
    std::atomic_ref(call.totals->call).store(call.call, std::memory_order_release);
  }

  void copy_tokens(const CopyTokens& call, const StepSize&, Stream) override {
    for (std::int64_t token = 0; token < call.state->count; ++token) copy_token(OneThread{}, call, token);
  }

  void pack_rows(const PackRows& call, const StepSize&, Stream) override {
    for (std::int64_t row = 0; row < call.state->own_rows; ++row) pack_row(OneThread{}, call, row);
  }

  void unpack_rows(const UnpackRows& call, const StepSize&, Stream) override {
    for (std::int64_t row = 0; row < call.state->gathered; ++row) unpack_row(OneThread{}, call, row);
    for (int group = 0; group < call.shape.local_experts; ++group) pad_group(OneThread{}, call, group);
    count_sent(call.shape, true, call.row_bytes, [&](int) { return std::int64_t{call.state->own_rows}; });
  }

  void pack_outputs(const PackOutputs& call, const StepSize&, Stream) override {
    for (std::int64_t row = 0; row < call.state->gathered; ++row) pack_output(OneThread{}, call, row);
  }

  void copy_results(const CopyResults& call, const StepSize&, Stream) override {
    for (std::int64_t row = 0; row < std::int64_t{call.state->tokens} * call.slots; ++row)
      std::memcpy(call.to + row * call.stride, call.from + row * call.row_bytes,
                  static_cast<std::size_t>(call.row_bytes));
  }

  // Adds what the gathers have sent.
  void add_sent(WireCounts& sum) const { sent_.add_to(sum); }

 private:
  // Counts rows of `bytes` bytes to every other rank of the sub-group, rows(tp rank) each.
  template <class Rows>
  void count_sent(const SliceShape& shape, bool dispatch, std::int64_t bytes, Rows rows) {
    const Topology& topology = rank_.topology();
    for (int i = 0; i < shape.tp; ++i) {
      const int to = shape.rank - shape.tp_rank() + i;
      if (to == shape.rank) continue;
      const Traffic traffic{.messages = rows(i), .bytes = rows(i) * bytes};
      const bool between_nodes = topology.node_of(to) != topology.node_of(shape.rank);
      if (dispatch) {
        sent_.count_dispatch(traffic, between_nodes);
      } else {
        sent_.count_combine(traffic, between_nodes);
      }
    }
  }

  const Rank& rank_;
  LaneCounts sent_{1};  // of rows sent within the sub-group
};

class HostLane final : public OwnedLane {
 public:
  HostLane(const SlicedContext& context, int index)
      : memory_(sliced_arrays(context.config, context.me()).bytes),
        steps_(context.rank),
        lane_(context, index, steps_, memory_.data(), &totals_) {
    std::ranges::copy(context.config.placement.experts_of(context.me()), lane_.group_expert());
  }

  Lane& lane() override { return lane_; }
  std::int32_t first_token() const override { return *lane_.first_token(); }
  void add_sent(WireCounts& sum) const override { steps_.add_sent(sum); }

 private:
  LocalMemory memory_;
  HostTotals totals_;
  HostSteps steps_;
  Lane lane_;
};

}  // namespace
}  // namespace sliced

std::unique_ptr<Backend> make_sliced_backend(const Rank& rank, const Config& config,
                                             std::unique_ptr<Backend> inner) {
  auto backend = std::make_unique<sliced::SlicedBackend>(rank, config, std::move(inner));
  for (int lane = 0; lane < config.lanes; ++lane)
    backend->add(std::make_unique<sliced::HostLane>(backend->context(), lane));
  return backend;
}

Sizes sliced_backend_sizes(const Config& config, int rank, const Sizes& inner) {
  const sliced::SlicedArrays arrays = sliced::sliced_arrays(config, rank);
  Sizes sizes = inner;
  sizes.results += config.lanes * arrays.result_bytes;
  sizes.messages += config.lanes * (arrays.bytes - arrays.result_bytes);
  return sizes;
}

}  // namespace ferry
