// Kernel traits: facts about a call that are fixed when its kernel is compiled.
//
// A call of few tokens takes about as long as its code takes to be fetched for the first time, and a
// specialised kernel has less code. So the common calls have kernels of their own, beside a generic one for
// every call.
#pragma once

#include <type_traits>

#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/dispatch/dispatch.hpp"

namespace ferry::cuda {

struct GenericDispatch {
  static constexpr bool kSpecialised = false, kByPlan = false;
  static constexpr int kGranulesAtOnce =
      7;  // in flight for a warp: a quarter of a row of 7,168 16-bit values
  static constexpr bool kFewTokens = false;  // metadata blocks; messages are indexed by token
  __device__ __forceinline__ static bool by_plan(const DispatchArguments& call) { return call.by_plan; }
  __device__ __forceinline__ static bool quantises(const DispatchArguments& call) {
    return call.encoding.quantises();
  }
  // Receivers weight rows or compute dot products, so each row needs a whole warp.
  __device__ __forceinline__ static bool computes(const DispatchArguments& call) {
    return call.apply_weights || call.dot_rows != nullptr;
  }
};

// Routes from ids; rows are moved, not computed.
template <bool kQuantises, bool kFew>
struct SpecialisedDispatch {
  static constexpr bool kSpecialised = true, kByPlan = false, kFewTokens = kFew;
  static constexpr int kGranulesAtOnce = kFew ? 14 : 7;
  __device__ __forceinline__ static bool by_plan(const DispatchArguments&) { return false; }
  __device__ __forceinline__ static bool quantises(const DispatchArguments&) { return kQuantises; }
  __device__ __forceinline__ static bool computes(const DispatchArguments&) { return false; }
};

// Routes from a plan; rows are moved, not computed.
template <bool kQuantises>
struct SpecialisedByPlan {
  static constexpr bool kSpecialised = true, kByPlan = true, kFewTokens = false;
  static constexpr int kGranulesAtOnce = 7;
  __device__ __forceinline__ static bool by_plan(const DispatchArguments&) { return true; }
  __device__ __forceinline__ static bool quantises(const DispatchArguments&) { return kQuantises; }
  __device__ __forceinline__ static bool computes(const DispatchArguments&) { return false; }
};

struct GenericCombine {
  static constexpr bool kSpecialised = false;
};
// Expert outputs, staged rows and results have one type, and no values travel beside them. kWeights: weights
// travel.
template <Reduction kAs, DType kOf, bool kWeights>
struct SpecialisedCombine {
  static constexpr bool kSpecialised = true, kWeightsTravel = kWeights;
  static constexpr Reduction kReduction = kAs;
  static constexpr DType kType = kOf;
};

template <class Traits>
__device__ __forceinline__ Reduction reduction_of(const CombineArguments& call) {
  if constexpr (Traits::kSpecialised) return Traits::kReduction;
  return call.reduction;
}

template <class Traits>
__device__ __forceinline__ bool weights_travel(const CombineArguments& call) {
  if constexpr (Traits::kSpecialised) return Traits::kWeightsTravel;
  return call.weights_travel;
}

template <DType kType>
using TypeConstant = std::integral_constant<DType, kType>;

// Calls use(TypeConstant<type>).
template <class Traits, class Use>
__device__ __forceinline__ void with_type(DType type, Use use) {
  if constexpr (Traits::kSpecialised) {
    use(TypeConstant<Traits::kType>{});
  } else {
    switch (type) {
      case DType::bf16:
        return use(TypeConstant<DType::bf16>{});
      case DType::fp16:
        return use(TypeConstant<DType::fp16>{});
      case DType::fp32:
        return use(TypeConstant<DType::fp32>{});
    }
  }
}

}  // namespace ferry::cuda
