// What is known of a call when its kernel is compiled. Kernels that know more are smaller, and a call of few
// tokens takes as long as it takes to get through its code for the first time: the common calls have kernels
// of their own, beside one for all.
#pragma once

#include <type_traits>

#include "backends/cuda/combine/combine.hpp"
#include "backends/cuda/dispatch/dispatch.hpp"

namespace ferry::cuda {

struct GenericDispatch {
  static constexpr bool kSpecialised = false, kReplays = false;
  static constexpr int kGranulesAtOnce = 7;  // of a share of a row: a quarter of 7,168 16-bit values
  static constexpr bool kByToken = false;    // messages lie by token: blocks of their own tell of them
  __device__ __forceinline__ static bool replays(const DispatchArguments& call) { return call.replay; }
  __device__ __forceinline__ static bool quantises(const DispatchArguments& call) {
    return call.format == FormatKind::fp8_e4m3;
  }
  // Something from rows, where they arrive.
  __device__ __forceinline__ static bool computes(const DispatchArguments& call) {
    return call.apply_weights || call.dot_rows != nullptr;
  }
};
// From ids, and nothing is computed.
template <bool kQuantises, bool kTokens>
struct SpecialisedDispatch {
  static constexpr bool kSpecialised = true, kReplays = false, kByToken = kTokens;
  static constexpr int kGranulesAtOnce = kTokens ? 14 : 7;
  __device__ __forceinline__ static bool replays(const DispatchArguments&) { return false; }
  __device__ __forceinline__ static bool quantises(const DispatchArguments&) { return kQuantises; }
  __device__ __forceinline__ static bool computes(const DispatchArguments&) { return false; }
};

// By a plan, and nothing is computed.
template <bool kQuantises>
struct SpecialisedResend {
  static constexpr bool kSpecialised = true, kReplays = true, kByToken = false;
  static constexpr int kGranulesAtOnce = 7;
  __device__ __forceinline__ static bool replays(const DispatchArguments&) { return true; }
  __device__ __forceinline__ static bool quantises(const DispatchArguments&) { return kQuantises; }
  __device__ __forceinline__ static bool computes(const DispatchArguments&) { return false; }
};

struct GenericCombine {
  static constexpr bool kSpecialised = false;
};
// Rows that come, travel and are added up in one type, and no values beside them. kWeights: weights travel.
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
