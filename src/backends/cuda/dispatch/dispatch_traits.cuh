// Dispatch's kernel traits, facts about a call that are fixed when its kernel is compiled, and the kernels
// that have them.
//
// A call of few tokens takes about as long as its code takes to be fetched for the first time, and a
// specialised kernel has less code. So the common calls have kernels of their own, beside a generic one for
// every call.
#pragma once

#include "backends/cuda/dispatch/dispatch.hpp"
#include "format/encoding.hpp"

namespace ferry::cuda {

// Moves rows, or quantises them to fp8, to an MX format or to NVFP4. `microscaled`: to one of the latter two,
// in kernels that serve both.
enum class Quantisation { none, fp8, mx, nvfp4, microscaled };

constexpr Quantisation quantisation_of(const Encoding& encoding) {
  if (encoding.is_two_level()) return Quantisation::nvfp4;
  if (encoding.is_mx()) return Quantisation::mx;
  return encoding.quantises() ? Quantisation::fp8 : Quantisation::none;
}

// For groups of more than kNarrowRanks ranks, in every mode: dispatch_wide.cu.
const void* wide_dispatch_kernel(Phase phase);
std::int64_t lay_out_wide_block(DispatchArguments* call);  // as lay_out_block()

}  // namespace ferry::cuda

namespace ferry::cuda::inline FERRY_WIDTH {

struct GenericDispatch {
  static constexpr bool kSpecialised = false, kByPlan = false;
  static constexpr bool kMayReplicate = true;  // takes replicated input as well
  static constexpr bool kToEveryRank = false;  // tokens go to every rank (Transfer::gather)
  static constexpr int kGranulesAtOnce =
      7;  // in flight for a warp: a quarter of a row of 7,168 16-bit values
  static constexpr bool kFewTokens = false;  // metadata blocks; messages are indexed by token
  __device__ __forceinline__ static bool by_plan(const DispatchArguments& call) { return call.by_plan; }
  __device__ __forceinline__ static bool quantises(const DispatchArguments& call) {
    return call.encoding.quantises();
  }
  __device__ __forceinline__ static bool microscaled(const DispatchArguments& call) {
    return call.encoding.is_microscaled();
  }
  __device__ __forceinline__ static bool two_level(const DispatchArguments& call) {
    return call.encoding.is_two_level();
  }
  // Receivers weight or encode rows or compute dot products, so each row needs a whole warp.
  __device__ __forceinline__ static bool computes(const DispatchArguments& call) {
    return call.apply_weights || call.dot_rows != nullptr || call.input_scales != nullptr;
  }
};

// Rows are moved, not computed. `kMode`: many_tokens, few_tokens or by_plan.
template <Quantisation kQuantisation, DispatchMode kMode>
struct SpecialisedDispatch {
  static constexpr bool kSpecialised = true;
  static constexpr bool kByPlan = kMode == DispatchMode::by_plan,
                        kFewTokens = kMode == DispatchMode::few_tokens;
  static constexpr bool kMayReplicate = false;  // a plan has only the routes that the rank keeps
  static constexpr bool kToEveryRank = false;
  static constexpr int kGranulesAtOnce = kFewTokens ? 14 : 7;
  __device__ __forceinline__ static bool by_plan(const DispatchArguments&) { return kByPlan; }
  __device__ __forceinline__ static bool quantises(const DispatchArguments&) {
    return kQuantisation != Quantisation::none;
  }
  __device__ __forceinline__ static bool microscaled(const DispatchArguments&) {
    return kQuantisation != Quantisation::none && kQuantisation != Quantisation::fp8;
  }
  __device__ __forceinline__ static bool two_level(const DispatchArguments& call) {
    return kQuantisation == Quantisation::nvfp4 ||
           (kQuantisation == Quantisation::microscaled && call.encoding.is_two_level());
  }
  __device__ __forceinline__ static bool computes(const DispatchArguments&) { return false; }
};

// Traits of a dispatch whose tokens go to every rank.
template <class Routed>
struct GatheredDispatch : Routed {
  static constexpr bool kMayReplicate = false, kToEveryRank = true;
};

template <Quantisation kQuantisation>
using ManyTokens = SpecialisedDispatch<kQuantisation, DispatchMode::many_tokens>;
template <Quantisation kQuantisation>
using FewTokens = SpecialisedDispatch<kQuantisation, DispatchMode::few_tokens>;
template <Quantisation kQuantisation>
using ByPlan = SpecialisedDispatch<kQuantisation, DispatchMode::by_plan>;
template <Quantisation kQuantisation>
using GatheredFewTokens = GatheredDispatch<FewTokens<kQuantisation>>;

// The compiled kernels: translation units of about equal compile time (kernels/) instantiate these templates,
// for the table in dispatch_launch.cu.
template <class Traits>
const void* fused_kernel();

// Both phases of a split call.
template <class Traits>
const void* split_kernel();

// The kernel of fused calls from ids whose token count is known on the device only.
template <class Few, class Many>
const void* counting_kernel();

}  // namespace ferry::cuda::inline FERRY_WIDTH
