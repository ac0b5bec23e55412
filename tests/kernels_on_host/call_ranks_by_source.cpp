// Plans of CallRanks that the kernels of a combine by source make from MAX's arrays.
#include "backends/cuda/device/ptx.cuh"  // first: the stand-in for CUDA
//
#include <gtest/gtest.h>

#include "backends/cuda/by_source/source_rows.cuh"
#include "kernels_on_host/call_ranks.hpp"
#include "kernels_on_host/grid.hpp"
#include "seed.hpp"

namespace ferry::cuda {

// As CudaBackend::plan_return(), from the arrays that MAX's dispatch gives.
void CallRanks::plan_by_source(const contract::StepInputs& step) {
  for (int r = 0; r < size(); ++r) {
    Rank& rank = ranks_[static_cast<std::size_t>(r)];
    const oracle::RankRows& rows = step.positions.ranks[static_cast<std::size_t>(r)];
    const auto groups = rows.counts.size();
    std::vector<std::uint32_t> offsets;
    std::vector<std::int32_t> info, counts(groups * ranks_.size() + 1);
    for (std::size_t group = 0; group < groups; ++group)
      if (rows.counts[group] > 0) offsets.push_back(static_cast<std::uint32_t>(rows.row_offsets[group]));
    offsets.resize(groups + 1, static_cast<std::uint32_t>(rows.rows.size()));
    for (const oracle::RowInfo& row : rows.rows) {
      info.insert(info.end(), {row.source.token, row.source.slot});
      if (row.state != oracle::RowState::kept) continue;
      ++counts[static_cast<std::size_t>(row.group) * ranks_.size() +
               static_cast<std::size_t>(row.source.rank)];
    }
    std::vector<float> tags(rows.rows.size() + 1);
    Memory scratch = of_bytes(return_scratch_bytes(rank.view), std::byte{0});
    rank.plan_memory = of_bytes(view_plan(nullptr, rank.view.plan_shape).bytes, kPoison);
    rank.plan = view_plan(at(rank.plan_memory), rank.view.plan_shape);
    const PlanReturnArguments call{rank.view,
                                   rank.plan,
                                   {.src_info = info.data(),
                                    .row_offsets = offsets.data(),
                                    .counts = counts.data(),
                                    .ids = Ids(rank.ids.data()),
                                    .tokens = rank.tokens,
                                    .row_tags = tags.data(),
                                    .scratch = at(scratch)}};
    const auto run = [&](unsigned blocks, const auto& body) {
      on_host::Grid grid(test::seed());
      grid.add(blocks, kReturnThreads, body);
      grid.run();
    };
    run(3, [&](unsigned block) {
      clear_return(call);
      if (block == 0) CountChecker(call).run();
    });
    run(2, [&](unsigned) { cuda::place_rows(call); });
    run(1, [&](unsigned) { ReturnFinisher(call).run(); });
    ASSERT_EQ(rank.plan.header->magic, kPlanMagic) << "the arrays of rank " << r << " make no plan";
  }
}

}  // namespace ferry::cuda
