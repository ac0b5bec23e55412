// all_gather_v and reduce_scatter_v over an engine. Each makes several calls of the engine: one in which the
// ranks exchange their counts, then one for each round of data. A round uses the memory for the rows of a
// combine, and is no larger. With two hops too, data goes straight to its ranks, because no relay needs the
// rows that it would forward.
#include <algorithm>
#include <cstring>
#include <utility>

#include "backends/cuda/engine/engine_lane.hpp"
#include "backends/cuda/runtime/stream.hpp"
#include "base/text.hpp"
#include "exchange/call_options.hpp"
#include "exchange/gather.hpp"

namespace ferry::cuda {

// The terms that a rank sends to the others.
struct EngineLane::GatherTermsOfCall {
  GatherTerms terms;
  // reduce_scatter_v: 1: `held` must be the sum of the counts. 0: the count was in device memory, so the rows
  // are at least as many.
  std::int64_t exact;

  static std::vector<GatherTerms> of(const std::vector<GatherTermsOfCall>& all) {
    std::vector<GatherTerms> terms;
    for (const GatherTermsOfCall& each : all) terms.push_back(each.terms);
    return terms;
  }
};

// This rank's count. One in device memory is read when the work before it on the stream has ended.
std::int64_t EngineLane::count_of(Operation operation, std::int64_t count, const std::int32_t* device_count,
                                  Stream stream) {
  if (device_count == nullptr) return count;
  run_or_refuse(operation, [&] {
    copy_async(&scalars().count, device_count, sizeof(std::int32_t), stream);
    check(cudaStreamSynchronize(handle_of(stream)), "wait for a stream");
    const std::int32_t found = scalars().count;
    if (found >= 0 && found <= count) return;
    throw UsageError(str(to_string(operation), ": a count of ", found, " in device memory on rank ", me(),
                         ", must be 0 to ", count));
  });
  return scalars().count;
}

// Sends this rank's terms to every rank. Returns those of all ranks.
std::vector<EngineLane::GatherTermsOfCall> EngineLane::exchange_terms(Operation operation,
                                                                      const GatherTermsOfCall& mine,
                                                                      const CallOption& same_everywhere) {
  call_.begin(operation, {&same_everywhere, 1});
  for (int peer = 0; peer < ranks(); ++peer) std::memcpy(call_.summary_to(peer), &mine, sizeof mine);
  call_.post(false);
  call_.wait();
  std::vector<GatherTermsOfCall> all(at(ranks()));
  for (int peer = 0; peer < ranks(); ++peer)
    std::memcpy(&all[at(peer)], call_.summary_from(peer), sizeof mine);
  return all;
}

// Bytes of a block that one rank sends another in a round; the same on all ranks. The memory for the rows of
// a combine is never smaller.
std::int64_t EngineLane::gather_round_bytes() const {
  const std::int64_t most_sent = std::int64_t{ranks()} * lane_.view().max_tokens,
                     rows = std::min(most_sent, layout().received_rows);
  return std::max<std::int64_t>(rows * layout().row_bytes / ranks() / 16 * 16, 16);
}

// Enqueues copies to the outbox of the bytes of each block from `begin` on, up to `round_bytes`. Returns
// where they lie.
collective::SentMessages EngineLane::pack_round(const std::vector<GatherBlock>& blocks, std::int64_t begin,
                                                std::int64_t round_bytes, Stream stream) {
  collective::SentMessages out(ranks(), layout().row_bytes);  // for Config::window
  out.straight = true;
  out.first.base = memory() + layout().row_outbox;
  std::int64_t end = 0;
  const std::byte* packed = nullptr;  // data at the end of the outbox
  std::int64_t packed_at = 0;
  for (int peer = 0; peer < ranks(); ++peer) {
    const GatherBlock& block = blocks[at(peer)];
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
  stored_.record(handle_of(stream));
  return out;
}

// Sends a block to every rank, in rounds. `receive(begin, bytes_of_round, block_of)` enqueues the use of the
// bytes from `begin` on: `block_of(source)` is the address of those from a rank, this rank included.
// `largest`: bytes of the largest block of any pair.
template <class Receive>
void EngineLane::send_in_rounds(Operation operation, const std::vector<GatherBlock>& blocks,
                                std::int64_t largest, Stream stream, Receive receive) {
  const std::int64_t round_bytes = gather_round_bytes();
  for (std::int64_t begin = 0; begin < largest; begin += round_bytes) {
    call_.begin(operation, {});
    collective::SentMessages out(0, 0);
    run_or_refuse(operation, [&] { out = pack_round(blocks, begin, round_bytes, stream); });
    call_.post(false, [this, out = std::move(out)](const collective::EngineCall::Check& check_wait) {
      stored_.wait(check_wait);
      messages_->reserve(out);
    });
    call_.wait();
    const auto receive_round = [&] {
      receive(begin, round_bytes, [&](int source) {
        return source == me() ? blocks[at(me())].data + begin : messages_->incoming(source);
      });
    };
    // After the last round the peers wait for nothing more.
    if (begin + round_bytes < largest) {
      run_or_refuse(operation, receive_round);
    } else {
      receive_round();
    }
  }
}

void EngineLane::all_gather_v(const AllGatherCall& call, Stream stream) {
  const ScopedDevice device(exchange_.device);
  run_or_refuse(Operation::all_gather_v, [&] { lane_.require_usable(call); });
  const std::int64_t count = count_of(Operation::all_gather_v, call.count, call.device_count, stream);
  const std::vector<GatherTerms> all = GatherTermsOfCall::of(exchange_terms(
      Operation::all_gather_v, {{count, call.capacity, call.place}, 0}, {"row_bytes", call.row_bytes}));
  check_all_gather(all, call.sub_group);
  const auto group = SubGroup::of(me(), call.sub_group, ranks());
  std::vector<GatherBlock> blocks(at(ranks()), GatherBlock{nullptr, 0});
  std::fill_n(blocks.begin() + static_cast<std::ptrdiff_t>(group.first), group.count,
              GatherBlock{static_cast<const std::byte*>(call.rows), count * call.row_bytes});
  send_in_rounds(Operation::all_gather_v, blocks, largest_count(all) * call.row_bytes, stream,
                 [&](std::int64_t begin, std::int64_t round_bytes, auto block_of) {
                   auto* out = static_cast<std::byte*>(call.gathered);
                   for (std::size_t i = 0; i < group.count; ++i) {
                     const std::int64_t block_bytes = all[group.first + i].count * call.row_bytes;
                     const std::int64_t bytes = bytes_in_round(block_bytes, begin, round_bytes);
                     const auto source = static_cast<int>(group.first + i);
                     // This rank's own rows may lie at their place already.
                     if (bytes > 0 && block_of(source) != out + begin)
                       copy_async(out + begin, block_of(source), bytes, stream);
                     out += block_bytes;
                   }
                 });
}

void EngineLane::reduce_scatter_v(const ReduceScatterCall& call, Stream stream) {
  const ScopedDevice device(exchange_.device);
  run_or_refuse(Operation::reduce_scatter_v, [&] { lane_.require_usable(call); });
  const std::int64_t count = count_of(Operation::reduce_scatter_v, call.count, call.device_count, stream);
  const std::vector<GatherTermsOfCall> told = exchange_terms(
      Operation::reduce_scatter_v, {{count, call.total, call.place}, call.device_count == nullptr ? 1 : 0},
      type_option("type", call.type));
  std::vector<GatherTerms> all = GatherTermsOfCall::of(told);
  for (int rank = 0; rank < ranks(); ++rank) {
    const std::int64_t sum = sum_of_counts(SubGroup::of(rank, call.sub_group, ranks()).terms(all));
    if (told[at(rank)].exact == 0 && all[at(rank)].held >= sum) all[at(rank)].held = sum;
  }
  check_reduce_scatter(all, call.sub_group);
  const auto group = SubGroup::of(me(), call.sub_group, ranks());
  const std::int64_t row_bytes = exchange_.config.hidden * bytes_of(call.type);
  const auto* rows = static_cast<const std::byte*>(call.rows);
  std::vector<GatherBlock> blocks;
  for (int peer = 0; peer < ranks(); ++peer) {
    blocks.push_back({rows, group.holds(peer) ? all[at(peer)].count * row_bytes : 0});
    rows += blocks.back().bytes;
  }
  std::vector<const std::byte*> addends(group.count);
  send_in_rounds(Operation::reduce_scatter_v, blocks, largest_count(all) * row_bytes, stream,
                 [&](std::int64_t begin, std::int64_t round_bytes, auto block_of) {
                   const std::int64_t bytes = bytes_in_round(count * row_bytes, begin, round_bytes);
                   if (bytes == 0) return;
                   for (std::size_t i = 0; i < group.count; ++i)
                     addends[i] = block_of(static_cast<int>(group.first + i));
                   lane_.add_blocks(addends, call.type, static_cast<std::byte*>(call.sums) + begin, bytes,
                                    stream);
                 });
}

}  // namespace ferry::cuda
