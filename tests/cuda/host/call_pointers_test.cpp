// The caller's pointers: which of them the CUDA backend checks, and what it refuses. Host code: needs no GPU.
#include "backends/cuda/host/call_pointers.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/text.hpp"
#include "refusal.hpp"

namespace ferry::cuda {
namespace {

using Kind = MemoryFound::Kind;

constexpr MemoryFound kUsable{Kind::device, 0, true};

// An address that is different for each number, aligned to 16 bytes.
template <class T = void>
T* address(int number) {
  return reinterpret_cast<T*>(std::uintptr_t{0x10000} + 16 * static_cast<std::uintptr_t>(number));
}

std::vector<std::string> names_of(std::span<const CallPointer> pointers) {
  std::vector<std::string> names;
  for (const CallPointer& pointer : pointers) names.emplace_back(pointer.name);
  return names;
}

// Every pointer of the public structs, each at an address of its own. A new pointer changes a size.
static_assert(sizeof(ReceiveBuffers) == (kMaxParts + 8) * sizeof(void*) + 2 * sizeof(ReceiveBuffers::rows));
static_assert(sizeof(Tokens) == (2 * kMaxParts + 3) * sizeof(void*));
DispatchCall whole_dispatch() {
  int number = 0;
  DispatchCall call;
  for (const void*& part : call.tokens.parts) part = address(++number);
  call.tokens.count = 5;
  call.ids = Ids(address<const std::int64_t>(++number));
  call.weights = address<const float>(++number);
  call.tokens.device_count = address<const std::int32_t>(++number);
  call.plan = Plan::over(address(++number), 1);
  call.dot_rows = address(++number);
  call.global_scale = address<const float>(++number);
  call.input_scales = {address<const float>(++number), 3};
  ReceiveBuffers& memory = call.memory;
  for (void*& part : memory.parts) part = address(++number);
  memory.weight = address<float>(++number);
  memory.local_ids = address<std::int32_t>(++number);
  memory.group_of_row = address<std::int32_t>(++number);
  memory.plan = address(++number);
  memory.counts = address<std::int32_t>(++number);
  memory.row_offsets = address<std::int32_t>(++number);
  memory.dots = address<float>(++number);
  memory.count_sums = address<std::int32_t>(++number);
  return call;
}

CombineCall whole_combine() {
  CombineCall call;
  call.outputs.data = address(1);
  call.result.data = address(2);
  call.plan = Plan::over(address(3), 1);
  call.row_weights = address<const float>(4);
  call.topk_weights = address<const float>(5);
  call.row_values = address<const float>(6);
  call.route_values = address<float>(7);
  return call;
}

TEST(CallPointers, EveryPointerOfADispatchIsListed) {
  const CallPointers pointers = pointers_of(whole_dispatch());
  EXPECT_EQ(names_of(pointers), (std::vector<std::string>{"tokens",
                                                          "part 1 of tokens",
                                                          "part 2 of tokens",
                                                          "part 3 of tokens",
                                                          "ids",
                                                          "weights",
                                                          "device_count",
                                                          "plan",
                                                          "dot_rows",
                                                          "global_scale",
                                                          "input_scales",
                                                          "memory.parts[0]",
                                                          "memory.parts[1]",
                                                          "memory.parts[2]",
                                                          "memory.parts[3]",
                                                          "memory.weight",
                                                          "memory.local_ids",
                                                          "memory.group_of_row",
                                                          "memory.plan",
                                                          "memory.counts",
                                                          "memory.row_offsets",
                                                          "memory.dots",
                                                          "memory.count_sums"}));
  int number = 0;
  for (const CallPointer& pointer : std::span<const CallPointer>(pointers))
    EXPECT_EQ(pointer.address, address(++number));
}

TEST(CallPointers, EveryPointerOfTheOtherOperationsIsListed) {
  EXPECT_EQ(names_of(pointers_of(whole_combine())),
            (std::vector<std::string>{"outputs", "result", "plan", "row_weights", "topk_weights",
                                      "row_values", "route_values"}));
  const Plan plan = Plan::over(address(2), 1);
  EXPECT_EQ(names_of(pointers_of(
                RouteValuesCall{.from = address<float>(1), .plan = plan, .to = address<float>(3)})),
            (std::vector<std::string>{"values", "plan", "row_values"}));
  EXPECT_EQ(names_of(pointers_of(RouteValuesCall{.operation = Operation::return_values,
                                                 .from = address<float>(1),
                                                 .plan = plan,
                                                 .to = address<float>(3)})),
            (std::vector<std::string>{"row_values", "plan", "route_values"}));
  const MetadataCall metadata{{.number = address<std::int32_t>(1), .into = address<StepMetadata>(2)}};
  EXPECT_EQ(names_of(pointers_of(metadata)), (std::vector<std::string>{"device_count", "into"}));
}

TEST(CallPointers, InputsOfARankWithoutTokensAreNotListed) {
  DispatchCall call = whole_dispatch();
  call.tokens.count = 0;
  const std::vector<std::string> names = names_of(pointers_of(call));
  EXPECT_EQ(names.front(), "device_count");
  EXPECT_EQ(names.size(), 17u);
}

TEST(CallPointers, NullPointersAreNotListed) {
  EXPECT_TRUE(names_of(pointers_of(DispatchCall{})).empty());
  EXPECT_TRUE(names_of(pointers_of(CombineCall{})).empty());
}

std::string refusal(std::span<const CallPointer> pointers, const PointerCheck::Query& query) {
  return test::refusal([&] { PointerCheck(" on rank 3", 0, query).require_usable("dispatch", pointers); });
}

void expect_refusals_of_each(std::span<const CallPointer> pointers) {
  EXPECT_EQ(refusal(pointers, [](const void*) { return kUsable; }), "accepted");
  EXPECT_EQ(refusal(pointers, [](const void*) { return MemoryFound{Kind::pinned, -1, true}; }), "accepted");
  for (const CallPointer& bad : pointers) {
    const auto only_bad = [&](const MemoryFound& found) {
      return [&, found](const void* at) { return at == bad.address ? found : kUsable; };
    };
    EXPECT_EQ(
        refusal(pointers, only_bad({Kind::pageable, -1, false})),
        str("dispatch: ", bad.name, ": ", bad.address,
            " on rank 3 is pageable host memory, or no memory, which device 0 cannot access: pass device "
            "memory or pinned host memory"));
    EXPECT_EQ(
        refusal(pointers, only_bad({Kind::device, 1, false})),
        str("dispatch: ", bad.name, ": ", bad.address,
            " on rank 3 is memory of device 1, which device 0 of this call cannot access: pass memory of "
            "device 0"));
    EXPECT_EQ(refusal(pointers, only_bad({Kind::device, 1, true})), "accepted");
    const auto* off_by_half =
        reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(bad.address) + bad.alignment / 2);
    const CallPointer misaligned{bad.name, off_by_half, bad.alignment};
    EXPECT_EQ(refusal({&misaligned, 1}, [](const void*) { return kUsable; }),
              str("dispatch: ", bad.name, ": ", off_by_half, " on rank 3 is not a multiple of ",
                  bad.alignment, ": pass an aligned address"));
  }
}

TEST(PointerCheck, RefusesEachPointerWithItsNameItsMemoryAndTheRemedy) {
  expect_refusals_of_each(pointers_of(whole_dispatch()));
  expect_refusals_of_each(pointers_of(whole_combine()));
}

// The driver is asked once for each address.
TEST(PointerCheck, RepeatedCallsCostNoQuery) {
  int queries = 0;
  PointerCheck check(" on rank 0", 0, [&](const void*) {
    ++queries;
    return kUsable;
  });
  const CallPointers pointers = pointers_of(whole_combine());
  check.require_usable("combine", pointers);
  EXPECT_EQ(queries, 7);
  for (int call = 0; call < 10; ++call) check.require_usable("combine", pointers);
  EXPECT_EQ(queries, 7);
}

TEST(PointerCheck, RefusedPointersAreQueriedAgain) {
  MemoryFound found{Kind::pageable, -1, false};
  PointerCheck check(" on rank 0", 0, [&](const void*) { return found; });
  const CallPointers pointers = pointers_of(MetadataCall{{.number = address<std::int32_t>(1)}});
  EXPECT_THROW(check.require_usable("metadata", pointers), UsageError);
  EXPECT_THROW(check.require_usable("metadata", pointers), UsageError);
  found = kUsable;
  EXPECT_NO_THROW(check.require_usable("metadata", pointers));
}

}  // namespace
}  // namespace ferry::cuda
