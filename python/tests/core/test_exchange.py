"""Dispatch and combine compared with the oracle."""

import numpy as np
import pytest

import ferry
from exchange_steps import HIDDEN, MOST, exchange_for, inputs, poisoned
from oracle import bf16, messages_to, partial_sums, random_step, routes_to, same_bits


def test_arrays_of_a_result_are_made_once():
    def body(rank):
        exchange = ferry.Exchange(rank, experts=2, top_k=1, hidden=16, max_tokens=2)
        rows = exchange.dispatch(np.ones((2, 16), bf16), np.zeros((2, 1), np.int64), np.ones((2, 1), np.float32))
        for name in ("data", "weight", "counts", "row_offsets", "plan"):
            assert getattr(rows, name) is getattr(rows, name)

    ferry.Group.threads(1).run(body)


def test_received_rows_of_padded_experts_are_refused():
    def body(rank):
        with ferry.Exchange(rank, experts=4, top_k=2, hidden=HIDDEN, max_tokens=MOST, layout="expert_padded") as exchange:
            rows = exchange.dispatch(np.ones((1, HIDDEN), bf16), np.array([[0, 3]]))
            with pytest.raises(ferry.UsageError, match=r"use data\[group\]\[:counts\[group\]\]"):
                rows.received_rows()

    ferry.Group.threads(1).run(body)


def test_reprs():
    def body(rank):
        with ferry.Exchange(rank, experts=4, top_k=2, hidden=HIDDEN, max_tokens=MOST) as exchange:
            rows = exchange.dispatch(np.ones((1, HIDDEN), bf16), np.array([[0, 3]]))
            shown = repr(exchange), repr(rows)
        return *shown, repr(exchange)

    group = ferry.Group.threads(2)
    assert repr(group) == "Group(2 ranks)"
    assert group.run(body)[1] == (
        "Exchange(rank 1 of 2, backend='cpu', experts=4, top_k=2, hidden=32, max_tokens=7)",
        "DispatchResult(call 1, 2 groups, capacity 28, format='bf16')", "Exchange(destroyed)")


@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_rows_are_grouped_by_expert(rng, ids, ranks):
    step = random_step(rng, ranks, ids=ids)

    def body(rank):
        rows = exchange_for(rank, step, alignment=4).dispatch(*inputs(step, rank))
        expected = routes_to(step, rank.index)
        offsets = rows.row_offsets
        assert rows.groups == len(rows.group_expert) == len(rows.counts) == len(offsets) - 1
        assert int(rows.total) == offsets[-1] == rows.plan.total == rows.wait_total()
        received = rows.received_rows()
        assert len(received) == offsets[-1] and (len(received) == 0 or np.shares_memory(received, rows.data))
        positions = []
        for group, expert in enumerate(rows.group_expert):
            of_expert = [route for route in expected if route[0] == expert]
            assert rows.counts[group] == len(of_expert)
            assert offsets[group] % 4 == 0 and offsets[group + 1] - offsets[group] == -(-len(of_expert) // 4) * 4
            positions += [offsets[group] + i for i in range(len(of_expert))]
        assert rows.source[positions].tolist() == [list(route[1:]) for route in expected]
        for position, (_, source, token, slot) in zip(positions, expected):
            assert same_bits(rows.data[position], step.tokens[source][token])
            assert rows.weight[position] == step.weights[source][token, slot]
        padding = sorted(set(range(int(rows.total))) - set(positions))
        assert (rows.source[padding] == -1).all()
        if padding:
            assert (rows.weight[padding] == 0).all()

    ferry.Group.threads(ranks).run(body)


def in_columns(array, gap):  # as argsort(...)[:, :K] gives them
    wide = np.full((len(array), array.shape[1] + 3), gap, array.dtype)
    wide[:, : array.shape[1]] = array
    return wide[:, : array.shape[1]]


def transposed(array, gap):
    return np.array(array.T, order="C").T


def backwards(array, gap):
    return array[::-1, ::-1].copy()[::-1, ::-1]


@pytest.mark.parametrize("view", [in_columns, transposed, backwards])
@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_numbers_of_any_strides_are_those_of_dense_arrays(rng, view, ids):
    step = random_step(rng, 2, ids=ids)

    def body(rank):
        exchange = exchange_for(rank, step)
        x, ids, weights = inputs(step, rank)
        strided_ids, strided_weights = view(ids, 10**6), view(weights, np.nan)
        assert len(x) < 2 or not (strided_ids.flags.c_contiguous or strided_weights.flags.c_contiguous)
        counts = exchange.dispatch_counts(ids)
        assert exchange.dispatch_counts(strided_ids) == counts
        placement = exchange.config.placement
        for dense, strided in zip(ferry.dispatch_layout(ids, placement)[:3], ferry.dispatch_layout(strided_ids, placement)[:3]):
            assert np.array_equal(dense, strided)
        rows = exchange.dispatch(x, ids, weights)
        total, plan = rows.plan.total, rows.plan.copy()
        source, outputs, weight = rows.source[:total].copy(), rows.data.copy(), rows.weight.copy()
        rows = exchange.dispatch(x, strided_ids, strided_weights)
        assert rows.plan.total == total and np.array_equal(rows.source[:total], source)
        assert same_bits(rows.data[:total], outputs[:total]) and same_bits(rows.weight[:total], weight[:total])
        apart = np.full((len(weight), 2), np.nan, np.float32)
        apart[:, 0] = weight
        for dense, strided in [({"row_weights": weight}, {"row_weights": apart[:, 0]}),
                               ({"topk_weights": weights}, {"topk_weights": strided_weights})]:
            assert same_bits(exchange.combine(outputs, plan, **strided), exchange.combine(outputs, plan, **dense))
        returned = exchange.combine(outputs, plan, row_values=apart[:, 0])[1]
        assert same_bits(returned, exchange.combine(outputs, plan, row_values=weight)[1])
        assert same_bits(exchange.return_values(apart[:, 0], plan), returned)
        assert same_bits(exchange.route_values(strided_weights, plan)[:total], weight[:total])
        gradients = [exchange.combine_backward(x, plan, each, outputs)[1] for each in (weights, strided_weights)]
        assert same_bits(*gradients)

    ferry.Group.threads(2).run(body)


@pytest.mark.parametrize("layout", ["expert_major", "expert_padded", "rank_major"])
def test_results_do_not_depend_on_who_has_tokens(rng, layout):
    steps = [random_step(rng, 2, most=most) for most in (MOST, 0, 1, 0)]

    def body(rank):
        exchange = exchange_for(rank, steps[0], layout=layout)
        for step in steps:
            x, ids, weights = inputs(step, rank)
            assert exchange.dispatch(x, ids).weight is None
            with pytest.raises(ferry.UsageError, match=r"weights given \(on every rank or none, also without tokens\) is"):
                exchange.dispatch(x, ids, weights if rank.index else None)
            rows = exchange.dispatch(x, ids, weights)
            slots = (step.top_k,) if layout == "rank_major" else ()
            assert rows.weight.shape == (len(rows.source), *slots)
            if layout == "rank_major":
                continue
            plan, outputs = rows.plan.copy(), rows.data.copy()
            again = exchange.dispatch(x, plan, weights, dot_rows=outputs.reshape(-1, HIDDEN)[: len(rows.source)])
            assert again.weight.shape == again.dots.shape == rows.weight.shape
            y, returned = exchange.combine(outputs, plan, row_weights=rows.weight, row_values=again.dots)
            assert y.shape == x.shape and returned.shape == weights.shape

    ferry.Group.threads(2).run(body)


def test_combine_returns_weighted_sums(rng):
    step = random_step(rng)

    def body(rank):
        exchange = exchange_for(rank, step)
        rows = exchange.dispatch(*inputs(step, rank))
        outputs = (rows.data * bf16(2)).astype(bf16)
        outputs[int(rows.total):] = np.nan  # never read
        result = poisoned(step.tokens[rank.index].shape, bf16)
        given_back = exchange.combine(outputs, rows.plan, row_weights=rows.weight, result=result)
        assert given_back is result
        expected = partial_sums(step, rank.index, lambda r, t, k: step.tokens[r][t].astype(np.float32) * 2)
        assert same_bits(result, expected.astype(bf16))
        assert same_bits(exchange.combine(outputs, rows.plan, row_weights=rows.weight), result)
        assert same_bits(exchange.combine(outputs, rows.plan, topk_weights=step.weights[rank.index]), result)

    ferry.Group.threads(4).run(body)


def test_combine_returns_unreduced_rows_and_row_values(rng):
    step = random_step(rng)

    def body(rank):
        exchange = exchange_for(rank, step, reduction="unreduced")
        tokens, ids, weights = inputs(step, rank)
        rows = exchange.dispatch(tokens, ids, weights)
        values, routes = exchange.combine(rows.data, rows.plan, row_values=rows.weight)
        masked = ids < 0
        assert values.shape == (len(tokens), step.top_k, HIDDEN)
        assert same_bits(values, np.where(masked[..., None], bf16(0), tokens[:, None]).astype(bf16))
        assert same_bits(routes, np.where(masked, np.float32(0), weights))
        assert same_bits(exchange.return_values(rows.weight, rows.plan), routes)
        back = exchange.route_values(weights, rows.plan)
        assert same_bits(back[: rows.plan.total], rows.weight[: rows.plan.total])

    ferry.Group.threads(4).run(body)


def test_rank_major_rows(rng):
    step = random_step(rng)

    def body(rank):
        exchange = exchange_for(rank, step, layout="rank_major")
        rows = exchange.dispatch(*inputs(step, rank))
        first = rank.index * step.experts // step.ranks
        expected = messages_to(step, rank.index)
        assert rows.plan.total == len(expected) and rows.groups == step.ranks
        for row, (source, token) in enumerate(expected):
            assert same_bits(rows.data[row], step.tokens[source][token])
            ids = step.ids[source][token]
            here = (ids >= first) & (ids < first + step.experts // step.ranks)
            assert rows.local_ids[row].tolist() == np.where(here, ids - first, -1).tolist()
            assert same_bits(rows.weight[row], np.where(here, step.weights[source][token], np.float32(0)))
        fan_out = [sum((rank.index, t) in messages_to(step, r) for r in range(4)) for t in range(len(step.ids[rank.index]))]
        result = exchange.combine(rows.data, rows.plan, result=np.empty_like(step.tokens[rank.index], np.float32))
        expected = step.tokens[rank.index].astype(np.float32) * np.array(fan_out, np.float32).reshape(-1, 1)
        assert np.array_equal(result, expected)

    ferry.Group.threads(4).run(body)


def test_padded_layout(rng):
    step = random_step(rng)

    def body(rank):
        exchange = exchange_for(rank, step, layout="expert_padded")
        rows = exchange.dispatch(*inputs(step, rank))
        local = step.experts // step.ranks
        assert rows.data.shape == (local, exchange.capacity, HIDDEN) and rows.capacity == exchange.capacity
        expected = routes_to(step, rank.index)
        for group in range(local):
            of_expert = [route for route in expected if route[0] == rank.index * local + group]
            assert rows.counts[group] == len(of_expert)
            for position, (_, source, token, _) in enumerate(of_expert):
                assert same_bits(rows.data[group, position], step.tokens[source][token])
        y = exchange.combine(rows.data, rows.plan, row_weights=rows.weight)
        values = partial_sums(step, rank.index, lambda r, t, k: step.tokens[r][t].astype(np.float32))
        assert same_bits(y, values.astype(bf16))

    ferry.Group.threads(4).run(body)


def test_strided_tokens_outputs_and_results(rng):
    step = random_step(rng)

    def spread(array):
        wide = poisoned((len(array), HIDDEN + 16), bf16)
        wide[:, :HIDDEN] = array
        return wide[:, :HIDDEN]

    def body(rank):
        exchange = exchange_for(rank, step)
        tokens, ids, weights = inputs(step, rank)
        rows = exchange.dispatch(tokens, ids, weights)
        y = exchange.combine(rows.data, rows.plan, row_weights=rows.weight)
        again = exchange.dispatch(spread(tokens), ids, weights)
        wide = poisoned((len(tokens), HIDDEN + 8), bf16)
        exchange.combine(spread(again.data), again.plan, row_weights=again.weight, result=wide[:, :HIDDEN])
        assert same_bits(wide[:, :HIDDEN], y)
        assert (wide[:, HIDDEN:].view(np.uint16) == 0x7F7F).all()

    ferry.Group.threads(4).run(body)


def test_receive_buffers_of_the_caller(rng):
    step = random_step(rng)

    def body(rank):
        exchange = exchange_for(rank, step, own_receive_buffers=False)
        rows = exchange.capacity
        guard = 5
        data = poisoned((rows + guard, HIDDEN), bf16)
        weight = poisoned((rows + guard,), np.float32)
        group = poisoned((rows + guard,), np.int32)
        plan = poisoned((ferry.plan_bytes(exchange.config, 4),), np.uint8)
        counts, offsets = poisoned((4 + guard,), np.int32), poisoned((5 + guard,), np.int32)
        memory = ferry.ReceiveBuffers(
            data, weight=weight, group_of_row=group, plan=plan, counts=counts, row_offsets=offsets)
        first = exchange.dispatch(*inputs(step, rank), memory=memory)
        total = int(first.total)
        assert first.data.ctypes.data == data.ctypes.data and first.weight.ctypes.data == weight.ctypes.data
        for array, used in ((data, total), (weight, total), (group, total), (counts, 4), (offsets, 5)):
            assert (array[used:].view(np.uint8) == 0x7F).all()
        assert first.counts.ctypes.data == counts.ctypes.data and first.row_offsets.ctypes.data == offsets.ctypes.data
        assert type(first.total) is int
        assert first.group_of_row[:total].tolist() == [
            g for g, count in enumerate(first.counts) for _ in range(count)
        ]
        again = exchange.plan_over(plan)
        assert again.total == total and again.tokens == len(step.tokens[rank.index])
        by_plan = exchange.dispatch(step.tokens[rank.index], again, memory=ferry.ReceiveBuffers(data))
        assert by_plan.plan is again and int(by_plan.total) == total
        dots = poisoned((rows + guard,), np.float32)
        multiplied = exchange.dispatch(step.tokens[rank.index], again, dot_rows=np.ones((rows, HIDDEN), bf16),
                                       memory=ferry.ReceiveBuffers(data, dots=dots))
        assert multiplied.dots.ctypes.data == dots.ctypes.data and (dots[total:].view(np.uint8) == 0x7F).all()
        assert np.allclose(dots[:total], data[:total].astype(np.float32).sum(1), rtol=1e-4, atol=1e-3)
        assert np.array_equal(by_plan.counts, counts[:4]) and np.array_equal(by_plan.row_offsets, offsets[:5])

    ferry.Group.threads(4).run(body)


def test_bad_ids_and_overflow_are_reported_after_the_call(rng):
    step = random_step(rng, most=MOST)
    step.ids[0] = np.array([[99, 0, -1]], np.int32)
    step.tokens[0], step.weights[0] = step.tokens[0][:0], step.weights[0][:0]
    step.tokens[0] = np.ones((1, HIDDEN), bf16)
    step.weights[0] = np.ones((1, 3), np.float32)

    def body(rank):
        exchange = exchange_for(rank, step)
        if rank.index > 0:
            exchange.dispatch(*inputs(step, rank))
            return
        with pytest.raises(ferry.BadIdError) as caught:
            exchange.dispatch(*inputs(step, rank))
        assert caught.value.record == (0, 0, 0, 99, 1)
        received = exchange.last_dispatch_result()
        assert [0, 0, 1] in received.source[: received.plan.total].tolist()

    ferry.Group.threads(4).run(body)

    def full(rank):
        exchange = exchange_for(rank, step, capacity=1)
        ids = np.zeros((2, 3), np.int32)
        ids[:, 1:] = -1
        with pytest.raises(ferry.OverflowError) as caught:
            exchange.dispatch(np.ones((2, HIDDEN), bf16), ids)
        assert caught.value.record == (0, 1, 8, 7)
        assert exchange.last_dispatch_result().plan.total == (rank.index == 0)

    ferry.Group.threads(4).run(full)

    def short(rank):
        exchange = exchange_for(rank, step)
        ids = np.zeros((2, 3), np.int32)
        ids[:, 1:] = -1
        memory = dict(rows=3 if rank.index == 0 else 0)
        with pytest.raises(ferry.OverflowError, match="memory.rows = 3 on rank 0, which is sent 8 rows") as caught:
            exchange.dispatch(np.ones((2, HIDDEN), bf16), ids, memory=ferry.ReceiveBuffers(**memory))
        assert caught.value.record == (0, 3, 8, 5)
        rows = exchange.dispatch(np.ones((2, HIDDEN), bf16), ids, memory=ferry.ReceiveBuffers(allow_truncation=True, **memory))
        assert rows.plan.total == (8 if rank.index == 0 else 0)

    ferry.Group.threads(4).run(short)


def test_metadata_load_and_wire_counts(rng):
    step = random_step(rng)

    def body(rank):
        exchange = exchange_for(rank, step)
        rows = exchange.dispatch(*inputs(step, rank))
        metadata = exchange.metadata(rank.index + 1)
        assert metadata.tolist() == [10, sum(range(rank.index + 1)), 4]
        mine = np.full(3, -1, np.int32)
        assert exchange.metadata(rank.index + 1, out=mine) is mine
        assert mine.tolist() == metadata.tolist()
        with pytest.raises(ferry.UsageError, match=r"out: expected an array of shape \[3\], got \[4\]"):
            exchange.metadata(0, out=np.zeros(4, np.int32))
        load, wire = exchange.load_counts(), exchange.wire_counts()
        all_ids = np.concatenate([ids.ravel() for ids in step.ids])
        assert load.experts.tolist() == np.bincount(all_ids[all_ids >= 0], minlength=step.experts).tolist()
        assert load.ranks.sum() == load.experts.sum() and load.dispatches == 1
        sent = sum((rank.index, t) in messages_to(step, r) for r in range(4) if r != rank.index
                   for t in range(len(step.ids[rank.index])))
        assert wire.dispatch_messages == sent and wire.combine_messages == 0
        assert rows.plan.counts.sum(0).tolist() == load.experts.tolist()
        assert rows.plan.tokens_between[rank.index].sum() == sum(
            (rank.index, t) in messages_to(step, r) for r in range(4) for t in range(len(step.ids[rank.index])))

    ferry.Group.threads(4).run(body)


def test_loads_of_layers_that_share_an_exchange(rng):
    steps = [random_step(rng) for _ in range(3)]

    def body(rank):
        exchange = exchange_for(rank, steps[0], layers=3)
        for layer, step in enumerate(steps):
            exchange.dispatch(*inputs(step, rank), layer=layer)
        load = exchange.load_counts()
        ids = [np.concatenate([of.ravel() for of in step.ids]) for step in steps]
        assert load.layers.tolist() == [np.bincount(of[of >= 0], minlength=16).tolist() for of in ids]
        assert load.experts.tolist() == load.layers.sum(0).tolist() and load.dispatches == 3
        with pytest.raises(ferry.UsageError, match="layer = 3 on rank ., must be 0 to 2"):
            exchange.dispatch(*inputs(steps[0], rank), layer=3)

    ferry.Group.threads(4).run(body)


def test_a_rank_without_experts_has_empty_groups():
    def body(rank):
        exchange = ferry.Exchange(rank, experts=1, top_k=1, hidden=HIDDEN, max_tokens=2)
        rows = exchange.dispatch(np.ones((2, HIDDEN), bf16), np.zeros((2, 1), np.int32))
        groups = 1 - rank.index
        assert rows.counts.tolist() == [4] * groups and rows.group_expert.tolist() == [0] * groups
        assert rows.row_offsets.tolist() == [0, 4][:groups + 1] and rows.wait_total() == 4 * groups
        assert exchange.combine(rows.received_rows().copy(), rows.plan).shape == (2, HIDDEN)

    ferry.Group.threads(2).run(body)


@pytest.mark.parametrize("apart", [False, True])
def test_shared_experts(rng, apart):
    step = random_step(rng, 3)

    def body(rank):
        exchange = exchange_for(rank, step, shared_experts=2, combine_type="fp32", reduction="exact")
        assert exchange.config.shared_experts == 2
        tokens, ids, weights = inputs(step, rank)
        rows, count = exchange.dispatch(tokens, ids, weights), len(tokens)
        assert list(rows.counts[:2]) == [count, count] and list(rows.group_expert[:2]) == [step.experts, step.experts + 1]
        for shared in range(2):
            assert same_bits(rows.data[shared * count:(shared + 1) * count], tokens)
            assert rows.source[shared * count:(shared + 1) * count].tolist() == [
                [rank.index, token, step.top_k + shared] for token in range(count)]
        outputs = np.zeros((len(rows.data), HIDDEN), np.float32)  # of the routed experts; the shared ones return 1 and 2
        outputs[:count], outputs[count:2 * count] = 1, 2
        split = poisoned((2, count, HIDDEN), np.float32) if apart else None
        result = exchange.combine(outputs, rows.plan, shared_outputs=split)
        assert (result == (0 if apart else 3)).all()
        if apart:
            assert (split[0] == 1).all() and (split[1] == 2).all()
        with pytest.raises(ferry.UsageError, match="shared_outputs"):
            exchange.combine(outputs, rows.plan, shared_outputs=np.zeros((1, count, HIDDEN), np.float32))

    ferry.Group.threads(3).run(body)


def test_replicated_input(rng):
    step = random_step(rng, 3)
    tokens, ids, weights = step.tokens[0], step.ids[0], step.weights[0]

    def body(rank):
        exchange = exchange_for(rank, step, input="replicated", shared_experts=1, shared_split=3)
        assert (exchange.config.input, exchange.config.shared_split) == ("replicated", 3)
        rows, count = exchange.dispatch(tokens, ids, weights), len(tokens)
        first, end = rank.index * count // 3, (rank.index + 1) * count // 3
        assert rows.counts[0] == end - first and same_bits(rows.data[:end - first], tokens[first:end])
        received = rows.source[:int(rows.total)]
        assert (received[:, 0] == rank.index).all()
        assert exchange.wire_counts().dispatch_bytes == 0
        assert exchange.combine(np.zeros((len(rows.data), HIDDEN), bf16), rows.plan).shape == tokens.shape

    ferry.Group.threads(3).run(body)
