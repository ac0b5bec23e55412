#include "deep_ep/low_latency_pool.hpp"

#include <algorithm>

#include "base/text.hpp"
#include "exchange/configuration.hpp"
#include "ferry/error.hpp"
#include "format/parts.hpp"
#include "interpreter.hpp"

namespace ferry::python {

void LowLatencyPool::learn(const PyExchange& exchange) {
  const Config& config = exchange.config();
  plan_shape = ferry::plan_shape(config);
  local_experts = exchange.receive_sizes().groups;
  capacity = exchange.state().exchange.capacity();
  const Shape rows = {local_experts, capacity, config.hidden};
  values = {kBf16, rows};
  fp8_values = {kFp8, rows};
  // Neighbouring rows are neighbours in memory, and each expert has columns of its own.
  const std::int64_t column = align_up(capacity, kColumnAlignment);
  const auto strides = [&](std::int64_t columns) { return Shape{columns * column, 1, column}; };
  const std::int64_t blocks = (config.hidden + 127) / 128, words = (config.hidden + 511) / 512;
  scales = {kFp32, {local_experts, capacity, blocks}, strides(blocks)};
  packed_scales = {kInt32, {local_experts, capacity, words}, strides(words)};
  // As DeepEP returns them: [R*M, H/2, L] and [32, 4, rows of tiles, 4, tiles, L], with the last dimension
  // first in memory and then the third, the fifth, the first, the second and the fourth.
  const std::int64_t half = config.hidden / 2, wide = (config.hidden + 63) / 64, tall = row_tiles(capacity);
  nvfp4_values = {kByte, {capacity, half, local_experts}, {half, 1, capacity * half}};
  nvfp4_scales = {kFp8,
                  {32, 4, tall, 4, wide, local_experts},
                  {16, 4, wide * kTileBytes, 1, kTileBytes, tall * wide * kTileBytes}};
  counts = {kInt32, {local_experts}};
  plan = {kByte, {exchange.receive_sizes().plan_bytes}};
}

bool LowLatencyPool::may_acquire() const {
  const auto busy =
      std::count_if(exchanges.begin(), exchanges.end(), [](const auto& each) { return each->busy; });
  return static_cast<std::size_t>(busy) < kMost;
}

void LowLatencyPool::add(nb::object made) {
  auto& exchange = nb::cast<PyExchange&>(made);
  if (exchanges.empty()) learn(exchange);
  exchanges.push_back(std::make_unique<PooledExchange>(PooledExchange{std::move(made), &exchange}));
}

std::shared_ptr<LowLatencyPool> LowLatencyPools::of(const LowLatencyShape& shape) {
  for (const auto& pool : all_) {
    if (pool->shape == shape) return pool;
  }
  return all_.emplace_back(std::make_shared<LowLatencyPool>(shape));
}

PooledExchange& LowLatencyPools::acquire(LowLatencyPool& pool) {
  for (const auto& exchange : pool.exchanges) {
    if (exchange->busy) continue;
    exchange->others_refused = &pool != last_ && !pool.shape.on_device;
    if (exchange->others_refused) refuse_others(exchange.get());
    last_ = &pool;
    return *exchange;
  }
  if (!pool.may_acquire()) {
    throw UsageError(
        str(LowLatencyPool::kMost,
            " low-latency calls wait for their hooks to be called, which is the most there may be"));
  }
  make_one(pool, nullptr);
  return *pool.exchanges.back();
}

void LowLatencyPools::make_one(LowLatencyPool& pool, const PooledExchange* refused) {
  if (refused == nullptr || !refused->others_refused) refuse_others(refused);
  last_ = nullptr;
  const LowLatencyShape& shape = pool.shape;
  pool.add(make(shape.on_device, shape.max_tokens, shape.hidden, shape.experts, shape.top_k));
  last_ = &pool;
}

void LowLatencyPools::refuse_others(const PooledExchange* used) {
  std::vector<PooledExchange*> others;
  for (const auto& each : all_) {
    for (const auto& exchange : each->exchanges)
      if (exchange.get() != used) others.push_back(exchange.get());
  }
  for (PooledExchange* const other : others) {
    ++other->owed;
    if (!other->busy) settle(*other);
  }
}

void LowLatencyPools::settle(PooledExchange& exchange) {
  if (exchange.owed == 0) return;
  LaneCall call(*exchange.exchange, 0);
  const Framework framework = is_host(call.device()) ? Framework::numpy : Framework::torch;
  call.set_stream(stream_of(nb::none(), framework, call.device()));
  const GilRelease unlocked;
  for (; exchange.owed > 0; --exchange.owed)
    call.exchange().refuse(Operation::dispatch, UsageError(kMustAgree), call.options());
}

}  // namespace ferry::python
