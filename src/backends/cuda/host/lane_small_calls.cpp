// Small calls: turns a checked call into the arguments of its kernel, and launches it.
#include <atomic>
#include <numeric>
#include <optional>
#include <thread>

#include "backends/cuda/host/carrier.hpp"
#include "backends/cuda/host/lane.hpp"
#include "backends/cuda/operations/small_operations.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "base/process.hpp"
#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "exchange/gather.hpp"

namespace ferry::cuda {

SmallResult Lane::run(const SmallCall& call) {
  if (carrier_) {
    if (std::optional<SmallResult> done = carrier_->run_on_host(call)) return *done;
    return std::visit([&](const auto& each) { return carry(each); }, call);
  }
  return refusing(operation_of(call), call_options_of(call).stream, [&] {
    return std::visit([&](const auto& each) { return enqueue(each, Phase::fused); }, call);
  });
}

// The send phase and the exchange of headers of a call without messages.
template <class Call>
void Lane::exchange_headers(const Call& call) {
  const Stream stream = call.options.stream;
  send(call.operation, {}, CallPart::whole, false, stream, [&] {
    enqueue(call, Phase::send);
    return Stored{};
  });
  carrier_->deliver(stream);
}

template <JoinsNumbers Call>
SmallResult Lane::carry(const Call& call) {
  exchange_headers(call);
  return enqueue(call, Phase::receive);
}

SmallResult Lane::carry(const RouteValuesCall& call) {
  const Stream stream = call.options.stream;
  const CombineCall* const combine = call.combine;
  send(call.needed_by(), combine != nullptr ? options_of(*combine) : ComparedOptions(),
       combine != nullptr ? CallPart::first : CallPart::whole, false, stream, [&] {
         enqueue(call, Phase::send);
         Stored stored{.content = Stored::Content::messages,
                       .shape = shape(call.options.sm_limit),
                       .lane = view_,
                       .plan = view_plan(call.plan.storage(), view_.plan_shape),
                       .by_plan = true,
                       .returns = call.returns()};
         place_engine_messages(*exchange_.engine, 0, &stored.lane);
         return stored;
       });
  carrier_->deliver(stream);
  const auto receive = [&] { return enqueue(call, Phase::receive); };
  // After values of their own the peers wait for nothing more.
  return combine != nullptr ? refusing(Operation::combine, stream, receive) : receive();
}

SmallResult Lane::carry(const DispatchCountsCall& call) {
  exchange_headers(call);
  // The host has compared the headers that an engine has carried.
  if (!exchange_.over_engine()) enqueue(call, Phase::receive);
  return {};
}

SmallResult Lane::carry(const GatherCall& call) {
  throw UnsupportedError(str(to_string(call.operation),
                             ": not available in two hops on device memory yet: use an exchange with hops "
                             "one"));
}

void Lane::begin(Operation operation, const CallPointers& pointers, Phase phase, Stream stream) {
  if (phase == Phase::receive) return;
  require_own_stream(operation, stream);
  require_usable(to_string(operation), pointers);
}

template <JoinsNumbers Call>
SmallResult Lane::enqueue(const Call& call, Phase phase) {
  const Stream stream = call.options.stream;
  begin(call.operation, pointers_of(call), phase, stream);
  void* const into = call.into != nullptr ? call.into : joined();
  number_kernel(call.operation, phase)({.lane = view_,
                                        .terms = AgreedOptions::of(call.operation),
                                        .number = call.number.value,
                                        .device_number = call.number.device,
                                        .into = into},
                                       {}, stream);
  end(phase);
  return {.joined = into};
}

SmallResult Lane::enqueue(const RouteValuesCall& call, Phase phase) {
  const Stream stream = call.options.stream;
  begin(call.operation, pointers_of(call), phase, stream);
  const CombineCall* const combine = call.combine;
  RouteValuesArguments arguments{
      .lane = view_,
      .terms =
          agreed_options_of(call.needed_by(), combine != nullptr ? options_of(*combine) : ComparedOptions()),
      .plan = call.plan.storage(),
      .from = call.from,
      .to = call.to,
      .phase = phase,
      .operation = call.needed_by(),
      .continues = combine != nullptr};
  if (is_carried()) {
    place_engine_messages(*exchange_.engine, 0, &arguments.lane);
    if (phase == Phase::send) kClearMetadataKernel(arguments.lane, {}, stream);
  }
  kRouteValuesKernel(arguments, shape(call.options.sm_limit), stream);
  if (!arguments.continues) end(phase);
  return {};
}

SmallResult Lane::enqueue(const DispatchCountsCall& call, Phase phase) {
  const Stream stream = call.options.stream;
  begin(call.operation, pointers_of(call), phase, stream);
  const AgreedOptions terms = AgreedOptions::of(call.operation);
  if (phase == Phase::receive) {
    kAgreeKernel({view_, terms}, {}, stream);
  } else {
    kCountKernel({.lane = view_,
                  .terms = terms,
                  .ids = call.ids.data,
                  .wide_ids = call.ids.type == IdType::int64,
                  .tokens = call.tokens,
                  .host = reinterpret_cast<HostCounts*>(counts_.data()),
                  .call = ++counted_,
                  .posts_only = phase == Phase::send},
                 cluster_shape(call.tokens), stream);
  }
  end(phase);
  return {};
}

SmallResult Lane::enqueue(const GatherCall& call, Phase phase) {
  const Stream stream = call.options.stream;
  begin(call.operation, pointers_of(call), phase, stream);
  const auto group = SubGroup::of(view_.rank, call.sub_group, view_.ranks);
  GatherArguments arguments{.lane = view_,
                            .terms = AgreedOptions::of(call.operation),
                            .rows = static_cast<const std::byte*>(call.rows),
                            .out = static_cast<std::byte*>(call.out),
                            .row_bytes = call.row_bytes,
                            .held = call.held,
                            .place = call.place + 1,
                            .count = static_cast<std::int32_t>(call.count),
                            .first = static_cast<std::int32_t>(group.first),
                            .members = static_cast<std::int32_t>(group.count),
                            .device_count = call.device_count};
  arguments.terms.add(call.adds() ? static_cast<std::int64_t>(call.type) : call.row_bytes);
  const auto& kernel = call.adds() ? kReduceScatterKernels[static_cast<int>(call.type)] : kAllGatherKernel;
  kernel(arguments, shape(0), stream);
  view_.has_gathered = true;
  end(phase);
  return {};
}

// --- counts of a dispatch ----------------------------------------------------------------------------------

bool Lane::await_dispatch_counts(Stream stream) const {
  constexpr int kPolls = 20'000;  // about a millisecond
  auto* host = reinterpret_cast<HostCounts*>(counts_.data());
  for (int poll = 0; poll < kPolls; ++poll) {
    // Acquire: the kernel has written the counts before this word.
    if (std::atomic_ref(host->ended.call).load(std::memory_order_acquire) == counted_) return true;
    pause_processor();
  }
  std::this_thread::yield();
  // A kernel that has ended has set the word, unless it or an earlier one has failed.
  const cudaError_t state = cudaStreamQuery(handle_of(stream));
  if (state != cudaErrorNotReady) check(state, "count the rows of a dispatch");
  return false;
}

bool Lane::counted_dispatch() const {
  const auto* host = reinterpret_cast<const HostCounts*>(counts_.data());
  return host->ended.word == static_cast<std::uint64_t>(HostCounts::Result::counted);
}

DispatchCounts Lane::dispatch_counts() {
  if (carrier_) return counts_of_headers();
  auto* host = reinterpret_cast<HostCounts*>(counts_.data());
  if (!counted_dispatch())
    throw UsageError("dispatch_counts: the call was aborted by an error that has been reported before");
  const auto ranks = static_cast<std::size_t>(view_.ranks);
  const auto slots = static_cast<std::size_t>(local_slots_of(exchange_.config, view_.rank));
  const std::span<const std::int32_t> messages(host->messages(view_.ranks), ranks);
  DispatchCounts counts;
  counts.tokens = {host->tokens(), ranks};
  counts.routes = {host->routes(view_.ranks), slots};
  counts.total =
      total_rows(exchange_.config, view_.rank, counts.tokens[static_cast<std::size_t>(view_.rank)],
                 std::accumulate(messages.begin(), messages.end(), std::int64_t{0}), counts.routes);
  return counts;
}

// In the call headers, which have been exchanged.
DispatchCounts Lane::counts_of_headers() {
  const Placement& placement = exchange_.config.placement;
  int first = 0;  // physical index of this rank's first expert
  for (int rank = 0; rank < view_.rank; ++rank) first += placement.local_experts(rank);
  tokens_.clear();
  routes_.assign(static_cast<std::size_t>(local_slots_of(exchange_.config, view_.rank)), 0);
  std::int64_t messages = 0;
  for (int source = 0; source < view_.ranks; ++source) {
    const std::byte* const header = carrier_->received_header(source);
    tokens_.push_back(HeaderFacts::of(header_word(header, kHeaderFacts)).count);
    messages += header_count(header, view_.signals.first_messages + view_.rank);
    for (int expert = 0; expert < placement.local_experts(view_.rank); ++expert)
      routes_[static_cast<std::size_t>(expert)] += header_count(header, first + expert);
  }
  DispatchCounts counts;
  counts.tokens = tokens_;
  counts.routes = routes_;
  counts.total = total_rows(exchange_.config, view_.rank, tokens_[static_cast<std::size_t>(view_.rank)],
                            messages, counts.routes);
  return counts;
}

}  // namespace ferry::cuda
