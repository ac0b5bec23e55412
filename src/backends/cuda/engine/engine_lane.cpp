#include "backends/cuda/engine/engine_lane.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "backends/cuda/host/call_headers.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "base/text.hpp"
#include "exchange/checks.hpp"
#include "exchange/configuration.hpp"
#include "exchange/link_calls.hpp"
#include "layout/message.hpp"
#include "plan/shapes.hpp"

namespace ferry::cuda {

void copy_async(void* to, const void* from, std::int64_t bytes, Stream stream) {
  if (bytes == 0) return;
  check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, handle_of(stream)),
        "copy for an engine");
}

namespace {

// Copies `rows` rows of `bytes`.
void copy_rows_async(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride,
                     std::int64_t bytes, int rows, Stream stream) {
  if (rows == 0) return;
  check(cudaMemcpy2DAsync(to, static_cast<std::size_t>(to_stride), from,
                          static_cast<std::size_t>(from_stride), static_cast<std::size_t>(bytes),
                          static_cast<std::size_t>(rows), cudaMemcpyDefault, handle_of(stream)),
        "copy call headers");
}

}  // namespace

EngineLane::EngineLane(const ExchangeState& exchange, Lane& lane, int index,
                       std::unique_ptr<Communicator> communicator, std::shared_ptr<TransferThread> ordered)
    : exchange_(exchange),
      lane_(lane),
      index_(index),
      headers_(2 * exchange.rank.size() * exchange.engine->header_bytes),
      scalars_(sizeof(Scalars)),
      counts_(exchange.config.experts),
      messages_(make_messages(*communicator).release()),
      call_(exchange.rank, std::move(communicator), index, exchange.engine->header_bytes,
            std::unique_ptr<collective::MessageHops>(messages_), exchange.config.deadline,
            std::move(ordered)) {}

std::unique_ptr<collective::MessageHops> EngineLane::make_messages(Communicator& communicator) {
  const Topology& topology = exchange_.rank.topology();
  const bool relays = has_relays(exchange_.config, topology);
  auto memory = std::make_unique<DeviceHopMemory>(exchange_, index_, communicator, relays);
  if (relays) {
    relay_.emplace(DeviceRelay::Setup{
        .topology = topology,
        .rank = me(),
        .device = exchange_.device,
        .max_tokens = lane_.view().max_tokens,
        .hops = *memory,
        .stream = memory->stream(),
        .payload_of = reinterpret_cast<std::int32_t*>(this->memory() + layout().payload_of),
        .counts = scalars().relayed,
        .add_rows = [this, stream = memory->stream()](std::span<const ArrivedRows> rows, std::byte* out,
                                                      std::int32_t* count) {
          lane_.add_for_relay(rows, out, count, stream);
        }});
  }
  return std::make_unique<collective::MessageHops>(
      topology, me(), collective::HopOptions{.relays = relays, .window = exchange_.config.window},
      std::move(memory));
}

// --- between the phases ------------------------------------------------------------------------------------

// Enqueues copies of the headers for all ranks, except for the one for this rank, which is in the inbox.
void EngineLane::fetch_headers(Stream stream) {
  const EngineLayout& to = layout();
  copy_rows_async(headers_.data(), to.header_bytes, memory() + to.outbox, to.block_bytes, to.header_bytes,
                  ranks(), stream);
  copy_async(sent_header(me()), memory() + to.inbox + me() * to.block_bytes, to.header_bytes, stream);
}

// Enqueues copies to the host of what the exchange needs to know, behind the kernel of the send phase.
void EngineLane::fetch(const std::optional<Stored>& stored, Stream stream) {
  fetch_headers(stream);
  if (stored && stored->messages != nullptr)
    copy_async(scalars().messages, stored->messages, 4 * std::int64_t{ranks()}, stream);
  if (stored && stored->planned != nullptr)
    copy_rows_async(scalars().planned, 4, stored->planned + me(), 4 * std::int64_t{ranks()}, 4, ranks(),
                    stream);
  stored_.record(handle_of(stream));
}

// Starts the exchange after the kernel of the send phase. `stored`: null if only headers travel.
void EngineLane::post(Operation operation, bool split, std::optional<Stored> stored, Stream stream) {
  run_or_refuse(operation, [&] { fetch(stored, stream); });
  headers_delivered_ = false;
  // The caller enqueues nothing on the stream until the exchange has ended.
  if (stored && keeps_inputs(split)) {
    stored->agreed = [this, stream] {
      const ScopedDevice device(exchange_.device);
      deliver_headers(stream);
      headers_delivered_ = true;
    };
  }
  sent_ = stored;
  call_.post(split, [this, stored](const collective::EngineCall::Check& check) {
    stored_.wait(check);
    if (stored) describe(*stored);
    if (stored && stored->hash_option >= 0) {
      const std::uint64_t hash =
          header_word(sent_header((me() + 1) % ranks()), kHeaderOptions + stored->hash_option);
      call_.set_option(stored->hash_option, static_cast<std::int64_t>(hash));
    }
    for (int peer = 0; peer < ranks(); ++peer)
      std::memcpy(call_.summary_to(peer), sent_header(peer), static_cast<std::size_t>(layout().header_bytes));
  });
}

// Reserves the messages for each rank.
void EngineLane::describe(const Stored& stored) {
  std::vector<std::int64_t> messages(at(ranks()), 0);
  std::int64_t room = layout().sent_rows;  // of packed rows
  // A kernel that refuses its call sends no messages.
  const std::byte* const header = sent_header((me() + 1) % ranks());
  const bool refuses = header_packet(header, kHeaderTerms).word == 0;
  for (int peer = 0; peer < ranks() && !refuses; ++peer) {
    const std::int64_t most = stored.packed ? room : lane_.view().max_tokens;
    const std::int32_t count = stored.messages != nullptr
                                   ? scalars().messages[peer]
                                   : header_count(header, lane_.view().signals.first_messages + peer);
    // The counts of a damaged plan may be impossible: kernels send no rows beyond the outbox, and take other
    // impossible counts as 0.
    if (stored.packed) messages[at(peer)] = std::min<std::int64_t>(count, most);
    if (!stored.packed && count >= 0 && count <= most) messages[at(peer)] = count;
    room -= messages[at(peer)];
  }
  reserve(stored, messages);
}

void EngineLane::reserve(const Stored& stored, const std::vector<std::int64_t>& messages) {
  const EngineLayout& to = layout();
  collective::SentMessages sent(ranks(), stored.message_bytes);
  sent.first.base = memory();
  sent.agreed = stored.agreed;
  std::int64_t row_end = to.row_outbox;
  for (int peer = 0; peer < ranks(); ++peer) {
    const std::int64_t bytes = messages[at(peer)] * stored.message_bytes,
                       offset = stored.packed ? row_end : to.outbox + peer * to.block_bytes + to.header_bytes;
    sent.bytes[at(peer)] = sent.first.bytes[at(peer)] = bytes;
    sent.first.offsets[at(peer)] = offset;
    sent.stored[at(peer)] = memory() + offset;
    row_end += bytes;
  }
  if (!stored.packed) {
    sent.slots = memory() + to.inbox + to.header_bytes;
    sent.slot_bytes = to.block_bytes;
  }
  if (relay_) {
    const auto payload = static_cast<std::int32_t>(stored.metadata_offset);
    relay_->pack(
        {.rows = stored.packed,
         .sizes = {.payload = payload, .metadata = static_cast<std::int32_t>(stored.message_bytes) - payload},
         .sent_tokens = stored.sent_tokens,
         .adds = lane_.adds_by_node()},
        &sent);
  }
  messages_->reserve(std::move(sent));
}

// The messages that a call by a plan stores: each message of the plan, with `part_bytes`.
EngineLane::Stored EngineLane::by_plan(const Plan& plan, std::int64_t part_bytes) const {
  const PlanView view = view_plan(plan.storage(), lane_.view().plan_shape);
  return {.message_bytes = engine_message_bytes(part_bytes, exchange_.config.top_k),
          .messages = view.tokens_between + std::int64_t{me()} * ranks(),
          .packed = false,
          .metadata_offset = align_up(part_bytes, 16),
          .sent_tokens = view.sent_tokens,
          .planned = view.tokens_between};
}

// Diagnostics of a refused call are not reported for a later one.
void EngineLane::wait() {
  try {
    call_.wait();
  } catch (const UsageError&) {
    lane_.take_diagnostics();
    throw;
  } catch (const UnsupportedError&) {  // a peer captures
    lane_.take_diagnostics();
    throw;
  }
}

// Enqueues what the kernel of the receive phase reads. The exchange has ended.
void EngineLane::deliver(Stream stream) {
  if (!headers_delivered_) deliver_headers(stream);
  if (sent_ && sent_->planned != nullptr) clear_missing(stream);
}

// Clears the places of missing messages, which a damaged plan expects. They hold data of earlier calls, in
// which a kernel might read slot metadata of this call.
void EngineLane::clear_missing(Stream stream) {
  const EngineLayout& to = layout();
  for (int source = 0; source < ranks(); ++source) {
    const std::int64_t arrived =
        source == me() ? scalars().messages[me()] : messages_->incoming_bytes(source) / sent_->message_bytes;
    const std::int64_t first = std::max<std::int64_t>(arrived, 0),
                       end = std::min(scalars().planned[source], lane_.view().max_tokens);
    if (end <= first) continue;
    std::byte* at = memory() + to.inbox + source * to.block_bytes + to.header_bytes +
                    first * sent_->message_bytes + sent_->metadata_offset;
    check(cudaMemset2DAsync(at, static_cast<std::size_t>(sent_->message_bytes), 0,
                            static_cast<std::size_t>(sent_->message_bytes - sent_->metadata_offset),
                            static_cast<std::size_t>(end - first), handle_of(stream)),
          "clear messages that are missing");
  }
}

// Enqueues copies of the other ranks' headers to where kernels await them.
void EngineLane::deliver_headers(Stream stream) {
  const EngineLayout& to = layout();
  for (int peer = 0; peer < ranks(); ++peer) {
    std::memcpy(received_header(peer), call_.summary_from(peer), static_cast<std::size_t>(to.header_bytes));
  }
  const auto deliver = [&](int first, int end) {
    copy_rows_async(memory() + to.inbox + first * to.block_bytes, to.block_bytes, received_header(first),
                    to.header_bytes, to.header_bytes, end - first, stream);
  };
  deliver(0, me());
  deliver(me() + 1, ranks());
}

// --- operations --------------------------------------------------------------------------------------------

void EngineLane::dispatch_send(const DispatchCall& call, bool split, Stream stream) {
  const CallOptions options = options_of(exchange_.config, call);
  call_.begin(Operation::dispatch, options);
  Plan plan;
  run_or_refuse(Operation::dispatch,
                [&] { plan = lane_.dispatch(call, Phase::send, stream, keeps_inputs(split)).plan; });
  const std::int64_t part_bytes = device_message_layout(message_parts(exchange_.config, call)).bytes;
  Stored stored = by_plan(plan, part_bytes);
  if (call.plan.empty()) stored.messages = stored.planned = nullptr;  // the call headers say it
  if (exchange_.config.input == Input::replicated && call.plan.empty())
    stored.hash_option = input_hash_option(options);
  post(Operation::dispatch, split, stored, stream);
}

DispatchResult EngineLane::dispatch_receive(Stream stream) {
  wait();
  counts_.count_dispatch(messages_->within_node(), false);
  counts_.count_dispatch(messages_->between_nodes(), true);
  deliver(stream);
  std::int32_t arrived[kMaxDeviceRanks] = {};  // the send phase has set the flags of messages to this rank
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer == me()) continue;
    arrived[peer] = static_cast<std::int32_t>(messages_->incoming_bytes(peer) / sent_->message_bytes);
  }
  lane_.mark_arrived(arrived, stream);
  return lane_.dispatch_receive(stream);
}

void EngineLane::combine_send(const CombineCall& call, bool split, Stream stream) {
  CombineCall with_row_weights = call;
  if (call.weights_travel()) {
    // Partial sums are computed on the ranks of the experts, so the weights are sent there first.
    auto* const weights = reinterpret_cast<float*>(memory() + layout().row_weights);
    const RouteValuesCall values{
        .values = call.topk_weights, .plan = call.plan, .row_values = weights, .combine = &call};
    run(values, stream);
    with_row_weights.topk_weights = nullptr;
    with_row_weights.topk_weighted = false;
    with_row_weights.row_weights = weights;
  }
  call_.begin(Operation::combine, options_of(call));
  // With sums by node, the kernel also looks up this rank's own rows.
  const bool keeps = keeps_inputs(split) && !exchange_.has_node_sums();
  run_or_refuse(Operation::combine, [&] { lane_.combine(with_row_weights, Phase::send, stream, keeps); });
  const auto* rows = reinterpret_cast<const std::int32_t*>(memory() + layout().rows);
  post(Operation::combine, split,
       Stored{.message_bytes = layout().row_bytes, .messages = rows, .packed = true}, stream);
}

void EngineLane::combine_receive(Stream stream) {
  wait();
  counts_.count_combine(messages_->within_node(), false);
  counts_.count_combine(messages_->between_nodes(), true);
  deliver(stream);
  // This rank's own rows stay where they were packed.
  std::vector<ArrivedRows> rows;
  std::int64_t before = 0;
  for (int peer = 0; peer < ranks(); ++peer) {
    const std::int64_t sent = std::min<std::int64_t>(scalars().messages[peer], layout().sent_rows - before);
    if (peer == me()) {
      rows.push_back(
          {memory() + layout().row_outbox + before * layout().row_bytes, lane_.packs_own_rows() ? sent : 0});
    } else {
      rows.push_back({messages_->incoming(peer), messages_->incoming_bytes(peer) / layout().row_bytes});
    }
    before += sent;
  }
  lane_.find_rows(rows.data(), stream);
  if (lane_.adds_by_node()) lane_.add_on_nodes(stream);
  lane_.combine_receive(stream);
}

SmallResult EngineLane::run(const RouteValuesCall& call, Stream stream) {
  const Operation operation = call.needed_by();
  call_.begin(operation, call.combine != nullptr ? options_of(*call.combine) : CallOptions());
  run_or_refuse(operation, [&] { lane_.enqueue(call, Phase::send, stream); });
  post(operation, false, by_plan(call.plan, 0), stream);
  wait();
  const auto receive = [&] {
    deliver(stream);
    lane_.enqueue(call, Phase::receive, stream);
  };
  if (call.combine == nullptr) {
    receive();
  } else {
    run_or_refuse(operation, receive);  // the peers' combine goes on with another call
  }
  return {};
}

SmallResult EngineLane::run(const DispatchCountsCall& call, Stream stream) {
  call_.begin(call.operation, {});
  run_or_refuse(call.operation, [&] { lane_.enqueue(call, Phase::send, stream); });
  post(call.operation, false, std::nullopt, stream);
  wait();
  return {.counts = lane_.counts_of_headers(
              [&](int source) { return source == me() ? sent_header(source) : call_.summary_from(source); })};
}

SmallResult EngineLane::run(const MetadataCall& call, Stream stream) {
  std::int32_t count = call.count;
  const ScopedDevice device(exchange_.device);
  run_or_refuse(call.operation, [&] {
    if (call.device_count != nullptr) copy_async(&scalars().count, call.device_count, sizeof count, stream);
    // Also needed by the copy from scalars() of the call before.
    check(cudaStreamSynchronize(handle_of(stream)), "wait for a stream");
    if (call.device_count != nullptr) count = scalars().count;
    const std::int32_t most = std::numeric_limits<std::int32_t>::max() / ranks();
    if (count < 0 || count > most)
      throw UsageError(str("metadata: count = ", count, " on rank ", me(), ", must be 0 to ", most));
  });
  StepMetadata& all = scalars().metadata;
  all = exchange_metadata(call_, count, exchange_.rank);
  StepMetadata* const to = call.into != nullptr ? call.into : lane_.step_metadata();
  copy_async(to, &all, sizeof all, stream);
  return {.metadata = to};
}

}  // namespace ferry::cuda
