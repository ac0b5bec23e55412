// Combine's kernel traits: facts about a call that are fixed when its kernel is compiled (why:
// dispatch_traits.cuh).
#pragma once

#include <type_traits>

#include "backends/cuda/combine/combine.hpp"

namespace ferry::cuda::inline FERRY_WIDTH {

struct GenericCombine {
  static constexpr bool kSpecialised = false, kMayPack = true, kShares = true, kToEveryRank = false;
};
// Expert outputs, staged rows and results have one type, and no values travel beside them. kWeights: weights
// travel. kShared: there are rows of shared experts to add.
template <Reduction kAs, DType kOf, bool kWeights, bool kShared>
struct SpecialisedCombine {
  static constexpr bool kSpecialised = true, kMayPack = false, kWeightsTravel = kWeights, kShares = kShared,
                        kToEveryRank = false;
  static constexpr Reduction kReduction = kAs;
  static constexpr DType kType = kOf;
};

// Traits of a combine in phases, between which an engine or the launch of two hops may carry the rows,
// packed.
template <class Fused>
struct SplitCombine : Fused {
  static constexpr bool kMayPack = true;
};

// Traits of a combine whose dispatch has sent every token to every rank: a rank also returns a sum for tokens
// without rows on it.
template <class Routed>
struct GatheredCombine : Routed {
  static constexpr bool kToEveryRank = true;
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

// Whether rows are stored packed, for an engine or the launch of two hops to carry.
template <class Traits>
__device__ __forceinline__ bool packs(const CombineArguments& call) {
  if constexpr (!Traits::kMayPack) return false;
  return call.packed.outbox != nullptr;
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

}  // namespace ferry::cuda::inline FERRY_WIDTH
