"""Expert parallelism for the Mixture-of-Experts models of Hugging Face transformers, with gradients.

    model = AutoModelForCausalLM.from_pretrained(name)               # the same weights on every rank
    ferry.integrations.transformers.distribute_experts(model, ferry.Group.torch(), max_tokens=4096)
    model.generate(**inputs, synced_gpus=True)                       # each rank its own inputs

distribute_experts() keeps this rank's experts of every layer and sets the model's experts implementation to "ferry", an entry
that it adds to transformers' table ALL_EXPERTS_FUNCTIONS. Such a layer sends each token to the ranks that hold its experts,
runs the experts there with the implementation that the model had before, and returns the weighted sums. Needs transformers
5.0 or newer with PyTorch.

    ferry.integrations.transformers.register(max_tokens=4096)        # loads this rank's weights only
    model = AutoModelForCausalLM.from_pretrained(
        name, distributed_config=DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="ferry"))

register() adds "ferry" to the ways in which transformers' own expert parallelism brings tokens to experts, its table
EPImplementationInterface. Needs transformers 5.24 or newer and accelerate. docs/guides/transformers.md has the whole picture.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import ferry
from ferry._call_shapes import SharedByCopies, in_words

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["distribute_experts", "expert_parameters", "register"]

NAME = "ferry"
"""The entry's name in both tables: `config._experts_implementation`, and `DistributedConfig.ep_implementation`."""

_WEIGHTS = ("gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias")
_STATE = "_ferry"
_ERROR_BYTES = 1024  # of a rank's refusal, as the ranks gather it

# What Ferry's messages call the arguments, and what they are called here.
_WORDS = (("dispatch: ", "experts: "), ("refused dispatch ", "refused experts "), ("x: ", "hidden_states: "), ("ids: ", "top_k_index: "),
          ("weights: ", "top_k_weights: "),
          ("construct the exchange with a larger max_tokens", "pass a larger max_tokens to distribute_experts or register"))


def distribute_experts(
    model: nn.Module, group: ferry.Group | ferry.Rank, *, max_tokens: int, capacity: int = 0, deadline: float = 30.0
) -> None:
    """Keeps this rank's experts of `model` and lets its layers run all experts over the ranks of `group`. Collective.

    model        a PreTrainedModel with Mixture-of-Experts layers, with the same weights on every rank, or on "meta"
    group        ferry.Group.torch() for the ranks of torch.distributed, or any other Group or Rank
    max_tokens   the most tokens that a rank passes to one forward: sequences times their length
    capacity     rows that a rank has room for, beyond which OverflowError is raised; 0: room for any routing
    deadline     seconds that a rank waits for its peers in a forward or backward, beyond which TimeoutError is raised

    Each rank keeps a block of neighbouring experts, of which the first ranks hold one more if the number is not divisible. The
    parameters stay the same objects with fewer experts. From then on every forward is collective: all ranks run the same
    layers in the same order, each with its own tokens. The first one makes the exchanges, which all layers share.

    Raises UsageError on every rank if one rank's arguments are wrong, if models differ, and if experts are already spread;
    UnsupportedError without transformers 5 and for experts whose weights it does not know, such as quantised ones.
    """
    table = _experts_table()
    rank = group if isinstance(group, ferry.Rank) else _joined(group)
    given = {"max_tokens": max_tokens, "capacity": capacity, "deadline": deadline}
    error: Exception | None = None
    layers: list[tuple[str, Any]] = []
    try:
        layers = _layers_to_spread(model, rank.size, given)
    except Exception as wrong:  # a rank that raised alone would leave its peers waiting
        error = wrong
    _agree(rank, [] if error else _description(model, layers, given), error)

    table.register(NAME, _run_experts)
    exchanges = _Exchanges(rank, given)
    functions = [_function_of(experts, table) for _, experts in layers]  # before a configuration that layers share names another
    for (_, experts), function in zip(layers, functions):
        placement = ferry.Placement.blocks(experts.num_experts, rank.size)
        mine = placement.experts_of(rank.index)
        setattr(experts, _STATE, _Spread(exchanges, experts.num_experts, function))
        for _, weight in experts.named_parameters(recurse=False):
            weight.grad = None
            weight.data = weight.data[mine[0] : mine[-1] + 1].clone() if mine else weight.data[:0].clone()
        experts.num_experts = len(mine)
        experts.config._experts_implementation = NAME


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of which this rank holds its experts only, by their names in `model`. Empty before distribute_experts().

    Their gradients are complete: the sum over all ranks' tokens. Those of all other parameters are of this rank's tokens and
    need a sum over ranks.
    """
    return {f"{name}.{each}" if name else each: weight for name, layer in model.named_modules() if hasattr(layer, _STATE)
            for each, weight in layer.named_parameters(recurse=False)}


def register(*, max_tokens: int, capacity: int = 0, deadline: float = 30.0) -> None:
    """Adds "ferry" to the values of `ep_implementation` in transformers' DistributedConfig, or replaces it. Not collective.

    max_tokens, capacity and deadline are those of distribute_experts(), for models that are loaded from then on; the ranks are
    those of the model's expert-parallel group, and max_tokens counts what one of them dispatches: of a batch that the ranks of a
    tensor-parallel group share, each dispatches its part. Forward and backward are collective in that group.

    Raises UnsupportedError if transformers has no such table, UsageError for values out of range.
    """
    try:
        from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    except ImportError as missing:
        raise ferry.UnsupportedError(f"register: needs transformers 5.24 or newer: {missing}") from missing
    given: dict[str, Any] = {"max_tokens": max_tokens, "capacity": capacity, "deadline": deadline}
    ferry.Config(experts=1, top_k=1, hidden=8, **given)  # raises for values out of range
    made: weakref.WeakKeyDictionary[Any, _Exchanges] = weakref.WeakKeyDictionary()  # by expert-parallel process group

    class FerryEP(EPImplementation):
        """One for each layer of experts. experts_forward and tp_mesh are attributes of its base class."""

        def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh):
            super().__init__(experts, ep_mesh, tp_mesh)
            self._held = _Held(experts.num_experts, self.experts_forward)
            self._experts = experts.num_experts * ep_mesh.size()
            ranks = ep_mesh.get_group()
            if ranks not in made:
                made[ranks] = _Exchanges(ferry.Group.torch(ranks).join(), given)
            self._exchanges = made[ranks]

        def __call__(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            tokens = _SharedTokens(self.tp_mesh, hidden_states.shape)
            hidden_states, top_k_index, top_k_weights = (tokens.part_of(each) for each in (hidden_states, top_k_index, top_k_weights))
            exchange = self._exchanges.get(self._experts, hidden_states, top_k_index.shape[-1])
            return tokens.whole_of(_exchange_rows(self._held, exchange, hidden_states, top_k_index, top_k_weights))

    EPImplementationInterface.register(NAME, FerryEP)


class _SharedTokens:
    """Tokens that all ranks of a tensor-parallel group pass: each takes a part, so that none is computed twice."""

    def __init__(self, tp_mesh: DeviceMesh, shape: torch.Size):
        self._mesh = tp_mesh
        self._shape = shape

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if self._mesh.size() == 1:
            return tensor
        replicated = DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)
        return replicated.redistribute(self._mesh, [Shard(0)]).to_local()

    def whole_of(self, part: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Shard

        if self._mesh.size() == 1:
            return part
        return DTensor.from_local(part, self._mesh, [Shard(0)], shape=self._shape, stride=(self._shape[1], 1)).full_tensor()


class _Exchanges(SharedByCopies):
    """The exchanges of one model. Layers of one shape share one, because plans of ferry.torch outlive the next call."""

    def __init__(self, rank: ferry.Rank, given: dict[str, Any]):
        self._rank = rank
        self._given = given
        self._made: dict[tuple[Any, ...], ferry.Exchange] = {}

    def get(self, experts: int, hidden_states: torch.Tensor, top_k: int) -> ferry.Exchange:
        """Collective where it makes one."""
        if hidden_states.device.type not in ("cpu", "cuda"):
            raise ferry.UsageError(f"hidden_states: a tensor on {hidden_states.device.type}, must be on cpu or cuda")
        hidden = hidden_states.shape[-1]
        key = experts, hidden, top_k, hidden_states.dtype, hidden_states.device
        if key not in self._made:
            where = {"memory": "device" if hidden_states.is_cuda else "host", "own_receive_buffers": False}
            config = _settings(experts, hidden, hidden_states.dtype) | self._given | where | {"top_k": top_k}
            self._made[key] = ferry.Exchange(self._rank, **config)
        return self._made[key]


class _Held(NamedTuple):
    """The experts of this rank in a layer."""

    number: int
    run: Callable[..., torch.Tensor]
    """run(rows [N, H], local ids [N, 1], ones [N, 1]): their outputs [N, H]."""


class _Spread(NamedTuple):
    """What a layer of experts needs besides its weights."""

    exchanges: _Exchanges
    experts: int
    """E, of all ranks."""
    function: Callable[..., torch.Tensor]
    """Runs the experts of this rank, as an entry in transformers' table does."""


def _run_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The entry in transformers' table: hidden_states [N, H], top_k_index and top_k_weights [N, K] to [N, H]. Collective."""
    spread: _Spread | None = getattr(self, _STATE, None)
    if spread is None:
        raise ferry.UsageError(f"experts_implementation {NAME!r}: the experts of this {type(self).__name__} are not spread over ranks: "
                               "call ferry.integrations.transformers.distribute_experts(model, group, max_tokens=...)")
    exchange = spread.exchanges.get(spread.experts, hidden_states, top_k_index.shape[-1])
    held = _Held(self.num_experts, functools.partial(spread.function, self))
    return _exchange_rows(held, exchange, hidden_states, top_k_index, top_k_weights)


def _exchange_rows(
    held: _Held, exchange: ferry.Exchange, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    import torch

    import ferry.torch

    with in_words(_WORDS):
        rows = ferry.torch.dispatch(exchange, hidden_states.contiguous(), top_k_index, top_k_weights.float())
    # At least one row, so that experts without tokens take part in the backward pass, which is collective: a row of zeros.
    count = min(max(int(rows.row_offsets[-1]), 1), rows.data.shape[0])
    outputs = rows.data
    if count > 0:
        row = torch.arange(count, dtype=torch.int32, device=outputs.device)
        local = torch.searchsorted(rows.row_offsets[1:], row, right=True).clamp_(max=held.number - 1)
        outputs = held.run(rows.data[:count], local[:, None], outputs.new_ones((count, 1)))
    return ferry.torch.combine(exchange, outputs, rows, row_weights=rows.weight)


def _settings(experts: int, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    import torch

    formats = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    if dtype not in formats:
        raise ferry.UsageError(f"hidden_states: {dtype} is not one of {', '.join(map(str, formats))}")
    return {"experts": experts, "hidden": hidden, "format": formats[dtype], "combine_type": formats[dtype]}


def _experts_table() -> Any:
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as missing:
        raise ferry.UnsupportedError(f"ferry.integrations.transformers: needs transformers 5.0 or newer: {missing}") from missing
    return ALL_EXPERTS_FUNCTIONS


def _joined(group: ferry.Group) -> ferry.Rank:
    if not isinstance(group, ferry.Group):
        raise ferry.UsageError(f"group: a {type(group).__name__}, must be a ferry.Group or ferry.Rank, such as ferry.Group.torch()")
    return group.join()


def _layers_to_spread(model: Any, ranks: int, given: dict[str, Any]) -> list[tuple[str, Any]]:
    """The layers of experts of `model` by name, all of which can be spread. Checks everything before anything changes."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ferry.UsageError(f"model: a {type(model).__name__}, must be a PreTrainedModel of transformers")
    # Attributes that transformers gives to each class of experts that runs the functions in its table.
    layers = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "has_bias") and hasattr(layer, "is_transposed")]
    if not layers:
        raise ferry.UsageError(f"model: {type(model).__name__} has no experts that run the functions in transformers' table "
                               "ALL_EXPERTS_FUNCTIONS: pass a Mixture-of-Experts model")
    for name, layer in layers:
        _check_layer(name, layer)
        weight = layer.down_proj
        hidden = weight.shape[2 if layer.is_transposed else 1]
        config = _settings(layer.num_experts, hidden, weight.dtype) | given | {"top_k": 1}
        ferry.plan_bytes(ferry.Config(**config), ranks)
    return layers


def _check_layer(name: str, layer: Any) -> None:
    from torch.distributed.tensor import DTensor

    if hasattr(layer, _STATE):
        raise ferry.UsageError(f"model: the experts of {name} are already spread over ranks: call distribute_experts once for a model")
    weights = dict(layer.named_parameters(recurse=False))
    if getattr(layer, "_is_expert_parallel", False) or any(isinstance(each, DTensor) for each in weights.values()):
        raise ferry.UsageError(f"model: transformers has already sharded the experts of {name}: for such a model call register() before "
                               f"it is loaded, with ep_implementation={NAME!r} in its DistributedConfig")
    unknown = sorted(set(weights) - set(_WEIGHTS)) + sorted(key for key, _ in layer.named_buffers(recurse=False))
    if unknown or "down_proj" not in weights or not all(each.is_floating_point() for each in weights.values()):
        raise ferry.UnsupportedError(f"model: {name}, a {type(layer).__name__}, has the weights {', '.join(weights) or 'none'}"
                                     f"{' and ' + ', '.join(unknown) if unknown else ''}: only {', '.join(_WEIGHTS)} of floating point "
                                     "numbers can be spread, so not quantised ones")
    for key, weight in weights.items():
        if weight.shape[0] != layer.num_experts:
            raise ferry.UsageError(f"model: {name}.{key} has {weight.shape[0]} experts, and num_experts is {layer.num_experts}: pass a "
                                   "model whose layers hold all experts")


def _function_of(layer: Any, table: Any) -> Callable[..., torch.Tensor]:
    """What runs the layer's experts today. `eager` is the forward of its class before transformers wrapped it."""
    name = layer.config._experts_implementation
    function: Callable[..., torch.Tensor] = table[name] if name in table else type(layer).forward.__wrapped__
    return function


def _description(model: Any, layers: list[tuple[str, Any]], given: dict[str, Any]) -> list[str]:
    shapes = sorted({f"{layer.num_experts} experts {tuple(layer.down_proj.shape[1:])} of {layer.down_proj.dtype}" for _, layer in layers})
    settings = [f"{name} = {value}" for name, value in given.items()]
    return [f"{type(model).__name__} with {len(layers)} layers of {', '.join(shapes)}", *settings]


def _agree(rank: ferry.Rank, description: list[str], error: Exception | None) -> None:
    """Raises an error of any rank, or the first difference between the ranks' descriptions, on every rank."""
    text = f"distribute_experts: {error}" if error else "\n".join(description)
    mine = (b"-" if error else b"+") + text.encode()[: _ERROR_BYTES - 1]
    gathered = [each.rstrip(b"\0").decode(errors="replace") for each in rank.all_gather(mine.ljust(_ERROR_BYTES, b"\0"))]
    if error:
        raise error
    for other, theirs in enumerate(gathered):
        if theirs[0] == "-":
            raise ferry.UsageError(f"rank {other} refused {theirs[1:]}")
    for other, theirs in enumerate(gathered):
        for one, another in zip(gathered[0][1:].split("\n"), theirs[1:].split("\n")):
            if one != another:
                raise ferry.UsageError(f"distribute_experts: ranks differ: {one} on rank 0 and {another} on rank {other}: "
                                       "pass the same on every rank")
