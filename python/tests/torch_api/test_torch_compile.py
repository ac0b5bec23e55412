"""Compiled code makes every call that the source makes, because the peers wait for each of them."""

import pytest

torch = pytest.importorskip("torch")

import ferry
import ferry.torch
from ferry import _core
from torch_exchange import exchange_for, inputs_of


@pytest.fixture(autouse=True)
def seeded(rng):
    torch.manual_seed(int(rng.integers(1 << 30)))
    torch.set_num_threads(1)
    torch._dynamo.reset()
    # The cache may hold code compiled for an earlier version of the operators.
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


@pytest.fixture
def calls(monkeypatch):
    """The kernels that ran, in order."""
    called = []
    for name in ("_operator_dispatch", "_operator_combine", "_operator_combine_backward"):
        def counted(*arguments, name=name, kernel=getattr(_core, name)):
            called.append(name)
            return kernel(*arguments)

        monkeypatch.setattr(_core, name, counted)
    return called


@pytest.fixture(scope="module")
def inductor():
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
    except Exception as error:
        pytest.skip(f"PyTorch cannot compile here: {str(error).splitlines()[0]}")
    return "inductor"


@pytest.fixture(params=["aot_eager", "inductor"])
def backend(request):
    return request.param if request.param == "aot_eager" else request.getfixturevalue("inductor")


def around(handle, x, ids, weights):
    """What a compiler could do without where a rank has no tokens."""
    rows = ferry.torch.dispatch(handle, x.sin() * 2, ids, weights.softmax(-1))
    y = ferry.torch.combine(handle, rows.data.sin(), rows, row_weights=rows.weight)
    return (x + y).square().sum()


def equal_and_unused(handle, x, ids, weights):
    one, other = (ferry.torch.dispatch(handle, x, ids, weights) for _ in range(2))
    ferry.torch.combine(handle, one.data.cos(), one)
    given = ((one, one.data), (one, one.data), (other, other.data))
    return sum(ferry.torch.combine(handle, data, rows, row_weights=rows.weight) for rows, data in given).square().sum()


def recomputed(handle, x, ids, weights):
    return torch.utils.checkpoint.checkpoint(around, handle, x, ids, weights, use_reentrant=False)


def forward_and_backward(function, handle, inputs, calls):
    x, ids, weights = inputs
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    calls.clear()
    y = function(handle, x, ids, weights)
    forward = list(calls)
    calls.clear()
    y.backward()
    return forward, list(calls), (y.detach(), x.grad, weights.grad)


def test_compiled_code_reads_the_sources_of_rows(rng, backend):
    exchange = exchange_for(ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None).join())
    handle, inputs = ferry.torch.handle_of(exchange), inputs_of(rng)

    def tokens_of_rows(x, ids, weights):
        rows = ferry.torch.dispatch(handle, x, ids, weights)
        return rows.source[:, 1] + 1, rows.row_offsets

    plain, offsets = tokens_of_rows(*inputs)
    compiled, _ = torch.compile(tokens_of_rows, backend=backend, fullgraph=True)(*inputs)
    assert torch.equal(compiled[: offsets[-1]], plain[: offsets[-1]])


@pytest.mark.parametrize("tokens", [3, 0])
@pytest.mark.parametrize("function", [around, equal_and_unused])
def test_compiled_code_makes_the_same_calls(rng, calls, backend, function, tokens):
    exchange = exchange_for(ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None).join())
    handle, inputs = ferry.torch.handle_of(exchange), inputs_of(rng, tokens)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    *eager, values = forward_and_backward(function, handle, inputs, calls)
    # PyTorch may reorder independent calls to save memory, unless this is off.
    with torch._inductor.config.patch(reorder_for_peak_memory=function is around):
        *traced, again = forward_and_backward(compiled, handle, inputs, calls)
    assert traced == eager and len(eager[0]) == (2 if function is around else 6)
    for one, other in zip(values, again):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    if function is around:
        with torch.no_grad():
            calls.clear()
            compiled(handle, *inputs)
        assert calls == eager[0]


def test_compiled_recomputation_makes_the_same_calls_without_tokens(rng, calls, inductor):
    exchange = exchange_for(ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None).join())
    handle = ferry.torch.handle_of(exchange)
    compiled = torch.compile(recomputed, backend=inductor, fullgraph=True)
    some, none = (forward_and_backward(compiled, handle, inputs_of(rng, tokens), calls)[:2] for tokens in (3, 0))
    eager = forward_and_backward(recomputed, handle, inputs_of(rng, 3), calls)[:2]
    assert some == none == eager and len(some[1]) == 4
