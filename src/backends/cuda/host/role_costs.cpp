#include "backends/cuda/host/block_roles.hpp"

#include <algorithm>
#include <charconv>

#include "backends/cuda/dispatch/send_partition.hpp"
#include "base/environment.hpp"
#include "base/text.hpp"
#include "ferry/error.hpp"

namespace ferry::cuda {
namespace {

// Units. N tokens of cost c quarter microseconds take c N / (4 B) us on B blocks.
constexpr const char* kDispatchUnit = "1/4 us of a block";
constexpr const char* kCombineUnit = "time of a block to add one row with its weight";
constexpr const char* kShareUnit = "share of the launch's blocks";

// Machines. All: H200, driver 580.159.04, routing synth:uniform, 256 experts, top-k 8, hidden 7,168.
constexpr const char* kTwoRanks = "2 x H200, 2026-11-21 (c451dcd)";
constexpr const char* kTwoRanksFp8 = "2 x H200, 2026-11-21 (a075746)";
constexpr const char* kTwoRanksMetadata = "2 x H200, 2026-11-22 (7cc98d1)";
constexpr const char* kFourRanks = "2 and 4 x H200, 2026-11-22 (81eb099)";
constexpr const char* kFourRanksFetch = "4 x H200, 2026-11-22 (44627f2)";
constexpr const char* kFourRanksCombine = "2 and 4 x H200, 2026-11-22 (b0b86cf)";
constexpr const char* kTwoRanksCombine = "2 x H200, 2026-11-22 (a7ee9e6)";
constexpr const char* kFourRanksLast = "4 x H200, 2026-11-22 (8e49afe)";

// Measurements: few SMs, so that one role is the bound.
constexpr const char* kDispatchSends =
    "--work dispatch --tokens 4096 --format bf16 --layout expert_major --sms 32,16";
constexpr const char* kDispatchReceives =
    "--work dispatch --tokens 4096 --format bf16 --layout rank_major --sms 32,16";
constexpr const char* kFetches = "--work plan --tokens 4096 --format bf16,fp8 --layout rank_major --sms 24";
constexpr const char* kEncodes =
    "--work dispatch --tokens 4096 --format fp8 --layout expert_major --sms 32,16";
constexpr const char* kEncodedReceives =
    "--work dispatch --tokens 4096 --format fp8 --layout rank_major --sms 32,16";
constexpr const char* kFew = "--work dispatch --tokens 128 --format bf16 --sms 32,0";
constexpr const char* kFewFp8 = "--work dispatch --tokens 128 --format fp8 --sms 32,0";
constexpr const char* kPartial =
    "--work combine --tokens 4096 --layout expert_major --reduction partial --sms 32,16";
constexpr const char* kSummed =
    "--work combine --tokens 4096 --layout rank_major --reduction partial --sms 24,16";
constexpr const char* kExact =
    "--work combine --tokens 4096 --layout expert_major --reduction exact --sms 32,16";
constexpr const char* kUnreduced =
    "--work combine --tokens 4096 --layout expert_major --reduction unreduced --sms 32,16";
constexpr const char* kAllSms =
    "--work combine --tokens 4096 --layout expert_major --reduction partial --sms 0";
constexpr const char* kFewCombine =
    "--work combine --tokens 128 --layout expert_major --reduction partial --sms 0";

// The one table. scripts/gpu_tune.py reads it: one entry a line.
//
// Constants that are compiled into the kernels decide the shares too, but take another build to change:
//   kManyTokens    256 tokens   from here on a dispatch waits for all counts and writes rows directly
//   kLLTokens      32 messages  up to here (times the other ranks) partial sums travel as LL packets
//   kWorkWarps     7 warps      of a dispatch block that move rows; with 15, registers spilled
//   kCombineWarps  11 warps     of a combine block that move rows; with 7, calls took a third longer
static_assert(kManyTokens == 256 && kLLTokens == 32 && kWorkWarps == 7);
// clang-format off
constexpr std::array<RoleCostEntry, kRoleCosts> kTable = {{
    {RoleCost::dispatch_plan, "dispatch_plan", 1.2, kDispatchUnit, kDispatchSends, kTwoRanks},
    {RoleCost::dispatch_store, "dispatch_store", 1.05, kDispatchUnit, kDispatchSends, kFourRanks},
    {RoleCost::dispatch_copy, "dispatch_copy", 0.9, kDispatchUnit, kDispatchReceives, kFourRanks},
    {RoleCost::dispatch_fetch, "dispatch_fetch", 0.55, kDispatchUnit, kFetches, kFourRanksFetch},
    {RoleCost::dispatch_receive, "dispatch_receive", 0.78, kDispatchUnit, kDispatchReceives, kFourRanks},
    {RoleCost::encode, "encode", 2.0, kDispatchUnit, kEncodes, kFourRanksLast},
    {RoleCost::encoded_store, "encoded_store", 0.4, kDispatchUnit, kEncodes, kTwoRanks},
    {RoleCost::encoded_copy, "encoded_copy", 0.6, kDispatchUnit, kEncodedReceives, kTwoRanks},
    {RoleCost::encoded_receive, "encoded_receive", 0.6, kDispatchUnit, kEncodedReceives, kFourRanks},
    {RoleCost::few_sender_share, "few_sender_share", 0.3125, kShareUnit, kFew, kTwoRanks},
    {RoleCost::few_sender_share_fp8, "few_sender_share_fp8", 0.375, kShareUnit, kFewFp8, kTwoRanksFp8},
    {RoleCost::metadata_block_share, "metadata_block_share", 0.0625, kShareUnit, kFew, kTwoRanksMetadata},
    {RoleCost::combine_staged, "combine_staged", 0.9, kCombineUnit, kPartial, kFourRanksCombine},
    {RoleCost::combine_store, "combine_store", 1.15, kCombineUnit, kPartial, kTwoRanksCombine},
    {RoleCost::combine_move, "combine_move", 0.9, kCombineUnit, kUnreduced, kTwoRanksCombine},
    {RoleCost::combine_read_summed, "combine_read_summed", 0.72, kCombineUnit, kSummed, kTwoRanksCombine},
    {RoleCost::combine_send_sum, "combine_send_sum", 0.65, kCombineUnit, kPartial, kTwoRanksCombine},
    {RoleCost::combine_push_sum, "combine_push_sum", 2.2, kCombineUnit, kSummed, kFourRanksFetch},
    {RoleCost::combine_push_row, "combine_push_row", 1.6, kCombineUnit, kExact, kFourRanksCombine},
    {RoleCost::combine_link, "combine_link", 0.2, kCombineUnit, kPartial, kFourRanksCombine},
    {RoleCost::combine_max_share, "combine_max_share", 0.45, kShareUnit, kAllSms, kFourRanksCombine},
    {RoleCost::combine_max_share_few, "combine_max_share_few", 0.5, kShareUnit, kFewCombine, kFourRanksLast},
}};
// clang-format on

constexpr bool in_order() {
  for (std::size_t i = 0; i < kRoleCosts; ++i)
    if (kTable[i].cost != static_cast<RoleCost>(i)) return false;
  return true;
}
static_assert(in_order(), "the table lists the costs in the order of RoleCost");

std::size_t index_of(const std::string& name) {
  const auto found = std::find_if(kTable.begin(), kTable.end(),
                                  [&](const RoleCostEntry& entry) { return entry.name == name; });
  if (found != kTable.end()) return static_cast<std::size_t>(found - kTable.begin());
  std::string names;
  for (const RoleCostEntry& entry : kTable) names += str(names.empty() ? "" : ", ", entry.name);
  throw UsageError(str("FERRY_BLOCK_ROLES: '", name, "', must be one of ", names));
}

}  // namespace

const std::array<RoleCostEntry, kRoleCosts>& role_cost_table() {
  return kTable;
}

RoleCosts::RoleCosts() {
  for (std::size_t i = 0; i < kRoleCosts; ++i) values_[i] = kTable[i].value;
}

RoleCosts::RoleCosts(const std::string& overrides) : RoleCosts() {
  for (std::size_t begin = 0; begin < overrides.size();) {
    const std::size_t comma = std::min(overrides.find(',', begin), overrides.size());
    const std::string item = overrides.substr(begin, comma - begin);
    begin = comma + 1;
    const std::size_t equals = std::min(item.find('='), item.size());
    const std::size_t index = index_of(item.substr(0, equals));
    const char *first = item.data() + std::min(equals + 1, item.size()), *last = item.data() + item.size();
    const auto [end, error] = std::from_chars(first, last, values_[index]);
    if (error != std::errc{} || end != last || !(values_[index] > 0))
      throw UsageError(
          str("FERRY_BLOCK_ROLES: '", item, "', must be ", kTable[index].name, "=a positive number"));
  }
}

const RoleCosts& role_costs() {
#if FERRY_TEST_HOOKS
  static const RoleCosts costs(environment_variable("FERRY_BLOCK_ROLES"));
#else
  static const RoleCosts costs;
#endif
  return costs;
}

}  // namespace ferry::cuda
