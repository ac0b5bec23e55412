// The names and remedies of MAX's calls in place of those of ferry::Exchange.
#pragma once

#include "base/errors.hpp"

namespace ferry::max {

inline constexpr Phrase kWords[] = {
    {"hash of the replicated input's N and ids", "skip_a2a's hash of N and topk_ids"},
    {"dispatch: ", "ep_dispatch: "},
    {"combine: ", "ep_combine: "},
    {"refused dispatch ", "refused ep_dispatch "},
    {"refused combine ", "refused ep_combine "},
    {"tokens, but the tokens are ", "tokens, but input_tokens are "},
    {"tokens: ", "input_tokens: "},
    {"tokens[", "input_tokens["},
    {"tokens is an array of", "input_tokens is an array of"},
    {"ferry_tokens.type", "input_tokens.type"},
    {"ids: ", "topk_ids: "},
    {"ids is ", "topk_ids is "},
    {"outputs: ", "input_tokens: "},
    {"outputs is ", "input_tokens is "},
    {"outputs.type", "input_tokens.type"},
    {"result: ", "output_tokens: "},
    {"result is ", "output_tokens is "},
    {"or result for", "or output_tokens for"},
    {"result.type", "output_tokens.type"},
    {"configuration: shared_split", "max: allreduce_world_size"},
    {"shared_split: ", "allreduce_world_size: "},
    {"shared_split is ", "allreduce_world_size is "},
    {"configurations differ: input is replicated", "configurations differ: skip_a2a is set"},
    {"configurations differ: input is own", "configurations differ: skip_a2a is not set"},
    {" and own on rank ", " and not on rank "},
    {" and replicated on rank ", " and set on rank "},
    {"the split form of partial takes no topk_weights: pass row_weights",
     "with skip_a2a ep_combine_async takes no router_weights: call ep_fused_combine"},
    {"topk_weights", "router_weights"},
    // Their combines return no values.
    {", or call return_values() for row_values alone", ""},
    {": for row_values alone call return_values()", ""},
    // Arrays that overlap, and the one remedy that these calls have.
    {"tokens (", "input_tokens ("},
    {"outputs (", "input_tokens ("},
    {"result (", "output_tokens ("},
    {", or receive in memory of your own", ""},
    {", or choose the format ", ", or construct the exchange with format = "},
    // Dispatch takes no memory for tiles.
    {": pass memory.parts[1], or construct", ": construct"},
    {": pass memory.parts[1]", ": pass a format without tiles"},
    {", and pass memory.parts[1]", " and pass a format without tiles"},
};

}  // namespace ferry::max
