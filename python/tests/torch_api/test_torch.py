"""Tensors as arguments and results; operators with gradients, recomputation, compilation, training."""

import contextlib
import copy
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ferry
import ferry.deep_ep as deep_ep
import ferry.torch
from oracle import random_ids
from torch_exchange import EXPERTS, HIDDEN, TOKENS, TOP_K, Watch, exchange_for, inputs_of

FFN = 24


@pytest.fixture(autouse=True)
def seeded(rng):
    torch.manual_seed(int(rng.integers(1 << 30)))
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_in_and_out(rng, dtype):
    given = [inputs_of(rng) for _ in range(4)]
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]

    def body(rank):
        x, ids, weights = given[rank.index]
        x = x.to(dtype)
        exchange = exchange_for(rank, format=name, combine_type=name, reduction="exact")
        rows = exchange.dispatch(x, ids, weights)
        total = int(rows.total)
        for tensor in (rows.data, rows.source, rows.weight, rows.counts, rows.plan.counts, rows.plan.storage):
            assert isinstance(tensor, torch.Tensor)
        assert rows.data.dtype == dtype and rows.total == int(rows.row_offsets[-1])
        for row in range(total):
            source, token, slot = rows.source[row].tolist()
            assert torch.equal(rows.data[row], given[source][0][token].to(dtype))
            assert rows.weight[row] == given[source][2][token, slot]
        y = exchange.combine(rows.data, rows.plan, row_weights=rows.weight)
        assert y.dtype == dtype
        scale = torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
        assert torch.allclose(y.float(), x.float() * scale, rtol=2e-2, atol=2e-2)

    ferry.Group.threads(4).run(body)


def test_ids_and_weights_of_any_strides(rng):
    given = [inputs_of(rng) for _ in range(2)]

    def in_columns(tensor):
        wide = torch.full((len(tensor), TOP_K + 3), 10**6, dtype=tensor.dtype)
        wide[:, :TOP_K] = tensor.detach()
        return wide[:, :TOP_K]

    def body(rank):
        exchange = exchange_for(rank, backend="cpu")
        x, ids, weights = given[rank.index]
        results = []
        for used_ids, used in [(ids, weights.clone()), (in_columns(ids), in_columns(weights)), (ids.T.contiguous().T, weights.T.contiguous().T)]:
            used.requires_grad_()
            rows = ferry.torch.dispatch(exchange, x, used_ids, used)
            y = ferry.torch.combine(exchange, rows.data * 3, rows, row_weights=rows.weight)
            (gradient,) = torch.autograd.grad((y * x).sum(), used)
            with torch.no_grad():
                assert torch.equal(ferry.torch.dispatch(exchange, x, used_ids, used).data, rows.data)
            plain = exchange.dispatch(x, used_ids, used.detach())
            assert torch.equal(exchange.combine(plain.data * 3, plain.plan, topk_weights=used.detach()), y)
            results.append((rows.data, rows.weight, y, gradient))
        for others in results[1:]:
            assert all(torch.equal(one, other) for one, other in zip(results[0], others))

    ferry.Group.threads(2).run(body)


def test_empty_tensors_are_arguments(rng):
    """An empty tensor has a null pointer, and is given all the same."""
    steps = [inputs_of(rng, tokens) for tokens in (TOKENS, 0)]

    def body(rank):
        exchange = exchange_for(rank, backend="cpu")
        for x, ids, weights in steps:
            rows = exchange.dispatch(x, ids, weights)
            assert rows.weight.shape == (exchange.capacity,)
            outputs = rows.data[: int(rows.total)].clone()
            again = exchange.dispatch(x, rows.plan, weights, dot_rows=outputs)
            assert again.dots.shape == again.weight.shape == (exchange.capacity,)
            values = again.dots[: len(outputs)].clone()
            y, d_weights = exchange.combine(outputs, rows.plan, topk_weights=weights, row_values=values)
            assert y.shape == x.shape and d_weights.shape == weights.shape
            rows, d_weights = exchange.combine_backward(x, rows.plan, weights, outputs)
            assert rows.weight.shape == rows.dots.shape == (exchange.capacity,) and d_weights.shape == weights.shape

    ferry.Group.threads(2).run(body)


def test_a_result_may_be_its_residual_and_no_other_tensor():
    def body(rank):
        exchange = ferry.Exchange(rank, experts=2, top_k=1, hidden=16, max_tokens=4)
        x, ids = torch.full((2, 16), 2, dtype=torch.bfloat16), torch.tensor([[1], [0]])
        rows = exchange.dispatch(x, ids)
        exchange.combine(rows.data * 3, rows.plan, residual=x, result=x)
        assert (x == 8).all()
        other = torch.zeros_like(x)
        with pytest.raises(ferry.UsageError, match="which the call writes, overlaps outputs"):
            exchange.combine(rows.data, rows.plan, result=rows.data[:2] if rank.index == 1 else other)
        with pytest.raises(ferry.UsageError, match="the lane's received rows"):
            exchange.dispatch(rows.data[:2] if rank.index == 1 else other, ids)
        rows = exchange.dispatch(x, ids)  # the refused one has ended the peer's plan
        assert (exchange.combine(rows.data, rows.plan) == 8).all()

    ferry.Group.threads(2).run(body)


def test_tensors_are_gathered_and_scattered():
    counts = [3, 0, 5, 1]

    def body(rank):
        exchange = exchange_for(rank, backend="cpu")
        mine = torch.full((counts[rank.index], HIDDEN), rank.index, dtype=torch.bfloat16)
        gathered = exchange.all_gather_v(mine, torch.empty(9, HIDDEN, dtype=torch.bfloat16))
        assert gathered[:, 0].tolist() == [0] * 3 + [2] * 5 + [3]
        sums = torch.full_like(mine, -7)
        assert exchange.reduce_scatter_v(gathered + 1, sums) is sums
        assert torch.equal(sums, torch.full_like(mine, 4 * (rank.index + 1)))
        with pytest.raises(ferry.UsageError, match="out: an array of NumPy, but rows is an array of PyTorch"):
            exchange.all_gather_v(mine, np.empty((9, HIDDEN), np.float32))

    ferry.Group.threads(4).run(body)


def test_fp8_tensors(rng):
    given = [inputs_of(rng) for _ in range(2)]

    def body(rank):
        x, ids, weights = given[rank.index]
        rows = exchange_for(rank, format="fp8-columns").dispatch(x, ids, weights)
        assert rows.data.dtype == torch.float8_e4m3fn and rows.scales.dtype == torch.float32 and rows.scales.stride(0) == 1
        for row in range(int(rows.total)):
            source, token, _ = rows.source[row].tolist()
            again = rows.data[row].float() * rows.scales[row, 0]
            assert torch.allclose(again, given[source][0][token], rtol=0.07, atol=0.02)

    ferry.Group.threads(2).run(body)


def test_an_exchange_refuses_tensors_that_require_gradients(rng):
    x, ids, weights = inputs_of(rng)
    x.requires_grad_()

    def body(rank):
        exchange = exchange_for(rank)
        with pytest.raises(ferry.UsageError, match="tokens: requires a gradient"):
            exchange.dispatch(x, ids, weights)
        with torch.no_grad():
            exchange.dispatch(x, ids, weights)
        exchange.dispatch(x.detach(), ids, weights)
        with pytest.raises(ferry.UsageError, match="tokens: tensors of torch.float32 on meta are not supported"):
            exchange.dispatch(x.detach().to("meta"), ids, weights)

    ferry.Group.threads(1).run(body)


def dense(x, ids, weights, scale):
    """y = sum of weight * scale[expert] * x, in float64."""
    used = ids >= 0
    factor = scale.double()[ids.clamp(min=0)] * weights.double() * used
    return x.double() * factor.sum(1, keepdim=True)


@pytest.mark.parametrize("layout", ["expert_major", "expert_padded"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("watched", [True, False])
def test_gradients_agree_with_a_dense_sum(rng, layout, weighted, watched):
    given = [inputs_of(rng) for _ in range(4)]
    scale = torch.rand(EXPERTS) + 0.5
    dy = [torch.tensor(rng.standard_normal((TOKENS, HIDDEN)), dtype=torch.float32) for _ in range(4)]

    def body(rank):
        x, ids, weights = (tensor.clone() for tensor in given[rank.index])
        exchange = exchange_for(rank, layout=layout, alignment=2 if layout == "expert_major" else 1)
        x.requires_grad_()
        weights.requires_grad_(weighted)
        with Watch() if watched else contextlib.nullcontext():
            rows = ferry.torch.dispatch(exchange, x, ids, weights if weighted else None)
            mine = scale[rank.index * 2 : rank.index * 2 + 2]
            if layout == "expert_padded":
                outputs = rows.data * mine[:, None, None]
            else:
                row = torch.arange(len(rows.data))
                group = (row[:, None] >= rows.row_offsets[None, 1:-1]).sum(1)
                outputs = rows.data * mine[group][:, None]
            y = ferry.torch.combine(exchange, outputs, rows, row_weights=rows.weight if weighted else None)
            y.backward(dy[rank.index])
        x64, w64 = x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
        expected = dense(x64, ids, w64 if weighted else torch.ones_like(w64), scale)
        expected.backward(dy[rank.index].double())
        assert torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.allclose(x.grad.double(), x64.grad, rtol=1e-5, atol=1e-5)
        if weighted:
            assert torch.allclose(weights.grad.double(), w64.grad, rtol=1e-4, atol=1e-4)

    ferry.Group.threads(4).run(body)


@pytest.mark.parametrize(("format", "combine_type"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp32", "fp32")])
@pytest.mark.parametrize("outputs_type", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weighted", [True, False])
def test_gradients_of_outputs_of_any_type(rng, format, combine_type, outputs_type, weighted):
    given = [inputs_of(rng) for _ in range(2)]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[format]

    def body(rank):
        x, ids, weights = (tensor.clone() for tensor in given[rank.index])
        x = (x / 4).to(dtype).requires_grad_()
        weights.requires_grad_(weighted)
        exchange = exchange_for(rank, format=format, combine_type=combine_type)
        rows = ferry.torch.dispatch(exchange, x, ids, weights if weighted else None)
        outputs = rows.data.to(outputs_type)
        y = ferry.torch.combine(exchange, outputs, rows, row_weights=rows.weight if weighted else None)
        assert y.dtype == outputs_type
        y.float().square().sum().backward()
        assert x.grad.dtype == dtype
        x64, w64 = x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
        dense(x64, ids, w64 if weighted else torch.ones_like(w64), torch.ones(EXPERTS)).square().sum().backward()
        assert torch.allclose(x.grad.double(), x64.grad, rtol=3e-2, atol=3e-2)
        if weighted:
            assert torch.allclose(weights.grad.double(), w64.grad, rtol=3e-2, atol=5e-2)

    ferry.Group.threads(2).run(body)


def test_gradients_of_more_or_fewer_weights_than_outputs(rng):
    x, ids, weights = inputs_of(rng)
    dy = torch.tensor(rng.standard_normal((TOKENS, HIDDEN)), dtype=torch.float32)

    def body(rank):
        exchange = exchange_for(rank)

        def gradients(outputs_of, weights_of):
            given = x.clone().requires_grad_(), weights.clone().requires_grad_()
            rows = ferry.torch.dispatch(exchange, given[0], ids, given[1])
            total = int(rows.row_offsets[-1])
            outputs, weight = outputs_of(rows.data, total), weights_of(rows.weight, total)
            ferry.torch.combine(exchange, outputs, rows, row_weights=weight).backward(dy)
            return [tensor.grad for tensor in given]

        choices = (lambda rows, total: rows, lambda rows, total: rows[:total],
                   lambda rows, total: torch.cat((rows, torch.ones_like(rows[:2]))))
        expected = gradients(choices[0], choices[0])
        for outputs_of in choices:
            for weights_of in choices:
                assert all(map(torch.equal, gradients(outputs_of, weights_of), expected))

    ferry.Group.threads(1).run(body)


def test_a_layer_under_autocast(rng):
    def body(rank):
        layer = ferry.torch.MoE(rank, experts=EXPERTS, top_k=EXPERTS, hidden=HIDDEN, ffn=FFN, max_tokens=TOKENS)
        x, _, _ = inputs_of(rng)

        def step(mixed):
            layer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                y = layer(x)
            y.float().square().mean().backward()
            return y, [parameter.grad.clone() for parameter in layer.parameters()]

        (y, gradients), (mixed, of_mixed) = step(False), step(True)
        assert y.dtype == torch.float32 and mixed.dtype == torch.bfloat16
        for one, other in zip(gradients, of_mixed):
            assert other.dtype == torch.float32 and float((one - other).norm()) < 0.1 * float(one.norm())

    ferry.Group.threads(1).run(body)


def test_copies_of_a_layer_share_its_exchange(rng, tmp_path):
    """Deep copies, averages and saved layers compute what the layer does, and train by themselves."""
    x, _, _ = inputs_of(rng)

    def body(rank):
        layer = ferry.torch.MoE(rank, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, ffn=FFN, max_tokens=TOKENS)
        whole = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), layer)
        path = tmp_path / f"layer{rank.index}.pt"
        torch.save(whole, path)
        averaged = torch.optim.swa_utils.AveragedModel(whole, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        copies = [copy.deepcopy(whole), copy.copy(whole), torch.load(path, weights_only=False), averaged.module]
        y = whole(x)
        for copied in copies:
            assert copied[1].exchange is layer.exchange and torch.equal(copied(x), y)
        other = copies[0]
        torch.optim.SGD(other.parameters(), 0.1).zero_grad()
        other(x).square().sum().backward()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter -= 0.1 * parameter.grad
        assert torch.equal(whole(x), y) and not torch.equal(other(x), y)
        averaged.update_parameters(other)  # the first time takes the parameters as they are
        assert torch.equal(averaged(x), other(x))
        assert copy.deepcopy(layer.exchange) is layer.exchange
        with pytest.raises(ferry.UsageError, match=r"MoE: .* call connect\(group\)"):
            elsewhere = copy.deepcopy(layer)
            elsewhere.__setstate__(elsewhere.__getstate__() | {"_handle": ("another process", 1)})
            elsewhere(x)
        elsewhere.connect(rank)
        assert elsewhere.exchange is not layer.exchange and torch.equal(elsewhere(x), layer(x))

    ferry.Group.threads(2).run(body)


@pytest.mark.parametrize("wrong", [{"nonsense": 1}, {"dtype": torch.float64}, {"device": "nowhere"}, {"experts": None}, {"top_k": "2"}, "missing"], ids=str)
def test_a_layer_whose_arguments_do_not_fit_ends_on_all_ranks(wrong):
    def body(rank):
        settings = {"experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "ffn": FFN, "max_tokens": TOKENS}
        given = settings if rank.index == 0 else {"experts": EXPERTS} if wrong == "missing" else settings | wrong
        with pytest.raises(RuntimeError if rank.index and "device" in wrong else ferry.UsageError, match=None if rank.index else "rank 1 refused"):
            ferry.torch.MoE(rank, **given)
        assert ferry.torch.MoE(rank, **settings)(torch.ones(2, HIDDEN)).shape == (2, HIDDEN)

    group = ferry.Group.threads(2)
    group.set_deadline(10)
    group.run(body)


@pytest.mark.parametrize(
    "compiled",
    [False, pytest.param(True, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Dynamo asks CUDA, which a forked process cannot use"))],
    ids=["eager", "compiled"],
)
def test_arguments_that_do_not_fit_end_the_call_on_all_ranks(rng, compiled):
    """As those of Exchange.dispatch and combine. In processes: compiled code is made for one thread at a time."""
    x, ids, weights = inputs_of(rng)
    expected = (r"no argument 'nonsense'; the arguments are: exchange, (x|outputs), ", "too many; the arguments are: exchange, ", "(x|outputs): expected .* NoneType")

    def body(rank):
        exchange = exchange_for(rank, deadline=60)
        handle = ferry.torch.handle_of(exchange)

        def call(function, *args, **kwargs):
            run = torch.compile(function, backend="eager") if compiled else function
            return run(handle, *args, **kwargs)

        rows = None
        for name in ("dispatch", "combine"):
            for mistake, text in enumerate(expected):
                given = (x, ids, weights) if name == "dispatch" else (rows.data, rows)
                wrong = [((*given,), {"nonsense": 1}), ((*given, *[None] * 4), {}), ((None, *given[1:]), {})][mistake] if rank.index else (given, {})
                with pytest.raises(ferry.UsageError, match=text) as caught:
                    call(lambda handle, *args, **kwargs: getattr(ferry.torch, name)(handle, *args, **kwargs), *wrong[0], **wrong[1])
                assert rank.index or "rank 1 refused" in str(caught.value)
                rows = ferry.torch.dispatch(exchange, x, ids, weights)
        return ferry.torch.combine(exchange, rows.data, rows, row_weights=rows.weight).shape == x.shape

    group = ferry.Group.processes(2)
    group.set_deadline(60)
    assert group.run(body) == [True, True]


def test_a_saved_layer_in_another_process(tmp_path):
    make = f"ferry.torch.MoE(alone, experts={EXPERTS}, top_k={TOP_K}, hidden={HIDDEN}, ffn={FFN}, max_tokens={TOKENS})"
    program = """if True:
        import sys, torch, ferry.torch
        torch.manual_seed(1)
        alone, x = ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None), torch.ones(3, HIDDEN)
        others = [MAKE for _ in range(3)]  # whose handles are those of the saved layer's process
        if sys.argv[2] == "save":
            torch.save((others[0], others[0](x)), sys.argv[1])
        else:
            layer, y = torch.load(sys.argv[1], weights_only=False)
            assert layer.exchange is None
            layer.connect(alone)
            assert torch.equal(layer(x), y)
        """.replace("MAKE", make).replace("HIDDEN", str(HIDDEN))
    for step in ("save", "load"):
        subprocess.run([sys.executable, "-c", program, tmp_path / "layer.pt", step], check=True, timeout=100)


def test_layouts_without_gradients_are_refused(rng):
    x, ids, weights = inputs_of(rng)

    def body(rank):
        with pytest.raises(ferry.UsageError, match="rank_major"):
            ferry.torch.dispatch(exchange_for(rank, layout="rank_major"), x, ids, weights)
        with pytest.raises(ferry.UsageError, match="no exchange has the handle"):
            torch.ops.ferry.dispatch(x, ids, weights, 10**9, 0)

    ferry.Group.threads(1).run(body)


class DenseMoE(torch.nn.Module):
    """The same layer, all experts here, every token through its experts one by one."""

    def __init__(self, layers):
        super().__init__()
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.router.load_state_dict(layers[0].router.state_dict())
        self.w_in = torch.nn.Parameter(torch.cat([layer.w_in.detach() for layer in layers]))
        self.w_out = torch.nn.Parameter(torch.cat([layer.w_out.detach() for layer in layers]))

    def forward(self, x):
        weights, ids = self.router(x).softmax(-1).topk(TOP_K)
        weights = weights / weights.sum(-1, keepdim=True)
        h = torch.einsum("nh,ehf->nef", x, self.w_in)
        all_experts = torch.einsum("nef,efh->neh", torch.nn.functional.silu(h), self.w_out)
        return (all_experts.gather(1, ids[:, :, None].expand(-1, -1, HIDDEN)) * weights[:, :, None]).sum(1)


def summed_over_ranks(rank, tensor):
    parts = rank.all_gather(tensor.contiguous().numpy().tobytes())
    return sum(torch.frombuffer(bytearray(part), dtype=tensor.dtype).reshape(tensor.shape) for part in parts)


def train(rank, layer, steps, recompute=False):
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.2)
    losses = []
    for step in steps:
        x, target = step[rank.index]
        optimiser.zero_grad()
        if recompute:
            y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        else:
            y = layer(x)
        loss = ((x + y - target) ** 2).sum() / (rank.size * x.numel())
        loss.backward()
        layer.router.weight.grad = summed_over_ranks(rank, layer.router.weight.grad)
        optimiser.step()
        losses.append(float(summed_over_ranks(rank, loss.detach().reshape(1))))
    return losses


def steps_for(rng, ranks, count):
    def tensor():
        return torch.tensor(rng.standard_normal((TOKENS, HIDDEN)), dtype=torch.float32)

    return [[(tensor(), tensor()) for _ in range(ranks)] for _ in range(count)]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_trains_to_the_losses_of_the_dense_one(rng, recompute):
    ranks, seed = 4, int(rng.integers(1 << 30))
    steps = steps_for(rng, ranks, 1) * 12
    layers = [None] * ranks

    def make(rank):
        generator = torch.Generator().manual_seed(seed + rank.index)
        layer = ferry.torch.MoE(rank, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, ffn=FFN, max_tokens=TOKENS)
        with torch.no_grad():
            layer.w_in.copy_(torch.randn(layer.w_in.shape, generator=generator) / 4)
            layer.w_out.copy_(torch.randn(layer.w_out.shape, generator=generator) / 5)
            layer.router.weight.copy_(torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(seed)))
        return layer

    def body(rank):
        layers[rank.index] = make(rank)
        rank.barrier()
        if rank.index == 0:
            reference.append(DenseMoE(layers))
        rank.barrier()
        return train(rank, layers[rank.index], steps, recompute)

    reference = []
    losses = ferry.Group.threads(ranks).run(body)
    everything = [[tuple(torch.cat(parts) for parts in zip(*step))] for step in steps]
    expected = ferry.Group.threads(1).run(lambda rank: train(rank, reference[0], everything))[0]
    assert all(of_rank == losses[0] for of_rank in losses)
    assert expected[-1] < expected[0]
    assert np.allclose(losses[0], expected, rtol=1e-4)


def test_compilation_without_graph_breaks(rng):
    alone = ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None)
    layer = ferry.torch.MoE(alone, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, ffn=FFN, max_tokens=TOKENS)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, *_ = inputs_of(rng)
    eager, traced = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = layer(eager), compiled(traced)
    assert torch.equal(y, z)
    y.square().sum().backward()
    z.square().sum().backward()
    assert torch.allclose(eager.grad, traced.grad, rtol=1e-5, atol=1e-6)


def test_deep_ep_gives_tensors_the_results_of_arrays(rng):
    ids = random_ids(rng, 40, 6, 3)
    x, weights = rng.standard_normal((40, 32)).astype(np.float32), rng.random((40, 3), np.float32)

    def body(rank):
        import ml_dtypes

        buffer = deep_ep.Buffer(rank, explicitly_destroy=True)

        def all_of(x, ids, weights):
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 6)
            received = buffer.dispatch(x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
                                       num_tokens_per_expert=per_expert, topk_idx=ids, topk_weights=weights)
            return per_rank, per_expert, in_rank, *received[1:3], received[3]

        arrays = all_of(x.astype(ml_dtypes.bfloat16), ids, weights)
        for _ in range(2):  # the second time with cached lookup tables
            tensors = all_of(torch.tensor(x).bfloat16(), torch.tensor(ids), torch.tensor(weights))
            for tensor, array in zip(tensors[:5], arrays):
                assert str(tensor.dtype) == f"torch.{array.dtype}" and np.array_equal(tensor.numpy(), array)
            assert tensors[5] == arrays[5]

    ferry.Group.threads(2).run(body)


def test_a_pytorch_without_its_fast_functions():
    program = """if True:
        import torch
        if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            del torch.Tensor.__dlpack_c_exchange_api__
        if hasattr(torch._C._dynamo.guards, "_empty_strided_cpu"):
            del torch._C._dynamo.guards._empty_strided_cpu
        import ferry

        def body(rank):
            exchange = ferry.Exchange(rank, experts=4, top_k=1, hidden=8, max_tokens=4, format="fp32", combine_type="fp32")
            x = torch.randn(8, 4).T.contiguous()
            rows = exchange.dispatch(x, torch.arange(4)[:, None], torch.ones(4, 1))
            assert torch.equal(rows.data[:4], x) and torch.equal(rows.weight[:4], torch.ones(4))
            assert torch.equal(exchange.combine(rows.data, rows.plan), x)

        ferry.Group.threads(1).run(body)
        """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_tensors_outlive_the_exchange(rng):
    x, ids, weights = inputs_of(rng)

    def body(rank):
        exchange = exchange_for(rank)
        rows = exchange.dispatch(x, ids, weights)
        data, before = rows.data, rows.data.clone()
        exchange.destroy()
        del rows, exchange
        assert torch.equal(data, before)

    ferry.Group.threads(1).run(body)
