"""The registered operators: what they return, what they refuse, and what PyTorch observes of them."""

import contextlib

import pytest

torch = pytest.importorskip("torch")

import ferry
import ferry.torch
from called_functions import python_functions_of
from torch_exchange import TOKENS, Watch, exchange_for, inputs_of


@pytest.fixture(autouse=True)
def seeded(rng):
    torch.manual_seed(int(rng.integers(1 << 30)))
    torch.set_num_threads(1)


@pytest.mark.parametrize("shared_experts", [0, 1])
@pytest.mark.parametrize("layout", ["expert_major", "expert_padded"])
def test_opcheck(rng, layout, shared_experts):
    x, ids, weights = inputs_of(rng)

    def body(rank):
        exchange = exchange_for(rank, layout=layout, shared_experts=shared_experts)
        handle = ferry.torch.handle_of(exchange)
        assert handle == ferry.torch.handle_of(exchange)
        ops = torch.ops.ferry
        # Without the check that compares two runs: plans contain their call number, so they differ.
        torch.library.opcheck(ops.dispatch.default, (x.requires_grad_(), ids, weights.requires_grad_(), handle, 0),
                              test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
        rows = ferry.torch.dispatch(exchange, x, ids, weights)
        outputs, weight = rows.data.detach().requires_grad_(), rows.weight.detach().requires_grad_()
        torch.library.opcheck(ops.combine.default, (outputs, weight, rows.plan, TOKENS, handle, 0))

    # Runs in this thread, because PyTorch keeps the state of these checks by thread.
    alone = ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None)
    body(alone.join())


@pytest.mark.parametrize("settings", [{}, {"layout": "expert_padded"}, {"shared_experts": 2, "local_slots": 5},
                                      {"placement": ferry.Placement.table([(1, 2), (0, 1), (1, 0), (1, 1), (0, 0), (1, 4), (1, 3), (0, 2)], 2)}], ids=str)
def test_results_have_the_fields_of_the_core(rng, settings):
    given = [inputs_of(rng) for _ in range(2)]

    def body(rank):
        x, ids, weights = given[rank.index]
        exchange = exchange_for(rank, **settings)
        for used in (exchange, ferry.torch.handle_of(exchange)):
            for recorded in (False, True):
                rows = ferry.torch.dispatch(used, x.detach().requires_grad_(recorded), ids, weights)
                expected = exchange.dispatch(x, ids, weights)
                names = {name for name in dir(expected) if not name.startswith("_")} - {"call"}
                assert names <= set(dir(rows))
                for name in ("scales", "tile_offsets", "local_ids", "group_of_row", "dots", "groups", "capacity"):
                    assert getattr(rows, name) == getattr(expected, name), name
                for name in ("counts", "row_offsets", "group_expert"):
                    assert torch.equal(getattr(rows, name), getattr(expected, name)), name
                assert type(rows.total) is type(expected.total) is int and rows.total == expected.total == rows.wait_total()
                assert rows.parts[0] is rows.data and isinstance(rows.plan, torch.Tensor)
                if rows.data.dim() == 2:
                    assert torch.equal(rows.received_rows(), expected.received_rows())
                else:
                    with pytest.raises(ferry.UsageError, match=r"use data\[group\]\[:counts\[group\]\]"):
                        rows.received_rows()

    ferry.Group.threads(2).run(body)


def test_group_expert_in_compiled_code(rng):
    x, ids, weights = inputs_of(rng)
    exchange = exchange_for(ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None).join())
    handle = ferry.torch.handle_of(exchange)
    plain = ferry.torch.dispatch(handle, x, ids, weights)
    torch.library.opcheck(torch.ops.ferry.group_expert.default, (plain.counts, handle, 0))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def experts_of_rows(x, ids, weights):
        rows = ferry.torch.dispatch(handle, x, ids, weights)
        return rows.group_expert * 2, rows.total, rows.groups

    doubled, total, groups = experts_of_rows(x, ids, weights)
    assert torch.equal(doubled, 2 * plain.group_expert) and int(total) == plain.total and groups == plain.groups


def test_operators_without_gradients_run_in_compiled_code(rng):
    x, ids, weights = inputs_of(rng)

    def body(rank):
        exchange = exchange_for(rank)
        for used in (exchange, ferry.torch.handle_of(exchange)):
            rows = ferry.torch.dispatch(used, x, ids, weights)
            of_handle = [] if used is exchange else ["exchange_of"]
            assert python_functions_of(lambda: ferry.torch.dispatch(used, x, ids, weights)) == ["dispatch", *of_handle]
            combine = lambda: ferry.torch.combine(used, rows.data, rows, row_weights=rows.weight)
            assert python_functions_of(combine) == ["combine", *of_handle]

    body(ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None).join())


def test_operators_with_and_without_gradients_give_the_same(rng):
    given = [inputs_of(rng) for _ in range(2)]

    def body(rank):
        x, ids, weights = given[rank.index]
        exchange = exchange_for(rank, alignment=4)
        for _ in range(2):
            x, weights = x.detach().clone(), weights.detach().clone()
            rows = ferry.torch.dispatch(exchange, x, ids, weights)
            recorded = ferry.torch.dispatch(exchange, x.requires_grad_(), ids, weights.requires_grad_())
            assert recorded.data.requires_grad and recorded.weight.requires_grad and not rows.data.requires_grad
            ours, theirs = rows[:4] + (rows.source,), recorded[:4] + (recorded.source,)
            total = int(rows.row_offsets[-1])
            for name, one, other in zip((*rows._fields[:4], "source"), ours, theirs):
                if name == "source":  # undefined past the total
                    one, other = one[:total], other[:total]
                assert torch.equal(one, other), name
            assert not rows.data[total:].any() and not rows.weight[total:].any()
            y = ferry.torch.combine(exchange, rows.data, rows, row_weights=rows.weight)
            with torch.no_grad():
                assert torch.equal(y, ferry.torch.combine(exchange, recorded.data, recorded, row_weights=recorded.weight))
            assert ferry.torch.combine(exchange, recorded.data, recorded, row_weights=recorded.weight).requires_grad
            assert torch.equal(y, ferry.torch.combine(exchange, rows.data.T.contiguous().T, rows, row_weights=rows.weight))

    ferry.Group.threads(2).run(body)


def test_modes_and_the_profiler_observe_operators(rng):
    x, ids, weights = inputs_of(rng)

    class Tensor(torch.Tensor):
        pass

    def both(exchange, x, ids):
        rows = ferry.torch.dispatch(exchange, x, ids, weights)
        return rows, ferry.torch.combine(exchange, rows.data, rows, row_weights=rows.weight)

    # Runs in this thread, as above.
    exchange = exchange_for(ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None).join())
    plain, y = both(exchange, x, ids)
    with Watch() as watch:
        both(exchange, x, ids)
    assert [name for name in watch.observed if "ferry" in name] == ["ferry.dispatch.default", "ferry.combine.default"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        both(exchange, x, ids)
    assert {"ferry::dispatch", "ferry::combine"} <= {event.key for event in profile.key_averages()}
    subclassed = ferry.torch.dispatch(exchange, x, ids.as_subclass(Tensor), weights)
    assert torch.equal(subclassed.data, plain.data)
    meta = ferry.torch.dispatch(exchange, *(tensor.to("meta") for tensor in (x, ids, weights)))
    assert meta.data.is_meta and meta.data.shape == plain.data.shape


def test_operators_return_new_tensors(rng):
    first, second = inputs_of(rng), inputs_of(rng)

    def body(rank):
        exchange = exchange_for(rank)
        rows = ferry.torch.dispatch(exchange, *first)
        tensors = rows[:5]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 5
        before = [tensor.clone() for tensor in tensors]
        last = exchange.last_dispatch_result()
        total = int(rows.row_offsets[-1])
        assert last.counts.data_ptr() == rows.counts.data_ptr() and int(last.total) == total
        assert rows.source.shape == (len(rows.data), 3) and torch.equal(rows.source[:total], last.source[:total])
        ferry.torch.dispatch(exchange, *second)
        exchange.dispatch(*second)
        assert all(torch.equal(tensor, expected) for tensor, expected in zip(tensors, before))
        assert torch.equal(last.counts, rows.counts) and torch.equal(last.row_offsets, rows.row_offsets)

    ferry.Group.threads(1).run(body)


def test_lazily_negated_tensors(rng):
    given = [inputs_of(rng) for _ in range(2)]

    def body(rank):
        x, ids, weights = given[rank.index]
        exchange = exchange_for(rank)
        negative = torch.view_as_complex(torch.stack((x, x), -1)).conj().imag
        assert negative.is_neg() and torch.equal(negative, -x)
        lazy = torch._neg_view(x)  # also lazily negated, and contiguous
        rows = ferry.torch.dispatch(exchange, -x, ids, weights)
        for recorded in (False, True):
            again = ferry.torch.dispatch(exchange, lazy.detach().requires_grad_(recorded), ids, weights)
            assert torch.equal(again.data, rows.data) and torch.equal(again.weight, rows.weight)
            y = ferry.torch.combine(exchange, torch._neg_view(again.data), again, row_weights=torch._neg_view(again.weight))
            assert torch.equal(y, ferry.torch.combine(exchange, rows.data, rows, row_weights=rows.weight))
        for bad, match in ((lambda: exchange.dispatch(lazy, ids), "tokens: .* negates or conjugates lazily"),
                           (lambda: exchange.dispatch(x, ids, torch._neg_view(weights)), "weights: .* lazily"),
                           (lambda: exchange.combine(rows.data, exchange.last_dispatch_result().plan, result=lazy), "result: .* lazily"),
                           (lambda: exchange.dispatch((torch.zeros(TOKENS, 2, dtype=torch.complex64).conj(),), ids,
                                                      format="raw:16"), "negates or conjugates lazily")):
            with pytest.raises(ferry.UsageError, match=match):
                bad()

    ferry.Group.threads(2).run(body)


@pytest.mark.parametrize("watched", [True, False])
def test_gradients_of_gradients_are_refused(rng, watched):
    x, ids, weights = inputs_of(rng)

    def body(rank):
        exchange = exchange_for(rank)
        given = x.clone().requires_grad_()
        with Watch() if watched else contextlib.nullcontext():
            rows = ferry.torch.dispatch(exchange, given, ids, weights)
            y = ferry.torch.combine(exchange, rows.data**3, rows, row_weights=rows.weight)
            (plain,) = torch.autograd.grad(y.sum(), given, retain_graph=True)
            (gradient,) = torch.autograd.grad(y.sum(), given, create_graph=True)
        assert torch.equal(gradient, plain) and gradient.requires_grad and not plain.requires_grad
        for second in (lambda: torch.autograd.grad(gradient.sum(), given), lambda: gradient.square().sum().backward()):
            with pytest.raises(ferry.UsageError, match="gradients of gradients"):
                second()

    ferry.Group.threads(1).run(body)


def test_operators_refuse_bad_arguments(rng):
    x, ids, weights = inputs_of(rng)

    def body(rank):
        exchange = exchange_for(rank)
        rows = ferry.torch.dispatch(exchange, x, ids, weights)
        for bad, match in (
            (lambda: ferry.torch.dispatch(exchange, x[:, 1:], ids, weights), "x: expected rows of 16 columns"),
            (lambda: ferry.torch.dispatch(exchange, x, ids.float(), weights), "ids: expected int32 or int64"),
            (lambda: ferry.torch.combine(exchange, rows.data, rows._replace(plan=rows.plan[:16])), "storage: expected .* bytes or more"),
            (lambda: ferry.torch.combine(exchange, rows.data, rows._replace(tokens=TOKENS + 1)), "tokens = 7"),
            (lambda: ferry.torch.combine(exchange, rows.data[:1], rows), "outputs: expected"),
        ):
            with pytest.raises(ferry.UsageError, match=match):
                bad()
        ferry.torch.combine(exchange, rows.data, rows, row_weights=rows.weight)
        unreduced = exchange_for(rank, reduction="unreduced")
        with pytest.raises(ferry.UsageError, match="needs layout .* and reduction"):
            ferry.torch.combine(unreduced, rows.data, rows)

    ferry.Group.threads(1).run(body)


@pytest.mark.parametrize("kind", ["none", "meta"])
@pytest.mark.parametrize("wrong", ["x", "ids", "outputs"])
def test_an_argument_that_is_no_tensor_of_the_device_ends_the_call_on_all_ranks(rng, wrong, kind):
    x, ids, weights = inputs_of(rng)

    def body(rank):
        exchange = exchange_for(rank)
        rows = ferry.torch.dispatch(exchange, x, ids, weights)
        right = {"x": x, "ids": ids, "outputs": rows.data}
        given = right | ({wrong: right[wrong].to("meta") if kind == "meta" else None} if rank.index else {})
        expected = "tensors of .* on meta are not supported" if kind == "meta" else "expected an array"
        with pytest.raises(ferry.UsageError, match=f"{wrong}: {expected}"):
            if wrong == "outputs":
                ferry.torch.combine(exchange, given["outputs"], rows)
            else:
                ferry.torch.dispatch(exchange, given["x"], given["ids"], weights)
        assert torch.equal(ferry.torch.dispatch(exchange, x, ids, weights).data, rows.data)

    ferry.Group.threads(2).run(body)


@pytest.mark.parametrize("wrong", [7, -1, None, "0"], ids=repr)
@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_a_lane_that_does_not_exist_ends_the_call_on_all_ranks(rng, operation, wrong):
    x, ids, weights = inputs_of(rng)

    def body(rank):
        exchange = exchange_for(rank)
        rows = ferry.torch.dispatch(exchange, x, ids, weights)
        lane = wrong if rank.index else 0
        with pytest.raises(ferry.UsageError, match="lane = .*, must be 0 to 0|lane: expected an integer"):
            if operation == "dispatch":
                ferry.torch.dispatch(exchange, x, ids, weights, lane=lane)
            else:
                ferry.torch.combine(exchange, rows.data, rows, lane=lane)
        assert torch.equal(ferry.torch.dispatch(exchange, x, ids, weights).data, rows.data)

    ferry.Group.threads(2).run(body)
