"""FlashInfer's communication backend "ferry". Imports flashinfer, so ferry.integrations.flashinfer imports it on request."""

from __future__ import annotations

from typing import Any

import torch
from flashinfer.moe_ep.core.comm.communication import MoEEpCommParams, MoEEpCommunication, MoEEpDispatchResult, register_communication

import ferry
from ferry._call_shapes import in_words

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

# What Ferry's messages call the arguments, and what they are called here.
_DISPATCH_WORDS = (("tokens: ", "hidden_states: "), ("tokens[0]", "hidden_states"), ("tokens[1]", "hidden_states_scale"),
                   ("ids: ", "topk_ids: "), ("weights: ", "topk_weights: "), ("max_tokens is", "max_tokens_per_rank is"),
                   ("construct the exchange with a larger max_tokens", "construct the layer with a larger max_tokens_per_rank"))
_CONSTRUCTION_WORDS = (("format raw: part 0 is", "hidden_states: a row is"), ("format raw: part 1 is", "hidden_states_scale: a row is"))
_COMBINE_WORDS = (("outputs: ", "expert_output: "), ("result: ", "output: "))


class Communication(MoEEpCommunication):
    """A rank receives each token once, with its ids and weights, and returns one row for it, which combine adds by token.

    Rows lie in the order of their source ranks, without gaps; those past the last one carry no token. Values and scales are
    moved as bytes, so any quantised or packed payload whose rows are multiples of 16 bytes may be passed.
    """

    supports_cuda_graph = False  # not tried

    def __init__(self, bootstrap: Any, params: MoEEpCommParams):
        """Collective."""
        super().__init__(bootstrap, params)
        self._combine_type = _TYPES.get(params.token_dtype, "bf16")
        self._settings(())
        self._rank = ferry.Group.torch(bootstrap.process_group).join()
        self._made: dict[tuple[Any, ...], ferry.Exchange] = {}
        self._exchange: ferry.Exchange | None = None
        self._plan: ferry.Plan | None = None

    @classmethod
    def is_platform_supported(cls) -> bool:
        return ferry.has_cuda() or not torch.cuda.is_available()

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        hidden_states_scale: torch.Tensor | None = None,
        runtime_max_tokens_per_rank: int | None = None,
        eplb_local_stats: torch.Tensor | None = None,
    ) -> MoEEpDispatchResult:
        """Collective. Arrays of the result are valid until the next dispatch."""
        parts = (hidden_states,) if hidden_states_scale is None else (hidden_states, hidden_states_scale)
        exchange = self._exchange_for(parts)
        try:
            if self._plan is not None:
                raise ferry.UsageError("dispatch: called twice without a combine between the calls")
            if eplb_local_stats is not None:
                raise ferry.UsageError("eplb_local_stats: must be None: the backend 'ferry' gathers no statistics")
            rows_of_rank = self._resolve_runtime_max_tokens_per_rank(runtime_max_tokens_per_rank)
            if len(hidden_states) > rows_of_rank:
                raise ferry.UsageError(f"hidden_states: {len(hidden_states)} tokens, runtime_max_tokens_per_rank = {rows_of_rank}: pass the "
                                       "largest number of tokens of any rank")
        except ValueError as wrong:
            exchange.refuse(str(wrong))
            raise
        with in_words(_DISPATCH_WORDS):
            rows = exchange.dispatch(tuple(part.contiguous() for part in parts), topk_ids.contiguous(),
                                     None if topk_weights is None else topk_weights.float().contiguous())
        self._exchange, self._plan = exchange, rows.plan
        count = self.ep_size * rows_of_rank
        used = torch.arange(count, device=hidden_states.device)[:, None] < rows.row_offsets[-1]
        local = rows.local_ids[:count]
        ids = torch.where(used & (local >= 0), local + self.ep_rank * self.num_local_experts, self.params.invalid_expert_id)
        return MoEEpDispatchResult(
            hidden_states=rows.parts[0][:count], topk_ids=ids, tokens_per_rank=rows_of_rank,
            topk_weights=None if topk_weights is None else rows.weight[:count],
            hidden_states_scale=None if hidden_states_scale is None else rows.parts[1][:count])

    def combine(self, expert_output: torch.Tensor, *, output: torch.Tensor | None = None) -> torch.Tensor:
        """Collective. expert_output [R * tokens_per_rank, H] or [R, tokens_per_rank, H] to [N, H], in `output` if it is given."""
        if self._exchange is None or self._plan is None:
            raise ferry.UsageError("combine: called without a dispatch before it")
        plan, self._plan = self._plan, None
        rows = expert_output.reshape(-1, expert_output.shape[-1])
        with in_words(_COMBINE_WORDS):
            result: torch.Tensor = self._exchange.combine(rows, plan, result=output)
        return result

    def destroy(self) -> None:
        """Not collective. Idempotent."""
        for exchange in self._made.values():
            exchange.destroy()
        self._made, self._exchange, self._plan = {}, None, None

    def _exchange_for(self, parts: tuple[torch.Tensor, ...]) -> ferry.Exchange:
        """Collective where it makes one: for each size of rows and each device."""
        for name, part in zip(("hidden_states", "hidden_states_scale"), parts):
            if part.ndim != 2 or part.device.type not in ("cpu", "cuda"):
                raise ferry.UsageError(f"{name}: shape {list(part.shape)} on {part.device.type}, must be [N, columns] on cpu or cuda")
        key = parts[0].device, tuple(part.shape[1] * part.itemsize for part in parts)
        if key not in self._made:
            settings = self._settings(key[1]) | {"memory": "device" if parts[0].is_cuda else "host"}
            self._made[key] = ferry.Exchange(self._rank, **settings)
        return self._made[key]

    def _settings(self, bytes_of_parts: tuple[int, ...]) -> dict[str, Any]:
        """Of the exchange, checked."""
        sizes = bytes_of_parts or (self.params.hidden_size * self.params.token_dtype.itemsize,)
        settings: dict[str, Any] = {
            "experts": self.params.num_experts, "top_k": self.params.top_k, "hidden": self.params.hidden_size,
            "max_tokens": self.params.max_tokens_per_rank, "layout": "rank_major", "combine_type": self._combine_type,
            "format": "raw:" + "+".join(map(str, sizes))}
        with in_words(_CONSTRUCTION_WORDS):
            ferry.plan_bytes(ferry.Config(**settings), self.ep_size)
        return settings


def register() -> None:
    register_communication("ferry")(Communication)
