"""Calls of Megatron-LM's inference dispatcher, over ferry.Exchange.

Megatron's dispatcher gathers the tokens, ids and weights of all ranks, lets each rank run its own experts on them, and
adds the ranks' outputs: Exchange.all_gather_v and Exchange.reduce_scatter_v. docs/guides/megatron.md shows the whole step.
"""

from __future__ import annotations

from typing import Any

import ferry
from ferry._call_shapes import in_words, refusing_misfits

__all__ = ["fused_metadata_update"]

# What Ferry's messages call the arguments, and what they are called here.
_WORDS = (("metadata: ", "fused_metadata_update: "), ("refused metadata ", "refused fused_metadata_update "), ("count: ", "local_tokens: "),
          ("count is ", "local_tokens is "), ("out: ", "step_metadata: "), ("out is ", "step_metadata is "), ("a count of ", "local_tokens = "))


@refusing_misfits("local_tokens")
def fused_metadata_update(local_tokens: int, local_buf: Any, symm_mem_hdl: ferry.Exchange, step_metadata: Any) -> None:
    """Writes [sum, prefix, maximum] of the ranks' token counts into step_metadata. Collective.

    local_tokens    this rank's count, or int32 [1] in the exchange's memory, on GPUs read when the call runs
    local_buf       Megatron's scratch memory, which Ferry does not need: neither read nor written; pass None
    symm_mem_hdl    the exchange of the expert-parallel group, in the place of Megatron's memory handle
    step_metadata   int32 [3], of the caller, in the exchange's memory; prefix is the sum over lower ranks

    The work runs on the current stream of the arrays' framework and can be captured into a CUDA graph. Errors are those of
    Exchange.metadata; bad arguments of one rank raise UsageError on every rank, apart from symm_mem_hdl.
    """
    if not isinstance(symm_mem_hdl, ferry.Exchange):
        raise ferry.UsageError(f"symm_mem_hdl: a {type(symm_mem_hdl).__name__}, must be the ferry.Exchange of the ranks")
    if step_metadata is None:
        text = "step_metadata: None, must be an int32 array [3] in the exchange's memory"
        symm_mem_hdl.refuse(text, operation="metadata")
        raise ferry.UsageError(text)
    with in_words(_WORDS):
        symm_mem_hdl.metadata(local_tokens, out=step_metadata)
