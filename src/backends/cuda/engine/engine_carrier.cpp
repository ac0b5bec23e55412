#include "backends/cuda/engine/engine_carrier.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backends/cuda/host/carrier.hpp"
#include "backends/cuda/operations/small_operations.hpp"
#include "backends/cuda/runtime/error.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "base/text.hpp"
#include "exchange/checks.hpp"
#include "exchange/configuration.hpp"
#include "exchange/gather.hpp"
#include "layout/exchange_layout.hpp"
#include "plan/shapes.hpp"

namespace ferry::cuda {

void copy_async(void* to, const void* from, std::int64_t bytes, Stream stream) {
  if (bytes == 0) return;
  check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, handle_of(stream)),
        "copy for an engine");
}

EngineCarrier::EngineCarrier(const ExchangeState& exchange, Lane& lane,
                             std::unique_ptr<Communicator> communicator,
                             std::shared_ptr<TransferThread> ordered, std::shared_ptr<void> registration)
    : exchange_(exchange),
      lane_(lane),
      registration_(std::move(registration)),
      headers_(2 * exchange.rank.size() * exchange.engine->header_bytes),
      scalars_(sizeof(Scalars)),
      counts_(exchange.config.experts),
      messages_(make_messages(*communicator).release()),
      call_(exchange.rank,
            {.communicator = std::move(communicator),
             .lane = lane.index(),
             .summary_bytes = exchange.engine->header_bytes,
             .deadline = exchange.config.deadline,
             .ordered = std::move(ordered)},
            std::unique_ptr<collective::MessageHops>(messages_)) {}

std::unique_ptr<collective::MessageHops> EngineCarrier::make_messages(Communicator& communicator) {
  const Topology& topology = exchange_.rank.topology();
  const bool relays = has_relays(exchange_.config, topology);
  auto memory = std::make_unique<DeviceHopMemory>(exchange_, lane_.index(), communicator, relays);
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
          add_for_relay(rows, out, count, stream);
        }});
  }
  return std::make_unique<collective::MessageHops>(
      topology, me(), collective::HopOptions{.relays = relays, .window = exchange_.config.window},
      std::move(memory));
}

// The sums of the `rows` for one source rank.
void EngineCarrier::add_for_relay(std::span<const ArrivedRows> rows, std::byte* out, std::int32_t* count,
                                  cudaStream_t stream) const {
  const Config& config = exchange_.config;
  RelaySumsArguments arguments{.lane = lane_.view(),
                               .combine_type = config.combine_type,
                               .row = combine_row_layout(config.combine_type, config.hidden, config.top_k),
                               .row_bytes = layout().row_bytes,
                               .label_offset = layout().label_offset,
                               .held = static_cast<int>(rows.size()),
                               .from = {},
                               .row_of = reinterpret_cast<std::int32_t*>(memory() + layout().row_of),
                               .place_of = reinterpret_cast<std::int32_t*>(memory() + layout().place_of),
                               .out = out,
                               .count = count};
  std::copy(rows.begin(), rows.end(), arguments.from);
  const std::size_t bytes = 4 * rows.size() * static_cast<std::size_t>(lane_.view().max_tokens);
  check(cudaMemsetAsync(arguments.row_of, 0, bytes, stream), "clear a relay's table of rows");
  launch_relay_sums(arguments, {stream});
}

// --- 1. behind the send phase ------------------------------------------------------------------------------

// While a call runs, the host reads how much it receives.
void EngineCarrier::require_no_capture(Operation operation, Stream stream) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(handle_of(stream), &status), "query the capture state of a stream");
  if (status == cudaStreamCaptureStatusNone) return;
  throw UnsupportedError(str(to_string(operation), ": the backend collective cannot be captured into a CUDA ",
                             "graph, because the host reads on rank ", me(),
                             " how much it receives: use the backend cuda"));
}

void EngineCarrier::begin(Operation operation, const ComparedOptions& options, CallPart part, Stream stream) {
  require_no_capture(operation, stream);
  if (part == CallPart::last) {
    call_.go_on();
  } else {
    call_.begin(operation, options, part == CallPart::first);
  }
  operation_ = operation;
  part_ = part;
}

void EngineCarrier::post(const Stored& stored, bool split, Stream stream) {
  stored_ = stored;
  lane_.refusing(operation_, stream, [&] { fetch(stream); });
  headers_delivered_ = false;
  agreed_ = nullptr;
  // The caller of a fused call enqueues nothing on the stream until the exchange has ended. Relays use it.
  if (!split && !relay_) {
    agreed_ = [this, stream] {
      const ScopedDevice device(exchange_.device);
      deliver_headers(stream);
      headers_delivered_ = true;
    };
  }
  call_.post(split, [this](const collective::EngineCall::Check& check) { prepare(check); });
}

// Enqueues copies to the host of what the exchange needs to know.
void EngineCarrier::fetch(Stream stream) {
  fetch_headers(stream);
  const std::int32_t* const planned = stored_.plan.tokens_between;
  if (packed()) {
    copy_async(scalars().messages, memory() + layout().rows, 4 * std::int64_t{ranks()}, stream);
  } else if (stored_.by_plan) {
    std::int32_t *to_ranks = scalars().messages, *from_ranks = scalars().planned;
    if (stored_.returns) std::swap(to_ranks, from_ranks);
    copy_async(to_ranks, planned + std::int64_t{me()} * ranks(), 4 * std::int64_t{ranks()}, stream);
    copy_rows({from_ranks, 4, planned + me(), 4 * std::int64_t{ranks()}, 4, ranks()}, stream);
  }
  fetched_.record(handle_of(stream));
}

// Enqueues copies of the headers for all ranks, except for the one for this rank, which is in the inbox.
void EngineCarrier::fetch_headers(Stream stream) {
  const EngineLayout& to = layout();
  copy_rows(
      {headers_.data(), to.header_bytes, memory() + to.outbox, to.block_bytes, to.header_bytes, ranks()},
      stream);
  copy_async(sent_header(me()), memory() + to.inbox + me() * to.block_bytes, to.header_bytes, stream);
}

// --- 2. in the thread of the exchange ----------------------------------------------------------------------

void EngineCarrier::prepare(const collective::EngineCall::Check& check) {
  fetched_.wait(check);
  if (stored_.content != Stored::Content::headers) describe();
  if (stored_.hash_option >= 0) {
    const std::uint64_t hash =
        header_word(sent_header((me() + 1) % ranks()), kHeaderOptions + stored_.hash_option);
    call_.set_option(stored_.hash_option, static_cast<std::int64_t>(hash));
  }
  for (int peer = 0; peer < ranks(); ++peer)
    std::memcpy(call_.summary_to(peer), sent_header(peer), static_cast<std::size_t>(layout().header_bytes));
}

std::int64_t EngineCarrier::message_bytes() const {
  return packed() ? layout().row_bytes : engine_message_bytes(stored_.part_bytes, exchange_.config.top_k);
}

// Reserves the messages for each rank.
void EngineCarrier::describe() {
  std::vector<std::int64_t> messages(at(ranks()), 0);
  std::int64_t room = layout().sent_rows;  // of packed rows
  // A kernel that refuses its call sends no messages.
  const std::byte* const header = sent_header((me() + 1) % ranks());
  const bool refuses = header_packet(header, kHeaderTerms).word == 0;
  for (int peer = 0; peer < ranks() && !refuses; ++peer) {
    const std::int64_t most = packed() ? room : lane_.view().max_tokens;
    const std::int32_t count = packed() || stored_.by_plan
                                   ? scalars().messages[peer]
                                   : header_count(header, lane_.view().signals.first_messages + peer);
    // The counts of a damaged plan may be impossible: kernels send no rows beyond the outbox, and take other
    // impossible counts as 0.
    if (packed()) messages[at(peer)] = std::min<std::int64_t>(count, most);
    if (!packed() && count >= 0 && count <= most) messages[at(peer)] = count;
    room -= messages[at(peer)];
  }
  reserve(messages);
}

void EngineCarrier::reserve(const std::vector<std::int64_t>& messages) {
  const EngineLayout& to = layout();
  collective::SentMessages sent(ranks(), message_bytes());
  sent.first.base = memory();
  sent.agreed = agreed_;
  std::int64_t row_end = to.row_outbox;
  for (int peer = 0; peer < ranks(); ++peer) {
    const std::int64_t bytes = messages[at(peer)] * message_bytes(),
                       offset = packed() ? row_end : to.outbox + peer * to.block_bytes + to.header_bytes;
    sent.bytes[at(peer)] = sent.first.bytes[at(peer)] = bytes;
    sent.first.offsets[at(peer)] = offset;
    sent.stored[at(peer)] = memory() + offset;
    row_end += bytes;
  }
  if (!packed()) {
    sent.slots = memory() + to.inbox + to.header_bytes;
    sent.slot_bytes = to.block_bytes;
  }
  if (relay_) {
    const auto payload = static_cast<std::int32_t>(metadata_offset());
    relay_->pack(
        {.rows = packed(),
         .sizes = {.payload = payload, .metadata = static_cast<std::int32_t>(message_bytes()) - payload},
         .sent_tokens = stored_.returns ? stored_.plan.received_token : stored_.plan.sent_tokens,
         .adds = stored_.adds_by_node},
        &sent);
  }
  messages_->reserve(std::move(sent));
}

// --- 3. before the receive phase ---------------------------------------------------------------------------

// Diagnostics of a refused call are not reported for a later one.
void EngineCarrier::wait() {
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

void EngineCarrier::deliver(Stream stream) {
  wait();
  if (stored_.content == Stored::Content::headers) return;  // the host reads them
  const auto rest = [&] {
    if (!headers_delivered_) deliver_headers(stream);
    if (stored_.by_plan) clear_missing(stream);
    if (operation_ == Operation::dispatch) mark_arrived(stream);
    if (packed()) find_rows(stream);
  };
  if (operation_ == Operation::dispatch) {
    counts_.count_dispatch(messages_->within_node(), false);
    counts_.count_dispatch(messages_->between_nodes(), true);
  } else if (packed()) {
    counts_.count_combine(messages_->within_node(), false);
    counts_.count_combine(messages_->between_nodes(), true);
  }
  if (part_ == CallPart::first)
    return lane_.refusing(operation_, stream, rest);  // the peers' combine goes on
  rest();
}

// Enqueues copies of the other ranks' headers to where kernels await them.
void EngineCarrier::deliver_headers(Stream stream) {
  const EngineLayout& to = layout();
  for (int peer = 0; peer < ranks(); ++peer) {
    std::memcpy(delivered_header(peer), call_.summary_from(peer), static_cast<std::size_t>(to.header_bytes));
  }
  const auto deliver = [&](int first, int end) {
    copy_rows({memory() + to.inbox + first * to.block_bytes, to.block_bytes, delivered_header(first),
               to.header_bytes, to.header_bytes, end - first},
              stream);
  };
  deliver(0, me());
  deliver(me() + 1, ranks());
}

// Clears the places of missing messages, which a damaged plan expects. They hold data of earlier calls, in
// which a kernel might read slot metadata of this call.
void EngineCarrier::clear_missing(Stream stream) const {
  const EngineLayout& to = layout();
  for (int source = 0; source < ranks(); ++source) {
    const std::int64_t arrived =
        source == me() ? scalars().messages[me()] : messages_->incoming_bytes(source) / message_bytes();
    const std::int64_t first = std::max<std::int64_t>(arrived, 0),
                       end = std::min(scalars().planned[source], lane_.view().max_tokens);
    if (end <= first) continue;
    std::byte* at = memory() + to.inbox + source * to.block_bytes + to.header_bytes +
                    first * message_bytes() + metadata_offset();
    check(cudaMemset2DAsync(at, static_cast<std::size_t>(message_bytes()), 0,
                            static_cast<std::size_t>(message_bytes() - metadata_offset()),
                            static_cast<std::size_t>(end - first), handle_of(stream)),
          "clear messages that are missing");
  }
}

// Sets the flags of the messages that have arrived. The send phase has set those of messages to this rank.
void EngineCarrier::mark_arrived(Stream stream) const {
  ArrivedMessages arguments{.lane = stored_.lane, .from = {}};
  for (int peer = 0; peer < ranks(); ++peer) {
    if (peer == me()) continue;
    arguments.from[peer] = static_cast<std::int32_t>(messages_->incoming_bytes(peer) / message_bytes());
  }
  kMarkArrivedKernel(arguments, {}, stream);
}

// Records where rows have arrived. Those of this rank stay where they were packed.
void EngineCarrier::find_rows(Stream stream) const {
  const EngineLayout& in = layout();
  FindRowsArguments arguments{.lane = lane_.view(),
                              .from = {},
                              .row_bytes = in.row_bytes,
                              .label_offset = in.label_offset,
                              .arrived = reinterpret_cast<LLPacket*>(memory() + in.arrived),
                              .most = in.received_rows};
  std::int64_t before = 0;
  for (int peer = 0; peer < ranks(); ++peer) {
    const std::int64_t sent = std::min<std::int64_t>(scalars().messages[peer], in.sent_rows - before);
    if (peer == me()) {
      arguments.from[peer] = {memory() + in.row_outbox + before * in.row_bytes, stored_.own_rows ? sent : 0};
    } else {
      arguments.from[peer] = {messages_->incoming(peer), messages_->incoming_bytes(peer) / in.row_bytes};
    }
    before += sent;
  }
  kFindRowsKernel(arguments, {}, stream);
}

// --- small calls -------------------------------------------------------------------------------------------

template <JoinsNumbers Call>
SmallResult EngineCarrier::run(const Call& call) {
  const Stream stream = call.options.stream;
  std::int32_t number = call.number.value;
  const ScopedDevice device(exchange_.device);
  lane_.refusing(call.operation, stream, [&] {
    lane_.require_usable(to_string(call.operation), pointers_of(call));
    if (call.number.on_device) copy_async(&scalars().count, call.number.device, sizeof number, stream);
    // Also needed by the copy from scalars() of the call before.
    check(cudaStreamSynchronize(handle_of(stream)), "wait for a stream");
    if (!call.number.on_device) return;
    number = scalars().count;
    check_number(call.operation, me(), number, Call::most(ranks()));
  });
  auto* const all =
      new (scalars().joined) typename Call::Result(join_numbers<Call>(call_, number, exchange_.rank));
  void* const into = call.into != nullptr ? call.into : lane_.joined();
  copy_async(into, all, sizeof *all, stream);
  return {.joined = into};
}

std::optional<SmallResult> EngineCarrier::run_on_host(const SmallCall& call) {
  return std::visit(
      [&](const auto& each) -> std::optional<SmallResult> {
        if constexpr (!requires { run(each); }) {
          return std::nullopt;
        } else {
          const Stream stream = each.options.stream;
          lane_.refusing(each.operation, stream, [&] { require_no_capture(each.operation, stream); });
          return run(each);
        }
      },
      call);
}

}  // namespace ferry::cuda
