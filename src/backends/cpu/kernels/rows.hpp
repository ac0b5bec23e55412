// Operations on one row: conversion to another type, multiplication by a weight.
#pragma once

#include "backends/cpu/kernels/copy.hpp"
#include "backends/cpu/kernels/values.hpp"

namespace ferry::cpu {
namespace {

constexpr std::int64_t kBlock = 512;  // columns; the intermediate results of a block stay in the L1 cache

// Calls write(out, first_column, columns) for each block. `out` is the address for the block's results: in
// the row itself, or a buffer that is then copied there, for a streaming store, or if `write` reads the row
// after it has written to `out`.
template <class Out, class Write>
FERRY_HD void for_blocks(void* row, std::int64_t columns, Store store, Write write, bool reads_row = false) {
  constexpr std::int64_t kBytes = sizeof(typename Out::Bits);
  alignas(kLine) char buffer[kBlock * kBytes];
  char* const out = static_cast<char*>(row);
  for (std::int64_t first = 0; first < columns; first += kBlock) {
    const std::int64_t count = min_of(kBlock, columns - first);
    if (store == Store::streaming || reads_row) {
      write(buffer, first, count);
      copy_by(store, out + first * kBytes, buffer, count * kBytes);
    } else {
      write(out + first * kBytes, first, count);
    }
  }
}

template <class Out, class In>
void convert_block(char* __restrict out, const char* __restrict in, std::int64_t columns) {
  for (std::int64_t c = 0; c < columns; ++c) store<Out>(out, c, Out::round(In::value(load<In>(in, c))));
}

template <class Out, class In>
void convert_as(void* out, const void* in, std::int64_t columns, Store store) {
  for_blocks<Out>(out, columns, store, [=](char* block, std::int64_t first, std::int64_t count) {
    convert_block<Out, In>(
        block, static_cast<const char*>(in) + first * static_cast<std::int64_t>(sizeof(typename In::Bits)),
        count);
  });
}

void convert_row(void* out, DType out_type, const void* in, DType in_type, std::int64_t columns,
                 Store store) {
  if (out_type == in_type) return copy(out, in, columns * (in_type == DType::fp32 ? 4 : 2), store);
  with_type(out_type, [=](auto to) {
    with_type(in_type, [=](auto from) { convert_as<decltype(to), decltype(from)>(out, in, columns, store); });
  });
}

template <class Type>
void weigh_block(char* __restrict out, const char* __restrict in, float weight, std::int64_t columns) {
  for (std::int64_t c = 0; c < columns; ++c) {
    store<Type>(out, c, Type::round(weight * Type::value(load<Type>(in, c))));
  }
}

template <class Type>
void weigh_as(void* out, const void* in, float weight, std::int64_t columns, Store store) {
  for_blocks<Type>(out, columns, store, [=](char* block, std::int64_t first, std::int64_t count) {
    weigh_block<Type>(
        block, static_cast<const char*>(in) + first * static_cast<std::int64_t>(sizeof(typename Type::Bits)),
        weight, count);
  });
}

void apply_weight(void* out, const void* in, DType type, float weight, std::int64_t columns, Store store) {
  with_type(type, [=](auto value) { weigh_as<decltype(value)>(out, in, weight, columns, store); });
}

}  // namespace
}  // namespace ferry::cpu
