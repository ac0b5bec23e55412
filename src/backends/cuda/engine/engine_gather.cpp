// all_gather_v and reduce_scatter_v over an engine. Each makes several calls of the engine: one in which the
// ranks exchange their counts, then one for each round of data. A round uses the memory for the rows of a
// combine, and is no larger. With two hops too, data goes straight to its ranks, because no relay needs the
// rows that it would forward.
#include <algorithm>
#include <utility>

#include "backends/cuda/engine/engine_carrier.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "base/text.hpp"
#include "exchange/gather.hpp"

namespace ferry::cuda {

// This rank's count. One in device memory is read when the work before it on the stream has ended.
std::int64_t EngineCarrier::count_of(const GatherCall& call) {
  if (call.device_count == nullptr) return call.count;
  const Stream stream = call.options.stream;
  lane_.refusing(call.operation, stream, [&] {
    copy_async(&scalars().count, call.device_count, sizeof(std::int32_t), stream);
    check(cudaStreamSynchronize(handle_of(stream)), "wait for a stream");
    const std::int32_t found = scalars().count;
    if (found >= 0 && found <= call.count) return;
    throw UsageError(str(to_string(call.operation), ": a count of ", found, " in device memory on rank ",
                         me(), ", must be 0 to ", call.count));
  });
  return scalars().count;
}

// Bytes of a block that one rank sends another in a round; the same on all ranks. The memory for the rows of
// a combine is never smaller.
std::int64_t EngineCarrier::gather_round_bytes() const {
  const std::int64_t most_sent = std::int64_t{ranks()} * lane_.view().max_tokens,
                     rows = std::min(most_sent, layout().received_rows);
  return std::max<std::int64_t>(rows * layout().row_bytes / ranks() / 16 * 16, 16);
}

// Enqueues copies to the outbox of the bytes of each block from `begin` on, up to `round_bytes`. Returns
// where they lie.
collective::SentMessages EngineCarrier::pack_round(const GatherRounds& rounds, std::int64_t begin,
                                                   std::int64_t round_bytes, Stream stream) {
  collective::SentMessages out(ranks(), layout().row_bytes);  // for Config::window
  out.straight = true;
  out.first.base = memory() + layout().row_outbox;
  std::int64_t end = 0;
  const std::byte* packed = nullptr;  // data at the end of the outbox
  std::int64_t packed_at = 0;
  for (int peer = 0; peer < ranks(); ++peer) {
    const GatherRounds::Block& block = rounds.blocks()[at(peer)];
    const std::int64_t bytes = bytes_in_round(block.bytes, begin, round_bytes);
    if (peer == me() || bytes == 0) continue;
    // An all-gather has one block for all ranks.
    if (block.data != packed) {
      packed = block.data;
      packed_at = end;
      copy_async(memory() + layout().row_outbox + end, block.data + begin, bytes, stream);
      end += bytes;
    }
    out.first.bytes[at(peer)] = bytes;
    out.first.offsets[at(peer)] = packed_at;
  }
  fetched_.record(handle_of(stream));
  return out;
}

// Adds `blocks`, one for each rank of a sub-group, of values of `type`.
void EngineCarrier::add_blocks(std::span<const void* const> blocks, DType type, void* sums,
                               std::int64_t bytes, Stream stream) const {
  AddedBlocks arguments{};
  for (std::size_t i = 0; i < blocks.size(); ++i)
    arguments.block[i] = static_cast<const std::byte*>(blocks[i]);
  arguments.members = static_cast<std::int32_t>(blocks.size());
  arguments.out = static_cast<std::byte*>(sums);
  arguments.bytes = bytes;
  const int most_blocks = exchange_.blocks / exchange_.config.lanes;
  kAddBlocksKernels[static_cast<int>(type)](arguments, {.blocks = most_blocks}, stream);
}

SmallResult EngineCarrier::run(const GatherCall& given) {
  const Stream stream = given.options.stream;
  const ScopedDevice device(exchange_.device);
  const Operation operation = given.operation;
  lane_.refusing(operation, stream, [&] { lane_.require_usable(to_string(operation), pointers_of(given)); });
  GatherCall call = given;
  call.count = count_of(given);
  const GatherRounds rounds = exchange_terms(call_, call, exchange_.rank);
  const std::int64_t round_bytes = gather_round_bytes();
  for (std::int64_t begin = 0; begin < rounds.largest(); begin += round_bytes) {
    call_.begin(operation, {});
    collective::SentMessages out(0, 0);
    lane_.refusing(operation, stream, [&] { out = pack_round(rounds, begin, round_bytes, stream); });
    call_.post(false, [this, out = std::move(out)](const collective::EngineCall::Check& check_wait) {
      fetched_.wait(check_wait);
      messages_->reserve(out);
    });
    call_.wait();
    const auto receive = [&] {
      rounds.receive(
          begin, round_bytes,
          [&](int source) -> const std::byte* {
            return source == me() ? rounds.blocks()[at(me())].data + begin : messages_->incoming(source);
          },
          [&](std::byte* to, const std::byte* from, std::int64_t bytes) {
            // This rank's own rows may lie at their place already.
            if (from != to) copy_async(to, from, bytes, stream);
          },
          [&](const std::vector<const void*>& addends, std::byte* to, std::int64_t bytes) {
            add_blocks(addends, call.type, to, bytes, stream);
          });
    };
    // After the last round the peers wait for nothing more.
    if (begin + round_bytes < rounds.largest()) {
      lane_.refusing(operation, stream, receive);
    } else {
      receive();
    }
  }
  return {};
}

}  // namespace ferry::cuda
