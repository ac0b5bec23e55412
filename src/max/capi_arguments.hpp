// The arguments that MAX's calls on host and on device memory share.
#pragma once

#include "base/text.hpp"
#include "capi/convert.hpp"
#include "ferry/error.hpp"
#include "ferry/max.hpp"
#include "max/words.hpp"

namespace ferry::capi {

struct MaxDispatchArguments {
  Tokens tokens;
  Ids ids;
  max::TokenFormat format;
};

template <class Arguments>
MaxDispatchArguments max_dispatch_of(const Arguments& args) {
  return {.tokens = to_tokens(args.input_tokens),
          .ids = to_ids(args.topk_ids, args.id_type),
          .format = {.format = to_format(args.format),
                     .global_scale = args.global_scale,
                     .input_scales = to_input_scales(args.input_scales, args.input_scale_count)}};
}

// Reads the ids that the caller passes in place of those of its last dispatch, if it does.
template <class Arguments, class Input>
void read_own_ids(const Arguments& args, Input* input) {
  if (args.own_ids == 0) return;
  input->topk_ids = to_ids(args.topk_ids, args.id_type);
  input->tokens = args.tokens;
  if (args.tokens < 0) throw UsageError(str("tokens = ", args.tokens, ", must be 0 or more"));
}

template <class Arguments>
max::CombineOutput max_output_of(const Arguments& args) {
  return {.output_tokens = to_result(args.output_tokens),
          .router_weights = args.router_weights,
          .shared_outputs = args.shared_outputs,
          .epilogue = to_epilogue(args.epilogue)};
}

}  // namespace ferry::capi
