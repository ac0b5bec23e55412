"""ferry.max: MAX's call shapes, with NumPy arrays and ranks as threads."""

import re

import numpy as np
import pytest

import ferry
import ferry.max
from max_steps import expected_dispatch, expected_rows, expected_sums, outputs_of
from oracle import random_step


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def exchange_of(rank, **settings):
    return ferry.max.Exchange(rank, **({"experts": 6, "top_k": 2, "hidden": 4, "max_tokens": 4, "format": "fp32",
                                        "combine_type": "fp32"} | settings))


def test_groups_without_rows_are_left_out():
    for counts in ([2, 0, 3], np.array([2, 0, 3]), (2, 0, 3)):
        offsets, ids = ferry.max.group_index(counts)
        assert same(offsets, np.array([0, 2, 5], np.uint32)) and same(ids, np.array([0, 2], np.int32))
    offsets, ids = ferry.max.group_index([3, 0, 4, 1], alignment=4)
    assert offsets.tolist() == [0, 4, 8, 12] and ids.tolist() == [0, 2, 3]
    with pytest.raises(ferry.UsageError, match=r"counts\[1\] = -2, must be 0 or more"):
        ferry.max.group_index([1, -2])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shared", [0, 2])
def test_random_ids_agree_with_loops(rng, ranks, shared):
    for reduction in ("exact", "unreduced"):
        step = random_step(rng, ranks, experts=ranks * 2 + 1, top_k=3, hidden=24, most=9, dtype=np.float32)
        step.tokens[-1], step.ids[-1], step.weights[-1] = step.tokens[-1][:0], step.ids[-1][:0], step.weights[-1][:0]

        def body(rank):
            me = rank.index
            exchange = exchange_of(rank, experts=step.experts, top_k=3, hidden=24, max_tokens=9, shared_experts=shared,
                                   reduction=reduction, lanes=2)
            for split in (False, True):
                if split:
                    exchange.ep_dispatch_async(step.tokens[me], step.ids[me], lane=1)
                    received = exchange.ep_dispatch_wait(lane=1)
                else:
                    received = exchange.ep_fused_dispatch(step.tokens[me], step.ids[me])
                got = [received.output_tokens, *received[2:7]]
                assert all(map(same, got, expected_dispatch(step, me, shared)))
                rows = outputs_of(received.output_tokens, received.row_offsets, received.expert_ids)
                options = {"router_weights": step.weights[me]} if reduction == "exact" else {}
                if reduction == "unreduced" and shared:
                    options["shared_outputs"] = np.empty((shared, *step.tokens[me].shape), np.float32)
                if split:
                    exchange.ep_combine_async(rows, received.src_info, received.row_offsets, received.counts, lane=1, **options)
                    y = exchange.ep_combine_wait(lane=1)
                else:
                    y = exchange.ep_fused_combine(rows, received.src_info, received.row_offsets, received.counts, **options)
                if reduction == "exact":
                    assert same(y, expected_sums(step, me, step.weights[me], shared))
                else:
                    assert same(y, expected_rows(step, me, shared))
                    for s in range(shared):
                        assert same(options["shared_outputs"][s], step.tokens[me] * np.float32(s + 1))

        ferry.Group.threads(ranks).run(body)


def test_a_scale_that_is_none_is_reported_and_the_rows_are_there(rng):
    def body(rank):
        exchange = exchange_of(rank, hidden=32, format="nvfp4")
        x = np.full((2, 32), 3, np.float32)
        exchange.ep_fused_dispatch(x[:1], CASE_IDS[0][:1])
        with pytest.raises(ferry.UsageError, match=f"global_scale = 0 on rank {rank.index}, must be positive and finite"):
            exchange.ep_fused_dispatch(x, CASE_IDS[rank.index], global_scale=0)
        received = exchange.last_dispatch_result()
        assert (received.output_scales[:, :2].view(np.uint8) == 0x7F).all()
        rows = np.ones((len(received.output_tokens), 32), np.float32)
        assert combined(exchange, received, rows).shape == (2, 32)  # by the ids of that dispatch

    ferry.Group.threads(2).run(body)


CASE_IDS = (np.array([[3, 5], [5, 0]], np.int32), np.array([[5, 3], [-1, 1]], np.int32))


def case(rank):
    x = np.arange(8, dtype=np.float32).reshape(2, 4) + 100 * rank.index
    exchange = exchange_of(rank)
    return exchange, x, exchange.ep_fused_dispatch(x, CASE_IDS[rank.index])


def combined(exchange, received, rows=None, **options):
    return exchange.ep_fused_combine(received.output_tokens if rows is None else rows, received.src_info, received.row_offsets,
                                     received.counts, **options)


def test_combine_of_an_earlier_dispatch():
    def body(rank):
        exchange, x, first = case(rank)
        rows = first.output_tokens.copy()
        second = exchange.ep_fused_dispatch(x[:1] + 7, CASE_IDS[0][:1])
        assert same(combined(exchange, second), 2 * (x[:1] + 7))
        expected = x * np.array([[2], [1 + (rank.index == 0)]], np.float32)
        assert same(combined(exchange, first, rows, topk_ids=CASE_IDS[rank.index]), expected)
        # No tokens, which are not those of the last dispatch.
        none = exchange.ep_fused_dispatch(x[:0], CASE_IDS[0][:0])
        exchange.ep_fused_dispatch(x, CASE_IDS[rank.index])
        assert combined(exchange, none, x[:0], topk_ids=CASE_IDS[0][:0]).shape == (0, 4)

    ferry.Group.threads(2).run(body)


def test_scale_and_residual():
    def body(rank):
        exchange, x, received = case(rank)
        y = combined(exchange, received)
        assert same(combined(exchange, received, scale=0.5, residual=x), y * np.float32(0.5) + x)
        assert same(combined(exchange, received, scale=3), y * np.float32(3))
        strided = np.zeros((2, 8), np.float32)
        strided[:, :4] = x
        exchange.ep_combine_async(received.output_tokens, received.src_info, received.row_offsets, received.counts,
                                  residual=strided[:, :4])
        assert same(exchange.ep_combine_wait(), y + x)
        for wrong, pattern in ((x.astype(np.float16), "residual: expected float32, got float16"),
                               (x[:1], r"residual: expected shape \[2, 4\], got \[1, 4\]")):
            with pytest.raises(ferry.UsageError, match=pattern):
                combined(exchange, received, residual=wrong if rank.index else x)
        assert same(combined(exchange, received), y)

    ferry.Group.threads(2).run(body)


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


# What rank 1 changes of its arguments, and what every rank must be told.
BAD = {
    "a token out of range": ("src_info", lambda a: changed(a, (0, 0), 9), r"rank 1: src_info\[0\] = \{9, 0\}, of rank 0, must be below \{4, 2\}"),
    "a row twice": ("src_info", lambda a: changed(a, 3, [0, 1]), r"rank 1: src_info\[3\] = \{0, 1\}, of rank 0, is also in row 2; pass"),
    "another expert": ("src_info", lambda a: changed(a, 1, [0, 0]), r"rank 1: src_info\[1\] = \{0, 0\} is a row of expert 3, topk_ids\[0, 0\] of rank 1"),
    "fewer rows": ("src_info", lambda a: a[:4], "rank 1: src_info has 4 rows, row_offsets say 5; pass"),
    "indices of another type": ("src_info", lambda a: a.astype(np.int64), r"rank 1: src_info: int64 \[5, 2\], must be int32 \[any, 2\]; pass"),
    "no array": ("src_info", lambda a: a.tolist(), "rank 1: src_info: a list, must be an array; pass"),
    "other offsets": ("row_offsets", lambda a: changed(a, 1, 1), r"rank 1: row_offsets\[1\] = 1, counts give 2; pass"),
    "offsets of another type": ("row_offsets", lambda a: a.astype(np.int32), r"rank 1: row_offsets: int32 \[3\], must be uint32 \[any\]"),
    "a negative count": ("counts", lambda a: changed(a, (0, 0), -1), r"rank 1: counts\[0, 0\] = -1, must be 0 to max_tokens x top_k = 8; pass"),
    "counts of another shape": ("counts", lambda a: a[:, :1], r"rank 1: counts: int32 \[3, 1\], must be int32 \[any, 2\]"),
    "too few counts": ("counts", lambda a: a[:2], "rank 1: counts has 4 entries, must have 3 x 2"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("split", [False, True])
def test_bad_input_is_refused_on_every_rank(name, split):
    field, change, pattern = BAD[name]

    def body(rank):
        exchange, x, received = case(rank)
        expected = combined(exchange, received)
        bad = received._replace(**{field: change(getattr(received, field))}) if rank.index else received
        with pytest.raises(ferry.UsageError, match=pattern):
            if split:
                exchange.ep_combine_async(bad.output_tokens, bad.src_info, bad.row_offsets, bad.counts)
                exchange.ep_combine_wait()
            else:
                combined(exchange, bad)
        assert same(combined(exchange, received), expected)

    ferry.Group.threads(2).run(body)


def test_other_arguments_are_refused_on_every_rank():
    def body(rank):
        exchange, x, received = case(rank)
        wrong = rank.index == 1
        for options, pattern in (
            ({"topk_ids": CASE_IDS[1].astype(np.int16)}, r"rank 1: topk_ids: int16 \[2, 2\], must be int32 or int64 \[any, 2\]"),
            ({"router_weights": np.ones((2, 3), np.float32)}, "router_weights"),
        ):
            with pytest.raises(ferry.UsageError, match=pattern):
                combined(exchange, received, **(options if wrong else {}))
        with pytest.raises(ferry.UsageError, match="input_tokens"):
            combined(exchange, received, received.output_tokens[:, :2] if wrong else None)
        with pytest.raises(ferry.UsageError, match="rank 1: input_tokens: None"):
            exchange.ep_fused_combine(None if wrong else received.output_tokens, received.src_info, received.row_offsets, received.counts)
        with pytest.raises(ferry.UsageError, match="lane = 1, must be 0 to 0"):
            exchange.ep_combine_wait(lane=1)
        with pytest.raises(ferry.UsageError, match="call ep_combine_async first"):
            exchange.ep_combine_wait()
        exchange.ep_dispatch_async(x, CASE_IDS[rank.index])
        with pytest.raises(ferry.UsageError, match="call ep_dispatch_wait first"):
            combined(exchange, received)
        assert same(exchange.ep_dispatch_wait().src_info, received.src_info)

    ferry.Group.threads(2).run(body)


class Unreadable(np.ndarray):
    """An array whose shape raises `error`."""

    error: BaseException

    @property
    def shape(self):
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_an_argument_raises_reaches_the_peers_and_is_kept(error):
    def body(rank):
        exchange, x, received = case(rank)
        bad = received
        if rank.index:
            bad = received._replace(src_info=received.src_info.view(Unreadable))
            bad.src_info.error = error("no shape")
        with pytest.raises(error if rank.index and error is KeyboardInterrupt else ferry.UsageError, match="no shape") as caught:
            combined(exchange, bad)
        if rank.index and error is RuntimeError:
            assert isinstance(caught.value.__cause__, RuntimeError)
        assert combined(exchange, received).shape == x.shape

    ferry.Group.threads(2).run(body)


# A wrong argument of rank 1's dispatch or combine, and what every rank must be told.
SPOKEN = {
    "rows of another type": ("dispatch", {"input_tokens": np.ones((2, 4), np.float64)}, "input_tokens: expected .* got float64"),
    "a type that the format does not take": ("dispatch", {"input_tokens": np.ones((2, 4), np.float16)},
                                             "but input_tokens are fp16: .* or construct the exchange with format = fp16"),
    "rows of another width": ("dispatch", {"input_tokens": np.ones((2, 3), np.float32)}, "input_tokens: expected rows of 4 columns"),
    "too many tokens": ("dispatch", {"input_tokens": np.ones((5, 4), np.float32), "topk_ids": np.zeros((5, 2), np.int32)},
                        "ep_dispatch: 5 tokens on rank 1, max_tokens is 4"),
    "no tokens": ("dispatch", {"input_tokens": None}, "input_tokens: "),
    "ids of another type": ("dispatch", {"topk_ids": np.zeros((2, 2), np.int16)}, "topk_ids: expected int32 or int64"),
    "ids of another shape": ("dispatch", {"topk_ids": np.zeros((2, 3), np.int32)}, "topk_ids: expected an array of shape"),
    "a format too large": ("dispatch", {"format": "raw:4096", "input_tokens": (np.zeros((2, 4096), np.uint8),)},
                           "ep_dispatch: a message of format raw:4096"),
    "raw parts of another size": ("dispatch", {"format": "raw:16", "input_tokens": (np.zeros((2, 12), np.uint8),)},
                                  r"input_tokens\[0\]: expected rows of 16 bytes"),
    "a scale of another format": ("dispatch", {"global_scale": 2.0}, "ep_dispatch: global_scale is for the format nvfp4"),
    "outputs of another width": ("combine", {"input_tokens": np.ones((5, 3), np.float32)}, "input_tokens: expected rows of 4 columns"),
    "too few outputs": ("combine", {"input_tokens": np.ones((1, 4), np.float32)}, "input_tokens: expected . rows or more, got 1"),
    "no outputs": ("combine", {"input_tokens": None}, "rank 1: input_tokens: None, must be an array of rows"),
    "too many ids": ("combine", {"topk_ids": np.zeros((5, 2), np.int32)}, "rank 1: rows of topk_ids = 5, must be 0 to max_tokens = 4"),
    "weights of another shape": ("combine", {"router_weights": np.ones((2, 3), np.float32)}, "router_weights: expected an array of shape"),
    "a result of another shape": ("combine", {"output_tokens": np.ones((3, 4), np.float32)}, "output_tokens: expected shape"),
    "a read-only result": ("combine", {"output_tokens": np.broadcast_to(np.float32(0), (2, 4))}, "output_tokens: is read-only"),
    "an argument of another name": ("combine", {"topk_weights": np.ones((2, 2), np.float32)}, "there is no argument 'topk_weights'"),
    "shared outputs without experts": ("combine", {"shared_outputs": np.ones((0, 2, 4), np.float32)}, "ep_combine: shared_outputs"),
}


@pytest.mark.parametrize("name", SPOKEN)
@pytest.mark.parametrize("split", [False, True])
def test_errors_speak_of_the_arguments_of_these_calls(name, split):
    call, change, pattern = SPOKEN[name]

    def body(rank):
        exchange, x, received = case(rank)
        changed = change if rank.index else {}
        with pytest.raises(ferry.UsageError, match=pattern) as caught:
            if call == "dispatch":
                given = {"input_tokens": x, "topk_ids": CASE_IDS[rank.index]} | changed
                if split:
                    exchange.ep_dispatch_async(**given)
                    exchange.ep_dispatch_wait()
                else:
                    exchange.ep_fused_dispatch(**given)
            else:
                given = {"input_tokens": x[[0] * len(received.src_info)], "src_info": received.src_info,
                         "row_offsets": received.row_offsets, "counts": received.counts} | changed
                if split:
                    exchange.ep_combine_async(**given)
                    exchange.ep_combine_wait()
                else:
                    exchange.ep_fused_combine(**given)
        assert not re.search(r"\b(tokens|ids|outputs|result|topk_weights|dispatch|combine)(: |\[)|memory\.|choose the", str(caught.value))

    ferry.Group.threads(2).run(body)


def test_rows_that_do_not_come_back_are_found():
    def body(rank):
        exchange, second = exchange_of(rank, experts=4, top_k=1), rank.index == 1
        x = np.ones((2, 4), np.float32)

        def dispatch(*ids):
            return exchange.ep_fused_dispatch(x, np.array(ids if not second else (0, 0), np.int32).reshape(2, 1))

        other_expert, last = dispatch(2, 3), dispatch(2, 2)
        if second:
            combined(exchange, other_expert, x)
        else:
            with pytest.raises(ferry.UsageError, match=r"topk_ids\[1, 0\] of rank 0 is expert 2: rank 1 has returned no row for it"):
                combined(exchange, last, x)
        assert same(combined(exchange, last, x), x)

    ferry.Group.threads(2).run(body)


def test_ranks_in_different_calls_can_go_on():
    def body(rank):
        exchange, x, received = case(rank)
        with pytest.raises(ferry.UsageError, match="call 2 of the lane is (dispatch|combine) on rank"):
            if rank.index:
                combined(exchange, received)
            else:
                exchange.ep_fused_dispatch(x, CASE_IDS[0])
        with pytest.raises(ferry.UsageError, match="call 3 of the lane is (dispatch|combine) on rank"):
            if rank.index:
                exchange.ep_fused_dispatch(x, CASE_IDS[1])
            else:
                combined(exchange, received)
        if rank.index == 0:
            with pytest.raises(ferry.UsageError, match="rank 1 refused ep_combine 4"):
                combined(exchange, received)
        else:
            with pytest.raises(ferry.UsageError, match="src_info"):
                combined(exchange, received._replace(src_info=None))
        combined(exchange, received)

    ferry.Group.threads(2).run(body)


def test_an_id_out_of_range_is_reported_on_its_rank():
    def body(rank):
        exchange, x = exchange_of(rank), np.ones((1, 4), np.float32)
        ids = np.array([[0, 9 if rank.index else 3]], np.int64)
        if rank.index:
            with pytest.raises(ferry.BadIdError):
                exchange.ep_fused_dispatch(x, ids)
            received = exchange.last_dispatch_result()
        else:
            received = exchange.ep_fused_dispatch(x, ids)
        assert same(combined(exchange, received), x * np.float32(1 if rank.index else 2))

    ferry.Group.threads(2).run(body)


@pytest.mark.parametrize("shared, world", [(0, 4), (1, 3), (2, 2), (1, 1), (1, 0)])
def test_skip_a2a_sums_the_rows_of_local_experts(rng, shared, world):
    ranks, experts, top_k, hidden, most = 3, 7, 3, 24, 9
    step = random_step(rng, 1, experts=experts, top_k=top_k, hidden=hidden, most=most, dtype=np.float32)
    x, ids, weights = step.tokens[0], step.ids[0], step.weights[0]

    def body(rank):
        me = rank.index
        exchange = exchange_of(rank, experts=experts, top_k=top_k, hidden=hidden, max_tokens=most, shared_experts=shared, skip_a2a=True,
                               allreduce_world_size=world)
        first = [0, 3, 5, 7]  # experts of the ranks
        mine = range(len(x)) if world == 0 else range(me * len(x) // world, (me + 1) * len(x) // world) if me < world else range(0)
        rows = [(s, token, top_k + s) for s in range(shared) for token in mine]
        for expert in range(first[me], first[me + 1]):
            rows += [(shared + expert - first[me], token, slot) for token in range(len(x)) for slot in range(top_k) if ids[token, slot] == expert]
        groups = np.array([row[0] for row in rows], np.int32)
        y = np.zeros_like(x)
        for token in range(len(x)):
            for slot in range(top_k):
                if first[me] <= ids[token, slot] < first[me + 1]:
                    output = x[token] * np.float32(shared + ids[token, slot] - first[me] + 1)
                    y[token] = (output.astype(np.float64) * weights[token, slot] + y[token]).astype(np.float32)
            for s in range(shared if token in mine else 0):
                y[token] += x[token] * np.float32(s + 1)
        for split in (False, True):
            if split:
                exchange.ep_dispatch_async(x, ids)
                received = exchange.ep_dispatch_wait()
            else:
                received = exchange.ep_fused_dispatch(x, ids)
            assert same(received.src_info, np.array([row[1:] for row in rows], np.int32).reshape(-1, 2))
            assert same(received.output_tokens, x[received.src_info[:, 0]])
            assert same(received.expert_ids, np.unique(groups))
            assert (received.counts[:, me] == np.bincount(groups, minlength=len(received.counts))).all() and received.counts.sum() == len(rows)
            outputs = outputs_of(received.output_tokens, received.row_offsets, received.expert_ids)
            got = combined(exchange, received, outputs, router_weights=weights, topk_ids=ids if split else None)
            assert same(got, y)
        exchange.ep_combine_async(outputs, received.src_info, received.row_offsets, received.counts)
        assert same(exchange.ep_combine_wait(), combined(exchange, received, outputs))

    ferry.Group.threads(ranks).run(body)


def test_errors_with_skip_a2a_speak_of_its_arguments():
    def body(rank):
        exchange = exchange_of(rank, skip_a2a=True, shared_experts=1, allreduce_world_size=2)
        x, ids, second = np.ones((3, 4), np.float32), CASE_IDS[0][[0, 1, 0]], rank.index == 1
        received = exchange.ep_fused_dispatch(x, ids)  # shared rows of rank 1: tokens 1 and 2; routed: {0, 0} {2, 0}, {0, 1} {1, 0} {2, 1}
        arrays = (received.src_info, received.row_offsets, received.counts)
        y = combined(exchange, received)
        with pytest.raises(ferry.UsageError, match="ep_combine: with skip_a2a ep_combine_async takes no router_weights: call ep_fused_combine"):
            exchange.ep_combine_async(received.output_tokens, *arrays, router_weights=np.ones((3, 2), np.float32))
        for field, index, value, pattern in (
            ("src_info", (0, 0), 0, r"rank 1: src_info\[0\] = \{0, 2\}, must be \{1, 2\}: rows of a shared expert"),
            ("src_info", (2, 0), 1, r"rank 1: src_info\[2\] = \{1, 0\} is a row of expert 3, topk_ids\[1, 0\] of rank 1 is another expert"),
            ("counts", (0, 1), 3, r"rank 1: counts\[0, 1\] = 3, must be 2: a shared expert has the 2 tokens of rank 1 alone"),
            ("counts", (1, 0), 1, r"rank 1: counts\[1, 0\] = 1, must be 0: rank 1 has no rows of the group from rank 0"),
        ):
            wrong = received._replace(**{field: changed(getattr(received, field), index, value)}) if second else received
            with pytest.raises(ferry.UsageError, match=pattern):
                combined(exchange, wrong, received.output_tokens)
            assert same(combined(exchange, received), y)
        with pytest.raises(ferry.UsageError, match="skip_a2a's hash of N and topk_ids is .*: pass the same on every rank"):
            exchange.ep_fused_dispatch(x, ids[::-1 if second else 1].copy()[:, ::-1 if second else 1].copy())
        assert same(combined(exchange, received), y)

    ferry.Group.threads(2).run(body)


def test_groups_without_an_expert_have_no_counts(rng):
    step = random_step(rng, 2, experts=3, top_k=2, hidden=8, most=9, dtype=np.float32)

    def body(rank):
        exchange = exchange_of(rank, experts=3, hidden=8, max_tokens=9, local_slots=3)
        received = exchange.ep_fused_dispatch(step.tokens[rank.index], step.ids[rank.index])
        counts = expected_dispatch(step, rank.index)[5]
        assert same(received.counts[:len(counts)], counts) and not received.counts[len(counts):].any()
        combined(exchange, received)

    ferry.Group.threads(2).run(body)


def test_what_unreduced_rows_do_not_have_is_refused():
    def body(rank):
        exchange, odd, x = exchange_of(rank, reduction="unreduced", shared_experts=1), rank.index == 1, np.ones((2, 4), np.float32)
        received = exchange.ep_fused_dispatch(x, np.array([[0, 1], [1, 2]]))
        arrays = (received.output_tokens, received.src_info, received.row_offsets, received.counts)
        apart = {"shared_outputs": np.empty((1, 2, 4), np.float32)}
        for given, pattern in ((apart | {"router_weights": np.ones((2, 2), np.float32)}, "unreduced returns rows as they are: pass no weights"),
                               (apart | {"residual": x}, "unreduced has no epilogue"), (apart | {"scale": 2}, "unreduced has no epilogue"),
                               ({}, "unreduced adds nothing: pass shared_outputs for the 1 shared experts of rank 1")):
            with pytest.raises(ferry.UsageError, match=f"ep_combine: {pattern}"):
                exchange.ep_fused_combine(*arrays, **(given if odd else apart))
        assert exchange.ep_fused_combine(*arrays, **apart).tolist() == np.ones((2, 2, 4)).tolist()

    ferry.Group.threads(2).run(body)


def test_unsuitable_settings_are_refused():
    def body(rank):
        for settings, error, pattern in (
            ({"layout": "expert_padded"}, ferry.UsageError, "max: layout = 'expert_padded': leave it out"),
            ({"capacity": 8}, ferry.UsageError, "max: capacity = 8: leave it out"),
            ({"input": "replicated"}, ferry.UsageError, "max: input = 'replicated': leave it out, and pass skip_a2a=True"),
            ({"shared_split": 2}, ferry.UsageError, "max: shared_split = 2: leave it out, and pass skip_a2a=True, with allreduce_world_size"),
            ({"skip_a2a": True, "reduction": "unreduced"}, ferry.UsageError, "max: reduction 'unreduced', must be left out with skip_a2a"),
            ({"skip_a2a": True, "allreduce_world_size": 3, "shared_experts": 1}, ferry.UsageError, "max: allreduce_world_size = 3, must be 0 to 2"),
            ({"skip_a2a": True, "allreduce_world_size": "2"}, ferry.UsageError, "max: allreduce_world_size: expected an integer, got '2'"),
            ({"skip_a2a": True, "allreduce_world_size": np.zeros(2)}, ferry.UsageError, "max: allreduce_world_size: expected an integer, got array"),
            ({"skip_a2a": True, "allreduce_world_size": 2**40, "shared_experts": 1}, ferry.UsageError, "allreduce_world_size: expected an integer from"),
            ({"skip_a2a": True}, ferry.UsageError, "configurations differ: skip_a2a is not set on rank 0 and set on rank 1: pass the same"),
            ({"skip_a2a": np.zeros(2)}, ferry.UsageError, "skip_a2a: cannot be read: .*ambiguous"),
            ({"skip_a2a": True, "shared_experts": np.zeros(2)}, ferry.UsageError, "shared_experts: cannot be read: .*ambiguous"),
            ({"transfer": np.zeros(2)}, ferry.UsageError, "max: transfer = array"),
            ({"transfer": "gather"}, ferry.UsageError, "max: transfer = 'gather', must be 'routed'"),
            ({"placement": ferry.Placement.replicas([[0, 1, 2, 3], [3]], 4)}, ferry.UnsupportedError, "max: a placement with replicas is not supported"),
            ({"placement": ferry.Placement.ep_tp(4, 1, 2)}, ferry.UnsupportedError, "max: experts in slices are not supported"),
            ({"reduction": "partial"}, ferry.UsageError, "max: reduction 'partial', must be 'exact' or 'unreduced'"),
            ({"reduction": np.zeros(2)}, ferry.UsageError, "max: reduction array.*, must be 'exact' or 'unreduced'"),
        ):
            with pytest.raises(error if rank.index else ferry.UsageError, match=pattern):
                exchange_of(rank, **(settings if rank.index else {}))
        with pytest.raises(ferry.UsageError, match="configurations differ: allreduce_world_size is 2 on rank 0 and 1 on rank 1"):
            exchange_of(rank, skip_a2a=True, shared_experts=1, allreduce_world_size=2 - rank.index)

    ferry.Group.threads(2).run(body)
