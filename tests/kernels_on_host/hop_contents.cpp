// The contents that ranks of a HopRun send, and the check that they have arrived.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include "kernels_on_host/hop_run.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "oracle/numbers.hpp"

namespace ferry::cuda {

std::vector<std::byte> HopRun::payload_of(int source, int token) const {
  std::vector<std::byte> made(kPayload);
  std::mt19937_64 random(number_ * 1000003 + at(source) * 1009 + at(token));
  for (std::byte& each : made) each = static_cast<std::byte>(random());
  return made;
}

std::array<LLPacket, HopRun::kTopK> HopRun::metadata_of(int source, int rank, int token) const {
  std::array<LLPacket, kTopK> made{};
  for (int k = 0; k < kTopK; ++k)
    made[at(k)] = {number_ << SlotMetadata::kTokenBits | at(token),
                   static_cast<std::uint64_t>(source * 100000 + rank * 1000 + token * 10 + k)};
  return made;
}

void HopRun::store_message(std::byte* block, int s, int d, int token, std::int32_t i) const {
  std::byte* to = block + header_bytes_ + i * kMessage;
  const auto payload = payload_of(s, token);
  std::copy(payload.begin(), payload.end(), to);
  const auto metadata = metadata_of(s, d, token);
  std::copy_n(reinterpret_cast<const std::byte*>(metadata.data()), kMetadata, to + kPayload);
}

void HopRun::post_header(int s, const std::vector<std::int32_t>& counts) {
  for (int d = 0; d < ranks_; ++d) {
    Rank& rank = rank_[at(s)];
    auto* header = reinterpret_cast<LLPacket*>(d == s ? rank.inbox.data() + s * block_bytes_
                                                      : rank.outbox.data() + d * block_bytes_);
    HeaderFacts facts;
    facts.operation = static_cast<std::uint8_t>(rank.call.operation);
    for (int i = 0; i < kHeaderCounts; ++i) header[i] = {number_, at(5 + i)};
    header[kHeaderFacts].word = facts.word();
    for (int w = 0; w < signals_.count_words; ++w) header[kHeaderCounts + w] = {number_, 0};
    for (int r = 0; r < ranks_; ++r) {
      const int i = signals_.first_messages + r;
      header[kHeaderCounts + i / 2].word |= static_cast<std::uint64_t>(counts[at(r)]) << (32 * (i % 2));
    }
  }
}

void HopRun::expect_messages(int s, int d, const std::vector<std::set<int>>& to) {
  const std::byte* block = rank_[at(d)].inbox.data() + s * block_bytes_;
  std::int32_t i = 0;
  for (std::size_t t = 0; t < to.size(); ++t) {
    if (!to[t].contains(d)) continue;
    const std::byte* message = block + header_bytes_ + i * kMessage;
    const auto token = static_cast<int>(t);
    const auto payload = payload_of(s, token);
    EXPECT_TRUE(std::equal(payload.begin(), payload.end(), message))
        << "payload " << i << " from " << s << " to " << d;
    const auto metadata = metadata_of(s, d, token);
    EXPECT_TRUE(std::equal(message + kPayload, message + kMessage,
                           reinterpret_cast<const std::byte*>(metadata.data())))
        << "metadata " << i << " from " << s << " to " << d;
    const auto* flags = reinterpret_cast<const Flag*>(block + flags_) + i * kQuarters;
    for (int f = 0; f < kQuarters; ++f) EXPECT_EQ(flags[f].value, number_);
    ++i;
  }
  for (; i < kTokens; ++i)
    EXPECT_NE((reinterpret_cast<const Flag*>(block + flags_) + i * kQuarters)->value, number_);
  const auto* header = reinterpret_cast<const LLPacket*>(block);
  EXPECT_EQ(header[kHeaderTerms].call, number_);
  const auto* ends = reinterpret_cast<const Flag*>(block + signals_.header_bytes);
  for (int p = 0; p < kPayloads; ++p) EXPECT_EQ(ends[p].value, number_);
}

void HopRun::expect_wire(const std::vector<std::vector<std::set<int>>>& to) {
  unsigned long long between = 0, within = 0;
  for (int s = 0; s < ranks_; ++s) {
    for (const std::set<int>& ranks : to[at(s)]) {
      std::set<int> nodes;
      for (const int d : ranks) {
        if (topology_.node_of(d) != topology_.node_of(s)) {
          nodes.insert(straight_ ? d : topology_.node_of(d));
          if (!straight_ && topology_.relay_of(s, topology_.node_of(d)) != d) ++within;
        } else if (d != s) {
          ++within;
        }
      }
      between += nodes.size();
    }
  }
  unsigned long long counted_between = 0, counted_within = 0, bytes_between = 0;
  for (const Rank& rank : rank_) {
    counted_within += rank.counts[0].messages;
    counted_between += rank.counts[1].messages;
    bytes_between += rank.counts[1].bytes;
  }
  EXPECT_EQ(counted_between, between);
  if (straight_ || topology_.nodes() == ranks_) {
    EXPECT_EQ(bytes_between, between * static_cast<unsigned long long>(kMessage));
  }
  EXPECT_EQ(counted_within, within);
}

oracle::Bytes HopRun::random_row(std::int64_t index) {
  oracle::Bytes row(at(row_bytes_));
  for (int c = 0; c < kHidden; ++c)
    oracle::store(DType::bf16, static_cast<float>(static_cast<int>(random_() % 4001) - 2000) / 37,
                  row.data() + 2 * c);
  for (int k = 0; k < kTopK; ++k) {
    const auto word = static_cast<std::uint32_t>(1u << (random_() % 32));
    std::memcpy(row.data() + row_.tail_offset + 4 * k, &word, 4);
  }
  const std::uint64_t label = packed_label(number_, index);
  std::memcpy(row.data() + row_.bytes, &label, 8);
  return row;
}

oracle::Bytes HopRun::sum_of(const std::vector<oracle::Bytes>& rows) const {
  oracle::Bytes sum = rows[0];
  for (int c = 0; c < kHidden; ++c) {
    float value = 0;
    for (const oracle::Bytes& row : rows) value += oracle::load(DType::bf16, row.data() + 2 * c);
    oracle::store(DType::bf16, value, sum.data() + 2 * c);
  }
  for (int k = 0; k < kTopK; ++k) {
    std::uint32_t joined = 0, word = 0;
    for (const oracle::Bytes& row : rows) {
      std::memcpy(&word, row.data() + row_.tail_offset + 4 * k, 4);
      joined |= word;
    }
    std::memcpy(sum.data() + row_.tail_offset + 4 * k, &joined, 4);
  }
  return sum;
}

}  // namespace ferry::cuda
