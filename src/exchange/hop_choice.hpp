// From how many tokens on the backend nvshmem takes two hops by default.
#pragma once

#include <cstdint>

namespace ferry {

// Most values (max_tokens * hidden) of a rank's tokens for which nvshmem takes one hop. A relay costs two
// more flags and carries the bytes once more within the node; one hop sends a token more often between nodes.
//
// Not measured: no run has had a network. `ferry model` has the two even at about two tokens of 7,168 values
// on nodes of 4 and 8 ranks, and at more on nodes of 2.
inline constexpr std::int64_t kOneHopValues = 2 * 7168;

}  // namespace ferry
