// The names and remedies of nvFuser's calls in place of those of ferry::Exchange.
#pragma once

#include "base/errors.hpp"

namespace ferry::nvfuser {

inline constexpr Phrase kDispatchWords[] = {
    {", or choose the format ", ", or construct the exchange with format = "},
    {", or receive in memory of your own", ""},  // a dispatch takes no memory
};

// A combine returns its rows in a dispatch.
inline constexpr Phrase kCombineWords[] = {
    {"dispatch: ", "combine: "},  {"refused dispatch ", "refused combine "},
    {"tokens: ", "rows: "},       {"tokens is an array of", "rows is an array of"},
    {"ids: ", "recv_src_rank: "}, {"weights: ", "recv_src_idx: "},
};

}  // namespace ferry::nvfuser
