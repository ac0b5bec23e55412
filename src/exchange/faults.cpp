#include "exchange/faults.hpp"

#include "base/text.hpp"
#include "ferry/error.hpp"
#include "ferry/types.hpp"

namespace ferry {
namespace {

constexpr const char* kSourceRemedy = "; pass what dispatch returned";

std::string entry(const char* array, std::int64_t i, std::int64_t j) {
  return str(array, "[", i, ", ", j, "]");
}

const char* type_of(std::int64_t types, int shift) {
  return to_string(static_cast<DType>(types >> shift & 0xff));
}

}  // namespace

std::string text_of(SourceFault fault, int rank, const SourceFaultNumbers& n) {
  const std::string row = str("src_info[", n.a, "] = {", n.c, ", ", n.d, "}");
  switch (fault) {
    case SourceFault::tokens:
      return str("tokens = ", n.a, ", must be 0 to max_tokens = ", n.b);
    case SourceFault::counts:
      if (n.d == 0) {
        return str(entry("counts", n.a, n.b), " = ", n.c, ", must be 0: rank ", rank,
                   " has no rows of the group from rank ", n.b, kSourceRemedy);
      }
      return str(entry("counts", n.a, n.b), " = ", n.c, ", must be 0 to max_tokens x top_k = ", n.d,
                 kSourceRemedy);
    case SourceFault::shared_counts:
      return str(entry("counts", n.a, n.b), " = ", n.c, ", must be ", n.d, ": a shared expert has the ",
                 counted(n.limit, "token"), " of rank ", rank, " alone", kSourceRemedy);
    case SourceFault::capacity:
      return str("row_offsets end at ", counted(n.a, "row"), ", rank ", rank, " receives at most ", n.b,
                 kSourceRemedy);
    case SourceFault::row_offsets:
      return str("row_offsets[", n.a, "] = ", n.b, ", counts give ", n.c, kSourceRemedy);
    case SourceFault::info:
      return str(row, ", of rank ", n.peer, ", must be below {", n.limit, ", ", n.b, "} and not negative",
                 kSourceRemedy);
    case SourceFault::shared_row:
      return str(row, ", must be {", n.limit, ", ", n.b,
                 "}: rows of a shared expert are in the order of the tokens", kSourceRemedy);
    case SourceFault::other_expert:
      return str(row, " is a row of expert ", n.b, ", ", entry("topk_ids", n.c, n.d), " of rank ", rank,
                 " is another expert", kSourceRemedy, ", and its topk_ids");
    case SourceFault::twice:
      return str(row, ", of rank ", n.peer, ", is also in row ", n.b, kSourceRemedy);
    case SourceFault::missing:
      return str(entry("topk_ids", n.c, n.d), " = ", n.a, ", an expert of rank ", rank,
                 ", but src_info has no row of it", kSourceRemedy, ", and its topk_ids");
    case SourceFault::not_returned:
      return str(
          entry("topk_ids", n.c, n.d), " of rank ", rank, " is expert ", n.a, ": rank ", n.peer,
          " has returned no row for it; pass src_info, row_offsets and counts of one dispatch on every "
          "rank, and its topk_ids");
    case SourceFault::none:
      break;
  }
  return "the arrays contradict each other";
}

void raise_source_fault(SourceFault fault, int rank, const SourceFaultNumbers& numbers) {
  const std::string text = text_of(fault, rank, numbers);
  if (fault == SourceFault::not_returned) throw UsageError(str("ep_combine: ", text));
  throw UsageError(str("ep_combine: rank ", rank, ": ", text));
}

void raise_slice_fault(SliceFault fault, int rank, int other, std::int64_t mine, std::int64_t theirs) {
  switch (fault) {
    case SliceFault::tokens:
      throw UsageError(str("dispatch: ", counted(mine, "token"), " on rank ", rank, ", ", theirs, " on rank ",
                           other, ": the ranks of a sub-group (Placement::ep_tp) pass the same tokens"));
    case SliceFault::ids:
      throw UsageError(str("dispatch: the ids on rank ", rank, " are not those on rank ", other,
                           ": the ranks of a sub-group (Placement::ep_tp) pass the same tokens and ids"));
    case SliceFault::outputs:
      throw UsageError(str("combine: outputs is null for the ", counted(mine, "row"), " of rank ", rank));
    case SliceFault::result:
      throw UsageError(str("combine: result is null for the ", counted(mine, "token"), " of rank ", rank));
    case SliceFault::types:
      throw UsageError(str("combine: rank ", rank, " passes outputs of ", type_of(mine, 8),
                           " and a result of ", type_of(mine, 0), ", rank 0 ", type_of(theirs, 8), " and ",
                           type_of(theirs, 0), ": all ranks of experts in slices pass the same types"));
    case SliceFault::slice:
      throw UsageError(str("combine: the plan of rank ", rank, " is for ", counted(mine, "token"), " of the ",
                           theirs, " of its sub-group, ", other,
                           " expected: pass the plans of one dispatch"));
    case SliceFault::plan:
      break;
  }
  throw UsageError(
      str("combine: the plan of rank ", rank, " is damaged: its counts are not those of its total"));
}

}  // namespace ferry
