"""Normal mode of deep_ep between simulated nodes: rows, sums and every element of the handle against plain loops."""

import collections
import threading

import numpy as np
import pytest

import ferry
import ferry.deep_ep as deep_ep
from deep_ep_steps import HIDDEN, fp8, layout_and_dispatch, step_of
from ferry.deep_ep import _arrays
from node_ranks import EVEN, OF_DEEP_EP, OTHERS, TRANSPORTS, name_of
from oracle import bf16, messages_to, rank_of, routes_to, same_bits

CHANNELS = 10  # of the default number of SMs
cases = pytest.mark.parametrize("case", EVEN + OTHERS, ids=name_of)
even = pytest.mark.parametrize("case", EVEN, ids=name_of)


def on_nodes(case, body, **settings):
    """Calls body(rank, buffer) on every rank."""
    transport, nodes = case
    settings = {"num_nvl_bytes": int(2e9), "num_rdma_bytes": int(1e9)} | settings
    return TRANSPORTS[transport](nodes, lambda rank: body(rank.index, deep_ep.Buffer(rank, explicitly_destroy=True, **settings)))


def step_for(rng, case, most=45, **settings):
    return step_of(rng, len(case[1]), most, experts=4 * len(case[1]), **settings)


class Expected:
    """What deep_ep defines on one rank, by loops over the ids of all ranks."""

    def __init__(self, step, nodes, me, channels=CHANNELS):
        self.step, self.nodes, self.me, self.channels = step, nodes, me, channels
        self.ranks, self.count = range(len(nodes)), 1 + max(nodes)
        self.local = [sum(nodes[other] == nodes[rank] for other in range(rank)) for rank in self.ranks]

    def tokens(self, source):
        return range(len(self.step.tokens[source]))

    def goes(self, source, token, rank):
        return any(i >= 0 and rank_of(i, self.step) == rank for i in self.step.ids[source][token].tolist())

    def goes_to_node(self, source, token, node):
        return any(self.goes(source, token, rank) for rank in self.ranks if self.nodes[rank] == node)

    def channel(self, source, token):
        return token // max(1, -(-len(self.tokens(source)) // self.channels))

    def relayed(self):
        """(source, token) of every token that comes to this node through this rank, by source node, source rank and token."""
        size = sum(node == self.nodes[self.me] for node in self.nodes)
        passing = [source for source in self.ranks if self.local[source] % size == self.local[self.me]
                   and (self.nodes[source] != self.nodes[self.me] or source == self.me)]
        return [(source, token) for source in sorted(passing, key=lambda rank: (self.nodes[rank], rank))
                for token in self.tokens(source) if self.goes_to_node(source, token, self.nodes[self.me])]

    def is_token_in_rank(self):
        return [[self.goes(self.me, token, rank) for rank in self.ranks] for token in self.tokens(self.me)]

    def rdma_channel_prefix_matrix(self):
        return [[sum(self.channel(self.me, t) <= c and self.goes_to_node(self.me, t, node) for t in self.tokens(self.me))
                 for c in range(self.channels)] for node in range(self.count)]

    def gbl_channel_prefix_matrix(self):
        return [[sum(self.channel(self.me, t) <= c and self.goes(self.me, t, rank) for t in self.tokens(self.me))
                 for c in range(self.channels)] for rank in self.ranks]

    def recv_rdma_channel_prefix_matrix(self):
        return [[sum(self.nodes[source] == node and self.channel(source, token) <= c for source, token in self.relayed())
                 for c in range(self.channels)] for node in range(self.count)]

    def recv_rdma_rank_prefix_sum(self):
        return [sum(self.nodes[source] <= node for source, _ in self.relayed()) for node in range(self.count)]

    def recv_gbl_channel_prefix_matrix(self):
        rows = messages_to(self.step, self.me)
        return [[sum((source, self.channel(source, token)) < (rank, c) for source, token in rows)
                 for c in range(self.channels)] for rank in self.ranks]

    def recv_gbl_rank_prefix_sum(self):
        return [sum(source <= rank for source, _ in messages_to(self.step, self.me)) for rank in self.ranks]

    def recv_src_meta(self):
        mine = [rank for rank in self.ranks if self.nodes[rank] == self.nodes[self.me]]
        rows = [(self.nodes[source], sum(self.goes(source, token, rank) << i for i, rank in enumerate(mine)))
                for source, token in messages_to(self.step, self.me)]
        return np.array(rows, np.int32).reshape(-1, 2).view(np.uint8).tolist()

    def send_rdma_head(self):
        def before(token, node):
            return sum(self.channel(self.me, t) == self.channel(self.me, token) and self.goes_to_node(self.me, t, node)
                       for t in range(token))

        return [[before(t, node) if self.goes_to_node(self.me, t, node) else -1 for node in range(self.count)]
                for t in self.tokens(self.me)]

    def send_nvl_head(self):
        def before(source, token, rank):
            return sum(self.channel(source, t) == self.channel(source, token) and self.goes(source, t, rank) for t in range(token))

        mine = [rank for rank in self.ranks if self.nodes[rank] == self.nodes[self.me]]
        return [[before(source, token, rank) if self.goes(source, token, rank) else -1 for rank in mine]
                for source, token in self.relayed()]

    NAMES = ("is_token_in_rank", "rdma_channel_prefix_matrix", "gbl_channel_prefix_matrix", "recv_rdma_channel_prefix_matrix",
             "recv_rdma_rank_prefix_sum", "recv_gbl_channel_prefix_matrix", "recv_gbl_rank_prefix_sum", "recv_src_meta",
             "send_rdma_head", "send_nvl_head")

    def check(self, handle):
        assert len(handle) == len(list(handle)) == 10
        for name, element in zip(self.NAMES, handle):
            expected = getattr(self, name)()
            assert element.tolist() == expected, name
            assert element.dtype == {"is_token_in_rank": np.bool_, "recv_src_meta": np.uint8}.get(name, np.int32), name
        rows = self.recv_rdma_rank_prefix_sum()[-1]
        assert handle[-1].shape == (rows, sum(node == self.nodes[self.me] for node in self.nodes))
        assert handle[-3].shape == (len(messages_to(self.step, self.me)), 8) and handle[-4].tolist() == handle[6].tolist()


@pytest.mark.parametrize("case", [*EVEN, OF_DEEP_EP, *OTHERS], ids=name_of)
def test_every_element_of_a_handle(rng, case):
    step = step_for(rng, case, most=45 if len(case[1]) < 16 else 9)

    def body(me, buffer):
        handle = layout_and_dispatch(buffer, step, me)[4]
        Expected(step, case[1], me).check(handle)
        # Other numbers of channels: one token each, and one for all.
        for sms in (2, 200):
            handle = layout_and_dispatch(buffer, step, me, config=deep_ep.Config(sms, 8, 256, 8, 128))[4]
            Expected(step, case[1], me, sms // 2).check(handle)

    on_nodes(case, body)


@cases
def test_layout(rng, case):
    step = step_for(rng, case)

    def body(me, buffer):
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(step.ids[me], step.experts)
        expected = Expected(step, case[1], me)
        assert in_rank.tolist() == expected.is_token_in_rank() and per_rank.tolist() == in_rank.sum(0).tolist()
        assert per_node.dtype == np.int32
        assert per_node.tolist() == [row[-1] for row in expected.rdma_channel_prefix_matrix()]
        assert per_expert.tolist() == [int((step.ids[me] == e).sum()) for e in range(step.experts)]

    on_nodes(case, body)


def check_rows(step, me, rows, idx, weights, counts, alignment=1):
    expected = messages_to(step, me)
    experts = step.experts // step.ranks
    first = me * experts
    assert rows.shape == (len(expected), HIDDEN) and idx.dtype == step.ids[me].dtype and weights.dtype == np.float32
    for row, (source, token) in enumerate(expected):
        here = [i >= 0 and rank_of(i, step) == me for i in step.ids[source][token].tolist()]
        assert same_bits(rows[row], step.tokens[source][token])
        assert idx[row].tolist() == np.where(here, step.ids[source][token] - first, -1).tolist()
        assert same_bits(weights[row], np.where(here, step.weights[source][token], np.float32(0)))
    pairs = [sum(route[0] == first + e for route in routes_to(step, me)) for e in range(experts)]
    assert counts == [-(-n // alignment) * alignment for n in pairs]


@cases
@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_rows_are_ordered_by_source_rank_and_token(rng, case, ids):
    step = step_for(rng, case, ids=ids)

    def body(me, buffer):
        method = buffer.dispatch if me % 2 else buffer.internode_dispatch
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(step.ids[me], step.experts)
        given = dict(num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
                     num_tokens_per_expert=per_expert, topk_idx=step.ids[me], topk_weights=step.weights[me], expert_alignment=8)
        found = [method(step.tokens[me], **given) for _ in range(3)]
        for rows, idx, weights, counts, *_ in found:
            check_rows(step, me, rows, idx, weights, counts, 8)

    on_nodes(case, body)


def outputs_of(rank, rows):
    """What the experts of a rank make of its rows: another factor on every rank."""
    return (rows.astype(np.float32) * np.float32(1 + rank / 8)).astype(bf16)


def sums_of_nodes(step, nodes, me, biases=()):
    """Fp32 sums over the ranks of a node, rounded to bf16, then over nodes, in order; then the biases."""
    expected = Expected(step, nodes, me)
    total = np.zeros(step.tokens[me].shape, np.float32)
    for token in expected.tokens(me):
        for node in range(expected.count):
            ranks = [rank for rank in expected.ranks if nodes[rank] == node and expected.goes(me, token, rank)]
            if not ranks:
                continue
            of_node = np.zeros(HIDDEN, np.float32)
            for rank in ranks:
                of_node = of_node + outputs_of(rank, step.tokens[me][token]).astype(np.float32)
            total[token] = total[token] + of_node.astype(bf16).astype(np.float32)
    for bias in biases:
        total = total + bias.astype(np.float32)
    return total.astype(bf16)


@cases
@pytest.mark.parametrize("biases", [0, 1, 2])
def test_combine_adds_ranks_then_nodes(rng, case, biases):
    step = step_for(rng, case)
    terms = [[rng.standard_normal(x.shape).astype(bf16) for _ in range(biases)] for x in step.tokens]

    def body(me, buffer):
        rows, _, weights, _, handle, _ = layout_and_dispatch(buffer, step, me)
        bias = None if not biases else terms[me][0] if biases == 1 else tuple(terms[me])
        method = buffer.combine if me % 2 else buffer.internode_combine
        for _ in range(2):
            y, of_slots, _ = method(outputs_of(me, rows), handle, topk_weights=weights, bias=bias)
            assert y.dtype == bf16 and same_bits(y, sums_of_nodes(step, case[1], me, terms[me]))
            assert same_bits(of_slots, np.where(step.ids[me] >= 0, step.weights[me], np.float32(0)))
        dense = sum(step.tokens[me].astype(np.float64) * (1 + rank / 8) * handle[0][:, rank : rank + 1] for rank in range(len(case[1])))
        for bias_term in terms[me]:
            dense = dense + bias_term.astype(np.float64)
        assert np.abs(y.astype(np.float64) - dense).max(initial=0) < 0.1 * (1 + np.abs(dense).max(initial=0))

    on_nodes(case, body)


@cases
def test_a_handle_is_reused(rng, case):
    step = step_for(rng, case)

    def body(me, buffer):
        rows, *_, handle, _ = layout_and_dispatch(buffer, step, me)
        layout_and_dispatch(buffer, step, me, x=(step.tokens[me] * 2).astype(bf16))  # another call in between
        before = deep_ep.Buffer.capture()
        for method in (buffer.dispatch, buffer.internode_dispatch):
            cached = method(step.tokens[me], handle=handle, previous_event=before, async_finish=True)
            cached[-1].current_stream_wait()
            assert len(cached) == 6 and cached[1:5] == (None,) * 4 and same_bits(cached[0], rows)
        y = buffer.combine(outputs_of(me, cached[0]), handle, previous_event=before, async_finish=True)
        y[-1].current_stream_wait()
        assert same_bits(y[0], sums_of_nodes(step, case[1], me))
        Expected(step, case[1], me).check(handle)

    on_nodes(case, body)


@cases
@pytest.mark.parametrize("with_tokens", ["none", "first", "last"])
def test_ranks_without_tokens(rng, case, with_tokens):
    step = step_for(rng, case)
    for rank in range(step.ranks):
        if with_tokens == "none" or rank != {"first": 0, "last": step.ranks - 1}[with_tokens]:
            for arrays in (step.tokens, step.ids, step.weights):
                arrays[rank] = arrays[rank][:0]

    def body(me, buffer):
        rows, idx, weights, counts, handle, _ = layout_and_dispatch(buffer, step, me)
        check_rows(step, me, rows, idx, weights, counts)
        Expected(step, case[1], me).check(handle)
        assert same_bits(buffer.dispatch(step.tokens[me], handle)[0], rows)
        y, of_slots, _ = buffer.combine(outputs_of(me, rows), handle, topk_weights=weights)
        assert same_bits(y, sums_of_nodes(step, case[1], me)) and of_slots.shape == step.ids[me].shape

    on_nodes(case, body)


@even
def test_masked_ids(rng, case):
    step = step_for(rng, case)
    for ids in step.ids:
        ids[::2] = -1  # whole tokens

    def body(me, buffer):
        rows, idx, weights, counts, handle, _ = layout_and_dispatch(buffer, step, me)
        check_rows(step, me, rows, idx, weights, counts)
        Expected(step, case[1], me).check(handle)
        y = buffer.combine(outputs_of(me, rows), handle)[0]
        assert not y[::2].any() and same_bits(y, sums_of_nodes(step, case[1], me))

    on_nodes(case, body)


@even
def test_quantised_rows_are_moved_unchanged(rng, case):
    step = step_for(rng, case)
    x = [(rng.integers(0, 255, (len(x), HIDDEN)).astype(np.uint8).view(fp8), np.asfortranarray(rng.random((len(x), 2), np.float32)))
         for x in step.tokens]

    def body(me, buffer):
        (values, scales), *_, handle, _ = layout_and_dispatch(buffer, step, me, x=x[me])
        for row, (source, token) in enumerate(messages_to(step, me)):
            assert same_bits(values[row], x[source][0][token]) and same_bits(scales[row], x[source][1][token])
        again = buffer.dispatch(x[me], handle)[0]
        assert same_bits(again[0], values) and same_bits(again[1], scales)

    on_nodes(case, body)


@cases
def test_dispatch_without_ids(rng, case):
    step = step_for(rng, case)

    def body(me, buffer):
        rows, idx, weights, counts, handle, _ = layout_and_dispatch(buffer, step, me, topk_idx=None, topk_weights=None)
        assert idx is None and weights is None
        assert counts == [sum(route[0] == me * 4 + e for route in routes_to(step, me)) for e in range(4)]
        for row, (source, token) in enumerate(messages_to(step, me)):
            assert same_bits(rows[row], step.tokens[source][token])
        Expected(step, case[1], me).check(handle)
        assert same_bits(buffer.dispatch(step.tokens[me], handle)[0], rows)
        y, none, _ = buffer.combine(outputs_of(me, rows), handle)
        assert none is None and same_bits(y, sums_of_nodes(step, case[1], me))

    on_nodes(case, body)


@cases
def test_a_token_crosses_once_for_each_node(rng, case):
    step = step_for(rng, case)

    def body(me, buffer):
        rows, *_, handle, _ = layout_and_dispatch(buffer, step, me)
        for _ in range(2):
            buffer.dispatch(step.tokens[me], handle)
            buffer.combine(rows, handle)
        expected, wire = Expected(step, case[1], me), handle.exchange.wire_counts()
        own = case[1][me]
        sent = sum(row[-1] for node, row in enumerate(expected.rdma_channel_prefix_matrix()) if node != own)
        assert wire.dispatch_messages_between_nodes == 3 * sent
        return 2 * sent, wire.combine_messages_between_nodes

    # Combine returns one sum for each of them.
    sent, returned = zip(*on_nodes(case, body))
    assert sum(returned) == sum(sent)


@even
def test_later_calls_copy_nothing_from_the_host(rng, case, monkeypatch):
    """On GPUs such a copy would make the host wait, and could not be captured in a graph."""
    step, copies, lock = step_for(rng, case), collections.Counter(), threading.Lock()
    from_list = _arrays.NumpyArrays.from_list

    def counted(self, *arguments):
        with lock:
            copies[threading.get_ident()] += 1
        return from_list(self, *arguments)

    monkeypatch.setattr(_arrays.NumpyArrays, "from_list", counted)
    worst = len(case[1]) * max(map(len, step.tokens))

    def calls(me, buffer):
        rows, _, weights, _, handle, _ = layout_and_dispatch(buffer, step, me, num_worst_tokens=worst)
        buffer.dispatch(step.tokens[me], handle)
        buffer.combine(rows, handle, topk_weights=weights, bias=step.tokens[me])
        return copies[threading.get_ident()]

    def body(me, buffer):
        first = calls(me, buffer)
        assert first > 0
        return calls(me, buffer) - first

    assert on_nodes(case, body) == [0] * len(case[1])


def test_more_ranks_than_slots(rng):
    """Without ids a token has one slot for each rank that it goes to, of which there may be 32."""
    case = ("shared memory", [0] * 17 + [1] * 17)
    ranks = len(case[1])
    step = step_of(rng, ranks, 3, experts=ranks, top_k=8)

    def body(me, buffer):
        rows, _, _, counts, handle, _ = layout_and_dispatch(buffer, step, me, topk_idx=None, topk_weights=None)
        assert counts == [len(routes_to(step, me))]
        assert [rows[i].tobytes() for i in range(len(rows))] == [step.tokens[s][t].tobytes() for s, t in messages_to(step, me)]
        assert handle[6].tolist() == Expected(step, case[1], me).recv_gbl_rank_prefix_sum()
        assert same_bits(buffer.combine(outputs_of(me, rows), handle)[0], sums_of_nodes(step, case[1], me))
        everywhere = np.ones((1, ranks), bool)
        with pytest.raises(ferry.UsageError, match="a token may go to 32 ranks, and one goes to more" if me == 1 else "rank 1 refused"):
            buffer.dispatch(np.ones((1, HIDDEN), bf16), None, np.ones(ranks, np.int32), np.ones(2, np.int32),
                            everywhere if me == 1 else ~everywhere, np.ones(ranks, np.int32))
        return True

    assert on_nodes(case, body) == [True] * ranks


@even
def test_worst_case_rows(rng, case):
    step = step_for(rng, case)
    worst = len(case[1]) * 45

    def body(me, buffer):
        rows, idx, weights, *_ = layout_and_dispatch(buffer, step, me)
        many, many_idx, many_weights, none, handle, _ = layout_and_dispatch(buffer, step, me, num_worst_tokens=worst)
        n = len(rows)
        assert none == [] and many.shape == (worst, HIDDEN) and same_bits(many[:n], rows)
        assert same_bits(many_idx[:n], idx) and same_bits(many_weights[:n], weights) and (many_idx[n:] == -1).all()
        Expected(step, case[1], me).check(handle)
        many[n:] = 0  # rows that were not received hold anything
        assert same_bits(buffer.combine(outputs_of(me, many), handle)[0], sums_of_nodes(step, case[1], me))

    on_nodes(case, body)


@even
def test_more_tokens_than_before(rng, case):
    small, large = step_for(rng, case, most=3), step_for(rng, case, most=400)

    def body(me, buffer):
        first, *_, handle, _ = layout_and_dispatch(buffer, small, me)
        many, *_, of_large, _ = layout_and_dispatch(buffer, large, me)
        assert len(many) == len(messages_to(large, me))
        assert same_bits(buffer.dispatch(small.tokens[me], handle)[0], first)
        Expected(small, case[1], me).check(handle)
        assert of_large[6].tolist() == Expected(large, case[1], me).recv_gbl_rank_prefix_sum()

    on_nodes(case, body)


def test_a_node_of_more_ranks_than_bits(rng, monkeypatch):
    monkeypatch.setattr("ferry.deep_ep._nodes.MOST_RANKS_OF_A_NODE", 1)
    case = EVEN[0]
    step = step_for(rng, case)

    def body(me, buffer):
        rows, *_, handle, _ = layout_and_dispatch(buffer, step, me)
        expected = Expected(step, case[1], me)
        assert handle[-4].tolist() == expected.recv_gbl_rank_prefix_sum() and handle[8].tolist() == expected.send_rdma_head()
        for index in (3, 4, 5, 7, 9):
            with pytest.raises(ferry.UnsupportedError, match="as bits, of at most 1 ranks"):
                handle[index]
        assert same_bits(buffer.combine(outputs_of(me, rows), handle)[0], sums_of_nodes(step, case[1], me))

    on_nodes(case, body)
