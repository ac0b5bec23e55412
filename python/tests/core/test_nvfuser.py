"""ferry.nvfuser: nvFuser's call shapes, with NumPy arrays and ranks as threads."""

import re

import ml_dtypes
import numpy as np
import pytest

import ferry
import ferry.nvfuser
from nvfuser_steps import CASE, CASE_IDS, case_tokens, expected_combine, expected_dispatch, output_of
from oracle import random_step

FORMATS = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def case_exchange(rank, **settings):
    return ferry.nvfuser.Exchange(rank, **({"experts": 4, "top_k": 1, "hidden": 4, "max_tokens": 4, "dtype": "fp32"} | settings))


def test_the_case_of_nvfuser():
    def body(rank):
        exchange, x = case_exchange(rank), case_tokens(rank.index)
        received = exchange.dispatch(x, CASE_IDS)
        assert [array.tolist() for array in received[1:]] == list(CASE[rank.index])
        assert same(exchange.combine(received.recv_x, *received[2:]), x)

    ferry.Group.threads(2).run(body)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_random_ids_agree_with_loops(rng, ranks, top_k):
    for name, dtype in FORMATS.items():
        step = random_step(rng, ranks, experts=ranks * 2 + 1, top_k=top_k, hidden=24, most=9, dtype=dtype)
        step.tokens[ranks - 1], step.ids[ranks - 1] = step.tokens[ranks - 1][:0], step.ids[ranks - 1][:0]

        def body(rank):
            exchange = ferry.nvfuser.Exchange(
                rank, experts=step.experts, top_k=top_k, hidden=24, max_tokens=9, dtype=name)
            for _ in range(2):
                received = exchange.dispatch(step.tokens[rank.index], step.ids[rank.index])
                assert all(map(same, received, expected_dispatch(step, rank.index)))
                y = exchange.combine(output_of(received.recv_x, rank.index), *received[2:])
                assert same(y, expected_combine(step, rank.index))

        ferry.Group.threads(ranks).run(body)


# Sums are arithmetic: every NaN is the one of the contract, and none gives a warning.
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_nan_payloads_are_not_kept(rng, name, top_k):
    dtype, bits = FORMATS[name], np.uint32 if name == "fp32" else np.uint16
    infinity = {"bf16": 0x7F80, "fp16": 0x7C00, "fp32": 0x7F800000}[name]
    nan = 0x7FFFFFFF if name == "fp32" else 0x7FFF
    rows = (infinity + rng.integers(1, nan - infinity, (2, 24)) + (nan + 1) * rng.integers(0, 2, (2, 24))).astype(bits).view(dtype)
    largest = np.finfo(dtype).max if name != "bf16" else ml_dtypes.finfo(dtype).max
    rows[:, 20:] = largest  # a sum of two is infinite
    rows[:, 23] = np.array(infinity, bits).view(dtype) * np.array([1, -1], dtype)  # a sum of both is NaN

    def body(rank):
        exchange = ferry.nvfuser.Exchange(rank, experts=2, top_k=top_k, hidden=24, max_tokens=1, dtype=name)
        received = exchange.dispatch(rows[:1], np.array([[0, 1][:top_k]]))
        outputs = np.concatenate([rows[rank.index][None]] * len(received.recv_x)) if len(received.recv_x) else rows[:0]
        y = exchange.combine(outputs, *received[2:])
        assert y.dtype == dtype
        got = y.view(bits)[0].tolist()
        last = [int(rows[0].view(bits)[20])] * 3 + [infinity] if top_k == 1 else [infinity] * 3 + [nan]
        assert got == [nan] * 20 + last

    ferry.Group.threads(2).run(body)


def test_an_id_out_of_range_is_reported_and_its_result_is_there():
    def body(rank):
        exchange, x = case_exchange(rank), case_tokens(rank.index)
        exchange.dispatch(x[:1], CASE_IDS[:1])
        ids = np.array([0, 2 if rank.index else 4, 3, 2])
        if rank.index == 0:
            with pytest.raises(ferry.BadIdError):
                exchange.dispatch(x, ids)
        else:
            exchange.dispatch(x, ids)
        received = exchange.last_dispatch_result()
        assert received.n_tokens_to_rank.tolist() == [1, 2 + rank.index]
        expected = x * np.array([[1], [rank.index], [1], [1]], np.float32)
        assert same(exchange.combine(received.recv_x, *received[2:]), expected)

    ferry.Group.threads(2).run(body)


# A wrong argument of rank 1's dispatch, and what every rank must be told.
SPOKEN = {
    "another type": ({"x": np.ones((4, 4), np.float64)}, "x: expected .* got float64"),
    "a type that is not the exchange's": ({"x": np.ones((4, 4), np.float16)}, "but x is fp16: .* or construct the exchange with dtype = fp16"),
    "another width": ({"x": np.ones((4, 3), np.float32)}, "x: expected rows of 4 columns"),
    "several arrays": ({"x": (np.ones((4, 4), np.float32),)}, "x: expected one array for dtype fp32"),
    "no array": ({"x": None}, "x: "),
    "too many tokens": ({"x": np.ones((5, 4), np.float32), "topk_idx": np.zeros(5, np.int64)}, "5 tokens on rank 1, max_tokens is 4"),
    "ids of another type": ({"topk_idx": np.zeros(4, np.int16)}, "topk_idx: expected int32 or int64"),
    "ids of another shape": ({"topk_idx": np.zeros((4, 2), np.int64)}, "topk_idx: expected an array of shape"),
    "no ids": ({"topk_idx": None}, "topk_idx: "),
}


@pytest.mark.parametrize("name", SPOKEN)
def test_errors_of_dispatch_speak_of_its_arguments(name):
    change, pattern = SPOKEN[name]

    def body(rank):
        exchange, x = case_exchange(rank), case_tokens(rank.index)
        with pytest.raises(ferry.UsageError, match=pattern) as caught:
            exchange.dispatch(**({"x": x, "topk_idx": CASE_IDS} | (change if rank.index else {})))
        assert not re.search(r"\b(tokens|ids|format)(: |\[)|choose the", str(caught.value))
        received = exchange.dispatch(x, CASE_IDS)
        unaligned = np.zeros(6 * 4 + 1, np.float32)[1:].reshape(6, 4) if rank.index else received.recv_x
        with pytest.raises(ferry.UsageError, match="rows: address .* on rank 1 is not a multiple of 16"):
            exchange.combine(unaligned, *received[2:])

    ferry.Group.threads(2).run(body)


def test_combine_of_an_earlier_dispatch(rng):
    def body(rank):
        exchange, x = case_exchange(rank), case_tokens(rank.index)
        first = exchange.dispatch(x, CASE_IDS)
        second = exchange.dispatch(x[:1] + 7, CASE_IDS[:1])
        assert same(exchange.combine(second.recv_x, *second[2:]), x[:1] + 7)
        assert same(exchange.combine(first.recv_x, *first[2:], tokens=4), x)

    ferry.Group.threads(2).run(body)


def test_results_go_into_memory_of_the_caller():
    def body(rank):
        exchange, x, odd = case_exchange(rank), case_tokens(rank.index), rank.index == 1
        memory = np.full((exchange.capacity, 4), -7, np.float32)
        received = exchange.dispatch(x, CASE_IDS, recv_x=memory)
        assert [array.tolist() for array in received[1:]] == list(CASE[rank.index])
        assert np.shares_memory(received.recv_x, memory) and (memory[len(received.recv_x):] == -7).all()
        y = np.full((4, 4), -7, np.float32)
        assert exchange.combine(received.recv_x, *received[2:], out=y) is y and same(y, x)
        for wrong, pattern in ((memory[:1], r"rank 1: recv_x: float32 \[1, 4\], must be float32 \[\d+ or more, 4\]"), (memory.astype(np.float64), "recv_x: float64"),
                               (memory[:, :2], "recv_x: float32"), ("memory", "recv_x: str"), (np.ndarray, "rank 1: recv_x: cannot be read: .*not iterable"),
                               (np.broadcast_to(np.float32(0), memory.shape), "recv_x: .*read-only"),
                               (np.zeros(memory.size + 1, np.float32)[1:].reshape(memory.shape), "recv_x: address .* is not a multiple of 16")):
            with pytest.raises(ferry.UsageError, match=pattern):
                exchange.dispatch(x, CASE_IDS, recv_x=wrong if odd else None)
        ids = memory.reshape(-1)[:8].view(np.int64)
        ids[:] = CASE_IDS
        for read, pattern in (({"x": memory[:4], "topk_idx": CASE_IDS}, "x"), ({"x": x, "topk_idx": ids}, "topk_idx")):
            with pytest.raises(ferry.UsageError, match=rf"recv_x \(.*\), which the call writes, overlaps {pattern} \("):
                exchange.dispatch(**read, recv_x=memory if odd else None)
        received = exchange.dispatch(x, CASE_IDS, recv_x=memory)
        between = np.zeros((6, 2, 4), np.float32)
        rows = between[:len(received.recv_x), 0]
        rows[:] = received.recv_x
        assert same(exchange.combine(rows, *received[2:], out=between[:4, 1]), x)
        around = np.zeros((9, 4), np.float32)
        received = received._replace(recv_x=around[:len(rows)])
        received.recv_x[:] = rows
        overlaps = r"rank 1: out \(.*\), which the call writes, overlaps rows \("
        for wrong, pattern in ((around[1:5], overlaps), (around[8:4:-1], overlaps),
                               (y[:3], r"rank 1: out: float32 \[3, 4\], must be float32 \[4, 4\]"), (y.astype(np.float64), "rank 1: out: float64"),
                               ([1], "rank 1: out: a list, must be an array"),
                               (np.lib.stride_tricks.as_strided(y, (4, 4), (0, 4)), "rank 1: out: several elements are one in memory"), (np.broadcast_to(np.float32(0), (4, 4)), "rank 1: out: is read-only")):
            with pytest.raises(ferry.UsageError, match=pattern):
                exchange.combine(received.recv_x, *received[2:], out=wrong if odd else None)
        assert same(exchange.combine(received.recv_x, *received[2:], out=y), x)

    ferry.Group.threads(2).run(body)


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


# What rank 1 changes of its arguments (rows, src_idx, src_rank, to, from), and what every rank must be told.
BAD = {
    "a source rank out of range": (2, lambda a: changed(a, 5, 2), r"rank 1: recv_src_rank\[5\] = 2, must be 0 to 1; pass what"),
    "a negative index": (1, lambda a: changed(a, 0, -1), r"rank 1: recv_src_idx\[0\] = -1, must be 0 to 3; pass what"),
    "an index twice": (1, lambda a: changed(a, 0, 3), r"rank 0: rank 1 returned a row of token 3, which came before; check"),
    "a token of another rank's row": (1, lambda a: changed(a, 0, 0), r"rank 0: rank 1 returned a row of token 0, which came before"),
    "source ranks against the counts": (2, lambda a: changed(a, 0, 1), r"recv_src_rank has 2 rows of rank 0, n_tokens_from_rank\[0\] = 3"),
    "a count that the peer denies": (3, lambda a: changed(a, 0, 2), r"n_tokens_to_rank\[0\] of rank 1 is 2, n_tokens_from_rank\[1\] of rank 0 is 1"),
    "a count out of range": (3, lambda a: changed(a, 1, 9), r"rank 1: n_tokens_to_rank\[1\] = 9, must be 0 to 4"),
    "rows of another type": (0, lambda a: a.astype(np.float64), r"rank 1: rows: float64 \[6, 4\], must be float32 \[6, 4\]"),
    "rows of another width": (0, lambda a: a[:, :2], r"rank 1: rows: float32 \[6, 2\], must be float32 \[6, 4\]"),
    "fewer rows": (0, lambda a: a[:5], r"rank 1: rows: float32 \[5, 4\], must be float32 \[6, 4\]"),
    "fewer indices": (1, lambda a: a[:5], r"rank 1: recv_src_idx: int64 \[5\], must be int64 \[6\]"),
    "indices of another type": (1, lambda a: a.astype(np.int32), r"rank 1: recv_src_idx: int32 \[6\], must be int64 \[6\]"),
    "counts of another length": (4, lambda a: a[:1], r"rank 1: n_tokens_from_rank: int64 \[1\], must be int64 \[2\]"),
    "no array": (1, lambda a: a.tolist(), r"rank 1: recv_src_idx: a list, must be an array of the kind and device of rows"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_on_every_rank(name):
    which, change, pattern = BAD[name]

    def body(rank):
        exchange, x = case_exchange(rank), case_tokens(rank.index)
        received = exchange.dispatch(x, CASE_IDS)
        good = [received.recv_x, *received[2:]]
        bad = list(good)
        if rank.index == 1:
            bad[which] = change(bad[which])
        with pytest.raises(ferry.UsageError, match=pattern):
            exchange.combine(*bad)
        assert same(exchange.combine(*good), x)

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
        exchange, x = case_exchange(rank, deadline=5), case_tokens(rank.index)
        received = exchange.dispatch(x, CASE_IDS)
        index = received.recv_src_idx
        if rank.index:
            index = index.view(Unreadable)
            index.error = error("no shape")
        with pytest.raises(error if rank.index and error is KeyboardInterrupt else ferry.UsageError, match="no shape") as caught:
            exchange.combine(received.recv_x, index, *received[3:])
        if rank.index and error is RuntimeError:
            assert isinstance(caught.value.__cause__, RuntimeError)
        assert same(exchange.combine(received.recv_x, *received[2:]), x)

    ferry.Group.threads(2).run(body)


def test_classes_in_the_place_of_arrays_are_refused_by_name():
    """What a class gives as its shape or length raises when it is read."""
    def body(rank):
        exchange, x = case_exchange(rank, deadline=5), case_tokens(rank.index)
        received = exchange.dispatch(x, CASE_IDS)
        for name in ("x", "topk_idx", "recv_x"):
            given = {"x": x, "topk_idx": CASE_IDS} | ({name: np.ndarray} if rank.index else {})
            with pytest.raises(ferry.UsageError, match=rf"\b{name}: "):
                exchange.dispatch(**given)
        for name in ("recv_src_idx", "recv_src_rank", "n_tokens_to_rank", "n_tokens_from_rank", "rows", "out"):
            given = {"rows": received.recv_x} | received._asdict() | ({name: np.ndarray} if rank.index else {})
            with pytest.raises(ferry.UsageError, match=rf"combine: rank 1: {name}: cannot be read: "):
                exchange.combine(**{key: value for key, value in given.items() if key not in ("recv_x", "recv_topk_idx")})
        assert same(exchange.combine(received.recv_x, *received[2:]), x)

    ferry.Group.threads(2).run(body)


def test_ranks_in_different_calls_wait_until_the_deadline():
    def body(rank):
        exchange, x = case_exchange(rank, deadline=2), case_tokens(rank.index)
        received = exchange.dispatch(x, CASE_IDS)
        with pytest.raises(ferry.TimeoutError, match="rank 1 waited for rank 0 in dispatch 2"):
            if rank.index:
                exchange.dispatch(x, CASE_IDS)
            else:
                exchange.combine(received.recv_x, *received[2:])

    ferry.Group.threads(2).run(body)


def test_a_number_of_tokens_that_does_not_fit_is_refused_on_every_rank():
    def body(rank):
        exchange, x = case_exchange(rank), case_tokens(rank.index)
        received = exchange.dispatch(x, np.array([0, -1, -1, 2]))
        for tokens, pattern in ((5, "rank 1: tokens = 5, must be 0 to max_tokens = 4"),
                                (3.5, "rank 1: tokens: expected an integer, got 3.5"),
                                (np.zeros(3), "rank 1: tokens: expected an integer, got array"),
                                (1, "rank 1 adds up to 2 rows, its tokens, N = 1, have at most 1; pass tokens"),
                                (3, "rank 1: rank 1 returned a row of token 3, tokens = 3; check recv_src_idx there or pass tokens")):
            with pytest.raises(ferry.UsageError, match=pattern):
                exchange.combine(received.recv_x, *received[2:], tokens=tokens if rank.index else None)
        expected = x * np.array([[1], [0], [0], [1]], np.float32)
        assert same(exchange.combine(received.recv_x, *received[2:]), expected)

    ferry.Group.threads(2).run(body)


@pytest.mark.parametrize("top_k", [1, 3])
def test_uneven_maps_of_experts_agree_with_loops(rng, top_k):
    """Rank 1 has no expert, rank 2 four; the ranks of two nodes, in rounds of two messages."""
    owners = np.array([2, 0, 2, 3, 2, 0, 2])
    step = random_step(rng, 4, experts=7, top_k=top_k, hidden=8, most=9, dtype=np.float32)
    placement = ferry.Placement.table([(int(owner), int(sum(owners[:e] == owner))) for e, owner in enumerate(owners)], 4)

    def body(rank):
        me = rank.index
        for where in ({}, {"backend": "cpu", "hops": "one", "window": 2}, {"backend": "cpu", "memory": "host"}):
            exchange = ferry.nvfuser.Exchange(rank, experts=7, top_k=top_k, hidden=8, max_tokens=9, dtype="fp32", placement=placement, **where)
            received = exchange.dispatch(step.tokens[me], step.ids[me])
            rows = []  # (sort key, ids, token, source rank)
            between = np.zeros((4, 4), np.int64)
            for source in range(4):
                for token, ids in enumerate(step.ids[source].tolist()):
                    for target in {int(owners[e]) for e in ids if e >= 0}:
                        between[source, target] += 1
                        if target != me:
                            continue
                        local = [sum(owners[:e] == me) if e >= 0 and owners[e] == me else -1 for e in ids]
                        rows.append((ids[0], ids[0], token, source) if top_k == 1 else (0, local, token, source))
            rows.sort(key=lambda row: (row[0], row[3], row[2]))
            assert received.recv_topk_idx.tolist() == [row[1] for row in rows]
            assert received.recv_src_idx.tolist() == [row[2] for row in rows] and received.recv_src_rank.tolist() == [row[3] for row in rows]
            assert received.n_tokens_to_rank.tolist() == between[me].tolist() and received.n_tokens_from_rank.tolist() == between[:, me].tolist()
            y = exchange.combine(output_of(received.recv_x, me), *received[2:])
            expected = np.zeros_like(y)
            for token, ids in enumerate(step.ids[me].tolist()):
                for target in sorted({int(owners[e]) for e in ids if e >= 0}):
                    expected[token] += output_of(step.tokens[me][token], target)
            assert same(y, expected)

    ferry.Group.threads(4).run(body)


def test_bad_arguments_of_the_constructor_and_dispatch():
    def body(rank):
        for settings, error, pattern in (
            ({"placement": ferry.Placement.replicas([[0, 1, 2, 3], [3]], 4)}, ferry.UnsupportedError, "nvfuser: a placement with replicas is not supported"),
            ({"placement": ferry.Placement.ep_tp(4, 1, 2)}, ferry.UnsupportedError, "nvfuser: experts in slices are not supported: use ferry.Exchange"),
            ({"layout": "rank_major"}, ferry.UsageError, "nvfuser: layout = 'rank_major': leave it out, nvFuser's calls decide it"),
            ({"max_token": 8}, ferry.UsageError, r"nvfuser: there is no setting 'max_token' \(did you mean max_tokens\?\); the settings are: "),
            ({"max_tokens": None}, ferry.UsageError, "max_tokens: expected an integer, got None"),
            ({"max_tokens": np.zeros(3)}, ferry.UsageError, "max_tokens: expected an integer, got array"),
            ({"top_k": np.zeros(3)}, ferry.UsageError, "top_k: expected an integer, got array"),
            ({"dtype": np.zeros(3)}, ferry.UsageError, "dtype: array.* is not one of bf16, fp16, fp32"),
            ({"dtype": []}, ferry.UsageError, r"dtype: \[\] is not one of bf16, fp16, fp32"),
            ({"engine": "mpu"}, ferry.UsageError, "engine"),
            ({"hops": "three"}, ferry.UsageError, "hops"),
            ({"placement": 7}, ferry.UsageError, "placement"),
        ):
            with pytest.raises(error if rank.index else ferry.Error, match=pattern):
                case_exchange(rank, **(settings if rank.index else {}))
        with pytest.raises(ferry.UsageError, match="dtype: 'fp8' is not one of bf16, fp16, fp32"):
            case_exchange(rank, **({"dtype": "fp8"} if rank.index else {}))
        with pytest.raises(ferry.UsageError, match="configurations differ: dtype is fp32 on rank 0 and bf16 on rank 1"):
            case_exchange(rank, hidden=8, dtype="bf16" if rank.index else "fp32")
        with pytest.raises(ferry.UsageError, match="max_tokens = 8388609 in a group of size 2, must be at most 8388608"):
            case_exchange(rank, max_tokens=(1 << 23) + 1)
        exchange, x = case_exchange(rank), case_tokens(rank.index)
        with pytest.raises(ferry.UsageError):
            exchange.dispatch(x.astype(np.float64) if rank.index else x, CASE_IDS)
        received = exchange.dispatch(x, CASE_IDS)
        assert same(exchange.combine(received.recv_x, *received[2:]), x)

    ferry.Group.threads(2).run(body)
