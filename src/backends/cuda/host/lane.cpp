#include "backends/cuda/host/lane.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "backends/cuda/by_source/source_rows.hpp"
#include "backends/cuda/memory/pointer_check.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "base/environment.hpp"
#include "base/text.hpp"
#include "exchange/configuration.hpp"

namespace ferry::cuda {
namespace {

// A lane's pinned memory, written by kernels.
struct LanePinnedMemory {
  DeviceError error;
  alignas(16) HostTotals totals;  // stored by the device in one 16-byte access
};

// Identity of the exchange for LaneStreams. Null over an engine, where no kernel waits for another rank's.
const void* exchange_id(const ExchangeState& exchange) {
  const bool shares_device = exchange.rank.same_process() && exchange.ranks_on_device > 1;
  if (!shares_device) return nullptr;
  if (exchange.hop_transport) return exchange.hop_transport->at(0, 0);
  return exchange.memory ? exchange.memory->at(0, 0) : nullptr;
}

bool is_gather(Operation operation) {
  return operation == Operation::all_gather_v || operation == Operation::reduce_scatter_v;
}

}  // namespace

Lane::Lane(const ExchangeState& exchange, int index)
    : exchange_(exchange),
      index_(index),
      arrays_(lane_arrays(exchange_.config, exchange_.me())),
      memory_(arrays_.bytes),
      pinned_(sizeof(LanePinnedMemory)),
      counts_(HostCounts::bytes(exchange_.rank.size(), local_slots_of(exchange_.config, exchange_.me()))),
      view_(make_view()),
      own_(make_own_arrays()),
      diagnostics_(view_.rank, view_.top_k),
      pointer_check_(
          str(" on rank ", view_.rank), exchange_.device,
          [device = exchange_.device](const void* address) { return find_memory(address, device); }),
      streams_(exchange_id(exchange_), index, view_.rank, exchange_.device) {
  prepare_dispatch(view_);
  prepare_combine(view_.ranks);
  ListedKernel::load_all();
  init_memory();
}

void Lane::init_memory() const {
  const DeviceDiagnostics none = DeviceDiagnostics::none();
  copy_blocking(&view_.state->diagnostics, &none, sizeof none);
  const unsigned long long no_id = ~0ull;
  copy_blocking(&view_.state->lowest_bad_id, &no_id, sizeof no_id);
  const std::vector<std::int32_t> experts = group_experts(exchange_.config, exchange_.me());
  copy_blocking(array<std::int32_t>(arrays_.group_expert), experts.data(),
                static_cast<std::int64_t>(experts.size() * sizeof(std::int32_t)));
}

LaneView Lane::make_view() const {
  const Config& config = exchange_.config;
  const DeviceLayout layout = device_layout(config);
  LaneView view{};
  view.rank = exchange_.me();
  view.ranks = exchange_.rank.size();
  view.experts = config.experts;
  view.top_k = config.top_k;
  view.hidden = config.hidden;
  view.max_tokens = config.max_tokens;
  view.plan_shape = plan_shape(config);
  view.most_ranks = view.plan_shape.most_ranks();
  view.layout = config.layout;
  view.by_ranks = Divisor::of(view.ranks);
  view.by_others = Divisor::of(std::max(view.ranks - 1, 1));
  view.by_alignment = Divisor::of(config.alignment);
  view.capacity = group_capacity(config, view.rank);
  view.capacity_rows = row_capacity(config, view.rank);
  view.groups = groups_of(config, view.rank);
  view.shared_experts = config.shared_experts;
  view.shared_split = config.shared_split;
  view.input = config.input;
  view.zero_padding = config.zero_padding;
  view.deadline = static_cast<std::uint64_t>(std::min(config.deadline * 1e9, 9e18));
#if FERRY_TEST_HOOKS
  const Environment environment = Environment::read();
  const bool stalls = environment.stall_rank < 0 || environment.stall_rank == view.rank;
  view.fault_injection = fault_injection_of(environment.jitter, stalls ? environment.stall : "");
  // A rank that a test stalls must not time out itself: its peers are to report it.
  if (view.fault_injection.stall != KernelPoint::none) view.deadline = ~0ull;
#endif
  view.signals = device_signals(config);
  view.exchange = layout.exchange;
  std::vector<std::byte*> symmetric(static_cast<std::size_t>(view.ranks));
  if (is_carried()) {
    place_engine_lane(*exchange_.engine, exchange_.engine_lane(index_), &view, symmetric);
  } else {
    for (int peer = 0; peer < view.ranks; ++peer)
      symmetric[static_cast<std::size_t>(peer)] = exchange_.memory->at(peer, index_ * layout.lane_bytes());
    view.receive_buffers = layout.exchange.lane_bytes();
  }
  if (view.ranks <= kNarrowRanks) {
    std::copy(symmetric.begin(), symmetric.end(), view.symmetric);
  } else {
    view.symmetric[0] = array<std::byte>(arrays_.symmetric);
    copy_blocking(array<std::byte*>(arrays_.symmetric), symmetric.data(),
                  static_cast<std::int64_t>(symmetric.size() * sizeof(std::byte*)));
  }

  view.tables = exchange_.tables.data() + exchange_.arrays.routing;
  view.epoch = reinterpret_cast<const Epoch*>(exchange_.tables.data() + exchange_.arrays.epoch);
  view.timeout_claimed =
      reinterpret_cast<unsigned*>(exchange_.tables.data() + exchange_.arrays.timeout_claimed);
  view.state = array<LaneState>(arrays_.state);
  view.block_counts = array<std::int32_t>(arrays_.block_counts);
  view.block_counted = array<Flag>(arrays_.block_counted);
  view.load = array<std::int64_t>(arrays_.load);

  auto* pinned = reinterpret_cast<LanePinnedMemory*>(pinned_.data());
  view.report = exchange_.report();
  view.device_error = &pinned->error;
  view.totals = &pinned->totals;
  return view;
}

std::byte* Lane::receive_buffers() const {
  if (is_carried()) return exchange_.engine_lane(index_) + exchange_.engine->received;
  return exchange_.memory->mine(index_ * device_layout(exchange_.config).lane_bytes() +
                                view_.receive_buffers);
}

OwnArrays Lane::make_own_arrays() const {
  const bool has_parts = exchange_.config.own_receive_buffers;
  return {.parts = {has_parts ? receive_buffers() : nullptr,
                    static_cast<std::size_t>(device_layout(exchange_.config).received)},
          .weight = array<float>(arrays_.weight),
          .dots = array<float>(arrays_.dots),
          .local_ids = array<std::int32_t>(arrays_.local_ids),
          .counts = array<std::int32_t>(arrays_.counts),
          .row_offsets = array<std::int32_t>(arrays_.row_offsets),
          .tile_offsets = array<std::int32_t>(arrays_.tile_offsets),
          .plan = {array<std::byte>(arrays_.plan),
                   static_cast<std::size_t>(view_plan(nullptr, view_.plan_shape).bytes)},
          .totals = view_.totals};
}

int Lane::blocks_for(int sm_limit) const {
  if (sm_limit < 0) throw UsageError(str("sm_limit = ", sm_limit, ", must be 0 (the lane's share) or more"));
  const int lanes = exchange_.config.lanes, part = exchange_.blocks / lanes;
  if (sm_limit == 0) return part;
  // The kernels of all lanes must be resident at once, so each lane keeps to its part of the device.
  if (sm_limit > part && lanes > 1) {
    throw UsageError(str("sm_limit = ", sm_limit, ": each of ", counted(lanes, "lane"), " may use at most ",
                         part, " multiprocessors of the device"));
  }
  return std::min(sm_limit, part);
}

LaunchShape Lane::shape(int sm_limit) const {
  const bool alone = exchange_.ranks_on_device == 1 && exchange_.config.lanes == 1;
  return {.blocks = blocks_for(sm_limit), .cooperative = alone};
}

void Lane::refuse(Operation operation, const ErrorRecord& error, Stream stream) noexcept {
  try {
    // No rank has such a call.
    if (exchange_.hops && is_gather(operation)) return;
    const auto post = [&](cudaStream_t on) {
      if (carrier_) return carrier_->refuse(operation, error, on);
      kRefusalKernel({.lane = view_, .operation = operation, .refusal = error}, {}, {on});
    };
    if (streams_.other_rank_on(stream, calls_ + 1) < 0) {
      post(handle_of(stream));
    } else {
      // On `stream` the refusal would wait for the other rank's kernel, which waits for the refusal. But
      // another stream is ordered neither after the lane's earlier calls nor before its next one.
      wait_for_calls();
      const CudaStream own;
      post(own.get());
      own.synchronize();
    }
    if (!exchange_.over_engine()) ++calls_;
  } catch (...) {
    return;  // the device has failed; the next call throws the reason
  }
}

// Returns when all calls enqueued so far have ended, or the deadline has passed. No call may have been
// captured.
void Lane::wait_for_calls() const {
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration<double>(exchange_.config.deadline);
  for (;;) {
    std::uint64_t ended = 0, rounds = 0;
    copy_blocking(&ended, view_.state->calls, sizeof ended);
    copy_blocking(&rounds, &view_.state->further_rounds, sizeof rounds);
    if (ended - rounds >= calls_ || std::chrono::steady_clock::now() > deadline) return;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// In this and the next functions the calling thread's device may be another, because any thread may call
// them.
CallDiagnostics Lane::take_diagnostics() {
  const ScopedDevice device(exchange_.device);
  DeviceDiagnostics* const on_device = &view_.state->diagnostics;
  return diagnostics_.take(
      [&] {
        DeviceDiagnostics copy;
        copy_blocking(&copy, on_device, sizeof copy);
        return copy;
      },
      [&](std::int64_t offset, std::uint64_t number) {
        copy_blocking(reinterpret_cast<std::byte*>(on_device) + offset, &number, sizeof number);
      });
}

void Lane::add_load(LoadCounts& sum) const {
  const ScopedDevice device(exchange_.device);
  std::vector<std::int64_t> load(sum.layers.size());
  copy_blocking(load.data(), view_.load, static_cast<std::int64_t>(load.size() * sizeof(load[0])));
  for (std::size_t i = 0; i < load.size(); ++i) sum.layers[i] += load[i];
  std::int64_t calls = 0;
  copy_blocking(&calls, &view_.state->dispatches, sizeof calls);
  sum.dispatches += calls;
}

void Lane::add_wire(WireCounts& counts) const {
  if (carrier_) return carrier_->add_wire(counts);
  const ScopedDevice device(exchange_.device);
  DeviceWireCounts mine;
  copy_blocking(&mine, &view_.state->wire, sizeof mine);
  counts.dispatch_bytes += mine.dispatch_bytes;
  counts.dispatch_messages += mine.dispatch_messages;
  counts.combine_bytes += mine.combine_bytes;
  counts.combine_messages += mine.combine_messages;
}

}  // namespace ferry::cuda
