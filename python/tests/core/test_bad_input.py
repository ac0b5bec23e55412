"""Bad arguments raise an exception that names the argument and what was expected; the peers get it too, and go on."""

import ctypes
import inspect
import os

import numpy as np
import pytest

import ferry
import ferry.deep_ep
from oracle import bf16

HIDDEN, TOP_K, TOKENS = 16, 2, 4

X = np.ones((3, HIDDEN), bf16)
IDS = np.zeros((3, TOP_K), np.int32)
IDS[:, 1] = 3
W = np.ones((3, TOP_K), np.float32)


class OnADevice:
    """An array that claims to be in GPU memory."""

    def __dlpack__(self, **_):
        return _capsule(device_type=2)

    def __dlpack_device__(self):
        return (2, 0)


def _capsule(device_type):
    """A DLPack capsule over nothing, on the device named."""
    class DLTensor(ctypes.Structure):
        _fields_ = [
            ("data", ctypes.c_void_p),
            ("device_type", ctypes.c_int32),
            ("device_id", ctypes.c_int32),
            ("ndim", ctypes.c_int32),
            ("code", ctypes.c_uint8),
            ("bits", ctypes.c_uint8),
            ("lanes", ctypes.c_uint16),
            ("shape", ctypes.POINTER(ctypes.c_int64)),
            ("strides", ctypes.POINTER(ctypes.c_int64)),
            ("byte_offset", ctypes.c_uint64),
            ("manager_ctx", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p),
        ]

    shape = (ctypes.c_int64 * 2)(3, HIDDEN)
    tensor = DLTensor(1 << 20, device_type, 0, 2, 4, 16, 1, shape, None, 0, None, None)
    _keep.append((tensor, shape))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(tensor), b"dltensor", None)


_keep = []


def used_capsule():
    array = np.ones((3, HIDDEN), np.float16)
    capsule = array.__dlpack__()
    np.from_dlpack(_Once(capsule))
    return capsule


class _Once:
    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self):
        return (1, 0)


DISPATCH = {
    "dtype": ((X.astype(np.float64), IDS), "tokens: expected bfloat16 or float16 or float32, got float64: convert it to one of these$"),
    "type of another format": ((X.astype(np.float32), IDS),
                               "convert the tokens to bf16, or choose the format fp32"),
    "shape": ((np.ones((3, HIDDEN + 8), bf16), IDS), r"tokens: expected rows of 16 columns, got shape \[3, 24\]"),
    "one dimension": ((np.ones(HIDDEN, bf16), IDS), "tokens: expected rows"),
    "columns apart": ((np.ones((3, 2 * HIDDEN), bf16)[:, ::2], IDS), r"strides \[32, 2\].*; numpy\.ascontiguousarray\(\)"),
    "rows on top of one another": ((np.broadcast_to(X[0], (3, HIDDEN)), IDS), r"strides \[0, 1\]"),
    "rows backwards": ((X[::-1], IDS), r"strides \[-16, 1\]"),
    "row stride": ((np.ones((3, HIDDEN + 1), bf16)[:, :HIDDEN], IDS), "multiple of 16"),
    "big-endian": ((X.astype(">f4"), IDS), "not supported"),
    "complex": ((X.astype(np.complex128), IDS), "not supported"),
    "no array": (([1, 2], IDS), "expected an array of NumPy, PyTorch or CuPy"),
    "None": ((None, IDS), "tokens: expected an array"),
    "no ids": ((X, None), "ids: expected an array"),
    "used capsule": ((used_capsule(), IDS), "tokens: a DLPack capsule that was used before"),
    "device": ((OnADevice(), IDS), "tokens: expected an array on host.*got one on cuda:0"),
    "two frameworks": ((X, memoryview(IDS)), "ids: expected an array of NumPy"),
    "ids: type": ((X, IDS.astype(np.float32)), "ids: expected int32 or int64, got float32: convert it to one of these$"),
    "ids: shape": ((X, IDS[:2]), r"ids: expected an array of shape \[N, K\] = \[3, 2\], got \[2, 2\]"),
    "weights: type": ((X, IDS, W.astype(np.float64)), "weights: expected float32, got float64: convert it to float32$"),
    "weights: shape": ((X, IDS, W[:, :1]), r"weights: expected an array of shape \[3, 2\]"),
    "too many": ((np.ones((5, HIDDEN), bf16), np.zeros((5, TOP_K), np.int32)), "max_tokens is 4"),
}


def both_refuse(pattern, call):
    """Rank 1 makes a mistake; both ranks get the error, and the next call works."""

    def body(rank):
        exchange = ferry.Exchange(rank, experts=4, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, deadline=5)
        rows = exchange.dispatch(X, IDS, W)
        data, plan = rows.data.copy(), rows.plan.copy()
        with pytest.raises(ferry.UsageError, match=pattern) as caught:
            call(exchange, data, plan) if rank.index == 1 else good(exchange, data, plan)
        assert rank.index == 1 or "rank 1 refused" in str(caught.value)
        assert good(exchange, data, plan) is not None

    combining = "combine" in call.__name__
    good = (lambda e, d, p: e.combine(d, p)) if combining else (lambda e, d, p: e.dispatch(X, IDS, W))
    ferry.Group.threads(2).run(body)


@pytest.mark.parametrize("name", DISPATCH)
def test_dispatch(name):
    arguments, pattern = DISPATCH[name]
    both_refuse(pattern, lambda exchange, data, plan: exchange.dispatch(*arguments))


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"format": "fp9"}, "fp9"),
        ({"lane": 0, "sm_limit": 0, "memory": ferry.ReceiveBuffers(np.empty(8, bf16))}, r"memory.parts\[0\]: expected \d+ bytes"),
        ({"memory": ferry.ReceiveBuffers((X, X))}, "memory.parts: expected 1"),
        ({"memory": ferry.ReceiveBuffers(weight=np.empty(3, np.float32))}, "memory.weight: expected a length of"),
        ({"memory": ferry.ReceiveBuffers(plan=np.empty(3, np.uint8))}, "memory.plan: expected a length of"),
        ({"memory": ferry.ReceiveBuffers(counts=np.empty(1, np.int32))}, "memory.counts: expected a length of"),
        ({"memory": ferry.ReceiveBuffers(row_offsets=np.empty(8, np.int64))}, "memory.row_offsets: expected int32"),
        ({"memory": ferry.ReceiveBuffers(dots=np.empty(1, np.float32))}, "memory.dots: expected a length of"),
        ({"memory": 5}, "memory: expected a ReceiveBuffers, got int"),
        ({"stream": 3}, "stream: the exchange's backend works on host memory, in the calling thread: pass no stream"),
        ({"count": 3}, r"count: expected an int32 array \[1\] in device memory, got a number: .* pass tokens\[:count\]"),
        ({"dot_rows": np.ones((3, HIDDEN), np.float32)}, "dot_rows: expected bfloat16, got float32"),
        ({"dot_rows": np.ones((1, HIDDEN), bf16)}, "dot_rows: expected .* rows or more, got 1"),
        ({"topk": 2}, "dispatch: there is no argument 'topk'; the arguments are: tokens, ids, weights, format"),
        ({"wieghts": W}, r"dispatch: there is no argument 'wieghts' \(did you mean weights\?\); the arguments are: tokens, ids"),
        ({"format": 7}, "format: expected a string, got int"),
        ({"sm_limit": "all"}, "sm_limit: expected an integer, got 'all'"),
        ({"apply_weights": W}, "apply_weights: expected True or False, got array"),
        ({"count": np.zeros(1, np.int32)}, None),
    ],
)
def test_options_of_dispatch(settings, pattern):
    def call(exchange, data, plan):
        exchange.dispatch(X, IDS, W, **settings)

    if pattern is None:  # the CPU backend reads no device counts and raises another type

        def body(rank):
            exchange = ferry.Exchange(rank, experts=4, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS)
            with pytest.raises(ferry.UnsupportedError, match=r"count: the exchange has host memory, .* pass tokens\[:count\]"):
                exchange.dispatch(X, IDS, W, **settings)

        ferry.Group.threads(1).run(body)
    else:
        both_refuse(pattern, call)


def test_memory_for_gradients():
    def backward(exchange, data, plan):
        exchange.combine_backward(X, plan, W, data, memory=5)

    both_refuse("memory: expected a ReceiveBuffers, got int", backward)


@pytest.mark.parametrize(("wrong", "pattern"), [
    ({"d_result": X[:, :8]}, "d_result: expected rows of 16 columns"), ({"topk_weights": W[:, :1]}, r"topk_weights: expected an array of shape \[3, 2\]"),
    ({"d_result": (memoryview(bytes(48)), X)}, r"d_result\[0\]: "),
])
def test_arguments_of_gradients(wrong, pattern):
    def backward(exchange, data, plan):
        exchange.combine_backward(**({"d_result": X, "plan": plan, "topk_weights": W, "outputs": data} | wrong))

    both_refuse(pattern, backward)


def read_only(array):
    array.flags.writeable = False
    return array


COMBINE = {
    "too few rows": (lambda d: (d[:1],), {}, "outputs: expected .* rows or more, got 1"),
    "type": (lambda d: (d.astype(np.int32),), {}, "outputs: expected bfloat16 or float16 or float32, got int32"),
    "nothing": (lambda d: (None,), {}, "needs outputs: for row_values alone call return_values"),
    "result: shape": (lambda d: (d,), {"result": np.empty((2, HIDDEN), bf16)}, r"result: expected shape \[3, 16\]"),
    "result: read-only": (lambda d: (d,), {"result": read_only(np.empty((3, HIDDEN), bf16))}, "result: is read-only"),
    "row_weights: topk_weights": (lambda d: (d,), {"row_weights": W}, r"row_weights: .* got \[3, 2\]: .* \[N, K\] use topk_weights"),
    "row_weights: too few": (lambda d: (d,), {"row_weights": np.ones(1, np.float32)}, "row_weights: expected .* rows or more"),
    "topk_weights": (lambda d: (d,), {"topk_weights": np.ones((3, 3), np.float32)}, "topk_weights: expected"),
    "reduction": (lambda d: (d,), {"reduction": "mean"}, "'mean' is not one of partial, exact, unreduced"),
    "reduction: a number": (lambda d: (d,), {"reduction": 1}, "reduction: expected a string, got int"),
    "scale": (lambda d: (d,), {"scale": "half"}, "scale: expected a number, got str"),
    "sm_limit": (lambda d: (d,), {"sm_limit": 1.5}, "sm_limit: expected an integer, got 1.5"),
    "staging": (lambda d: (d,), {"reduction": "exact"}, "construct the exchange with reduction = exact"),
    "misspelt": (lambda d: (d,), {"weights": W}, "combine: there is no argument 'weights'; the arguments are: outputs, plan"),
}


@pytest.mark.parametrize("name", COMBINE)
def test_combine(name):
    arguments, settings, pattern = COMBINE[name]

    def combine(exchange, data, plan):
        exchange.combine(*arguments(data), plan, **settings)

    both_refuse(pattern, combine)


class Fails:
    """An array whose export raises."""

    def __init__(self, error):
        self.error = error

    def __dlpack__(self, **_):
        raise self.error


@pytest.mark.parametrize("argument", ["tokens", "ids", "outputs", "out", "rows"])
@pytest.mark.parametrize("error", [BufferError("lent already"), MemoryError(), KeyboardInterrupt("Ctrl-C")], ids=repr)
def test_an_export_that_fails_keeps_its_cause(argument, error):
    """Rank 1 gets the error of the export, or KeyboardInterrupt itself; its peer is told, and the next call works."""
    what = f"{type(error).__name__}: {error}"

    def call(exchange, plan, data, bad):
        if argument == "out":
            return exchange.metadata(1, out=bad)
        if argument == "rows":
            return exchange.all_gather_v(X if bad is None else bad, np.empty((8, HIDDEN), bf16))
        if argument == "outputs":
            return exchange.combine(data if bad is None else bad, plan)
        return exchange.dispatch(**({"tokens": X, "ids": IDS} | ({argument: bad} if bad else {})))

    def body(rank):
        exchange = ferry.Exchange(rank, experts=4, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, deadline=5)
        rows = exchange.dispatch(X, IDS)
        plan, data = rows.plan.copy(), rows.data.copy()
        expected = KeyboardInterrupt if rank.index and isinstance(error, KeyboardInterrupt) else ferry.UsageError
        with pytest.raises(expected) as caught:
            call(exchange, plan, data, Fails(error) if rank.index else None)
        if rank.index == 0:
            assert "rank 1 refused" in str(caught.value) and what in str(caught.value) and "Traceback" not in str(caught.value)
        elif expected is ferry.UsageError:
            assert str(caught.value) == f"{argument}: its __dlpack__ failed: {what}" and caught.value.__cause__ is error
        call(exchange, plan, data, None)

    ferry.Group.threads(2).run(body)


def test_an_object_that_is_not_a_plan():
    def combine(exchange, data, plan):
        exchange.combine(data, "plan")

    both_refuse("plan: expected a Plan, got str", combine)


def test_a_plan_of_another_exchange():
    def body(rank):
        here, there = (ferry.Exchange(rank, experts=experts, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS)
                       for experts in (4, 8))
        plan = there.dispatch(X, IDS).plan.copy()
        with pytest.raises(ferry.UsageError, match="another configuration or placement.*; experts = 8 there, 4 here"):
            here.combine(np.ones((here.capacity, HIDDEN), bf16), plan)
        small = here.dispatch(X, IDS).plan.copy()
        with pytest.raises(ferry.UsageError, match="bytes, this exchange's plans take .*; experts = 4 there, 8 here"):
            there.combine(np.ones((there.capacity, HIDDEN), bf16), small)

    ferry.Group.threads(1).run(body)


def arguments_of(data, plan):
    """Arguments of each collective call, positional; its result may be ignored."""
    return {
        "dispatch": (X, IDS, W), "dispatch_send": (X, IDS, W), "combine": (data, plan), "combine_send": (data, plan),
        "route_values": (W, plan), "return_values": (None if data is None else np.ones(len(data), np.float32), plan),
        "combine_backward": (X, plan, W, data), "dispatch_counts": (IDS,), "metadata": (3,),
        "all_gather_v": (X, np.empty((6, HIDDEN), bf16)), "reduce_scatter_v": (np.ones((6, HIDDEN), bf16), np.empty((3, HIDDEN), bf16)),
    }


@pytest.mark.parametrize(("wrong", "pattern"), [
    ({"nonsense": 1}, "{0}: there is no argument 'nonsense'; the arguments are: {1}"), ({"lane": None}, "lane: expected an integer, got None"),
    ({"lane": 7}, "lane = 7, must be 0 to 0"), ({"lane": -1}, "lane = -1, must be 0 to 0"), ({"lane": "0"}, "lane: expected an integer, got '0'"),
    ("missing", "expected a"), ("more", "{0}: there is no place for .* more positional argument.*; the arguments are: {1}"),
], ids=str)
@pytest.mark.parametrize("method", arguments_of(None, None))
def test_arguments_that_do_not_fit_the_call_are_refused_too(method, wrong, pattern):
    """Rank 1's peer learns of them, so that rank 1's next call is not taken for the one that it could not make."""
    mistakes = {"missing": lambda good: (good[:-1] if good[-1] is not W else good[:-2], {}), "more": lambda good: (good + (1, 2), {})}
    names = [name for name in inspect.signature(getattr(ferry.Exchange, method)).parameters if name != "self"]
    if method == "combine_backward" and wrong == "missing":
        pattern = "outputs: expected a"

    def body(rank):
        exchange = ferry.Exchange(rank, experts=4, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, deadline=5)
        rows = exchange.dispatch(X, IDS, W)
        good = arguments_of(rows.data.copy(), rows.plan.copy())[method]
        given, more = (mistakes[wrong](good) if isinstance(wrong, str) else (good, wrong)) if rank.index else (good, {})
        with pytest.raises(ferry.UsageError, match=pattern.format(method, ", ".join(names))) as caught:
            getattr(exchange, method)(*given, **more)
            getattr(exchange, method.replace("_send", "_receive"))()  # finds the refusal
        assert rank.index or "rank 1 refused" in str(caught.value)
        mine = X * (rank.index + 1)
        rows = exchange.dispatch(mine, IDS)
        assert np.array_equal(exchange.combine(rows.data.copy(), rows.plan), TOP_K * mine)

    ferry.Group.threads(2).run(body)


def test_a_lane_that_does_not_exist_among_several_is_an_error_of_its_rank_alone():
    """The rank cannot tell which lane its peers are in, so none of them takes part in anything."""
    def body(rank):
        exchange = ferry.Exchange(rank, experts=4, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS, lanes=2, deadline=5)
        if rank.index:
            for lane in (2, -1, None):
                with pytest.raises(ferry.UsageError, match="lane"):
                    exchange.dispatch(X, IDS, lane=lane)
        for lane in (0, 1):
            rows = exchange.dispatch(X, IDS, lane=lane)
            assert np.array_equal(exchange.combine(rows.data.copy(), rows.plan, lane=lane), TOP_K * X)

    ferry.Group.threads(2).run(body)


def test_lanes_and_plans_over_storage():
    def body(rank):
        exchange = ferry.Exchange(rank, experts=4, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS)
        with pytest.raises(ferry.UsageError, match="lane = 1, must be 0 to 0"):
            exchange.dispatch(X, IDS, lane=1)
        with pytest.raises(ferry.UsageError, match="lane = -1"):
            exchange.check(-1)
        bytes_of_plan = ferry.plan_bytes(exchange.config, 1)
        with pytest.raises(ferry.UsageError, match="storage: expected .* bytes or more"):
            exchange.plan_over(np.zeros(16, np.uint8))
        with pytest.raises(ferry.UsageError, match="does not hold a complete plan"):
            exchange.plan_over(np.zeros(bytes_of_plan, np.uint8))
        copied = exchange.dispatch(X, IDS).plan.copy()
        copied.storage[8:24] = 255
        with pytest.raises(ferry.UsageError, match="plan"):
            exchange.combine(np.ones((exchange.capacity, HIDDEN), bf16), copied)

    ferry.Group.threads(1).run(body)


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"exprts": 4}, r"there is no setting 'exprts' \(did you mean experts\?\); the settings are: experts"),
        ({"topk": 4}, r"there is no setting 'topk' \(did you mean top_k\?\); the settings are: experts"),
        ({"nonsense": 4}, "there is no setting 'nonsense'; the settings are: experts"),
        ({"format": "float32"}, r"format 'float32': unknown \(did you mean fp32\?\); known: bf16"),
        ({"format": "mxpf8"}, r"format 'mxpf8': unknown \(did you mean mxfp8\?\); known: bf16"),
        ({"format": "nonsense"}, "format 'nonsense': unknown; known: bf16"),
        ({"experts": "4"}, "experts: expected an integer, got '4'"),
        ({"experts": 4.0}, "experts: expected an integer, got 4.0"),
        ({"experts": 1 << 40}, "experts: expected an integer"),
        ({"layout": "flat"}, "layout: 'flat' is not one of expert_major, expert_padded, rank_major, expert_indexed"),
        ({"backend": "tpu"}, "backend: 'tpu' is not one of"),
        ({"format": "bf17"}, "bf17"),
        ({"repeats": 1}, "repeats: expected True or False, got 1"),
        ({"top_k": 33}, "top_k = 33, must be 1 to 32"),
        ({"deadline": -1}, "deadline"),
        ({"device": "first"}, "device: expected an integer, got 'first'"),
        ({"hidden": 3}, "multiple of 16"),
        ({"placement": ferry.Placement.blocks(4, 3)}, "the placement is for 4 experts on 3 ranks, the exchange has 4 on 2"),
    ],
)
def test_configurations_are_refused_on_every_rank(settings, pattern):
    good = {"experts": 4, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": TOKENS}

    def body(rank):
        with pytest.raises(ferry.UsageError, match=pattern):
            ferry.Exchange(rank, **(good | settings if rank.index == 1 else good))
        return ferry.Exchange(rank, **good).ranks

    assert ferry.Group.threads(2).run(body) == [2, 2]


class Number:
    def __init__(self, error):
        self.error = error

    def __index__(self):
        raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt("Ctrl-C"), ZeroDivisionError("x")], ids=repr)
def test_a_configuration_that_raises_is_refused_on_every_rank(error):
    good = {"experts": 4, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": TOKENS, "deadline": 5}

    def body(rank):
        kind = KeyboardInterrupt if rank.index and isinstance(error, KeyboardInterrupt) else ferry.UsageError
        with pytest.raises(kind, match=None if rank.index else "rank 1 "):
            ferry.Exchange(rank, **(good | ({"experts": Number(error)} if rank.index else {})))
        return ferry.Exchange(rank, **good).ranks

    assert ferry.Group.threads(2).run(body) == [2, 2]


def test_an_object_that_is_not_a_group():
    with pytest.raises(ferry.UsageError, match="expected a Group or a Rank, got int"):
        ferry.Exchange(3, experts=4, top_k=2, hidden=8, max_tokens=2)
    for use in (lambda group: ferry.Exchange(group, experts=4, top_k=2, hidden=8, max_tokens=2), ferry.deep_ep.Buffer, ferry.Group.join):
        with pytest.raises(ferry.UsageError, match="^a group of threads or processes has no rank outside run"):
            use(ferry.Group.threads(2))
    with pytest.raises(ferry.UsageError, match="at least one rank"):
        ferry.Group.threads(0)
    with pytest.raises(ferry.UsageError, match="rank 2 does not exist in a group of 2 ranks"):
        ferry.Group.custom(2, 2, lambda mine: [mine], lambda: None)
    with pytest.raises(ferry.UsageError, match="abort needs all_to_all_v"):
        ferry.Group.custom(0, 1, lambda mine: [mine], lambda: None, abort=lambda: None)
    with pytest.raises(ferry.UsageError, match="a list of 2 bytes objects .* got a list of 1"):
        ferry.Group.custom(0, 2, lambda mine: [mine], lambda: None).join()
    with pytest.raises(ferry.UsageError, match="got an item of 1 byte"):
        ferry.Group.custom(0, 1, lambda mine: [b"x"], lambda: None).join()


class SaysTwo(list):
    def __len__(self):
        return 2


@pytest.mark.parametrize(("times", "pattern"), [(1, "got a list of 1$"), (3, "got a list of more than 2$")])
def test_a_list_whose_len_is_wrong(times, pattern):
    with pytest.raises(ferry.UsageError, match=pattern):
        ferry.Group.custom(0, 2, lambda mine: SaysTwo([mine] * times), lambda: None).join()


def test_the_cuda_backend_without_a_gpu():
    def body(rank):
        with pytest.raises(ferry.UnsupportedError, match="cuda|CUDA"):
            ferry.Exchange(rank, experts=4, top_k=2, hidden=8, max_tokens=2, backend="cuda")

    if os.path.exists("/dev/nvidiactl") and ferry.has_cuda():
        pytest.skip("this machine has a GPU")
    ferry.Group.threads(2).run(body)


def test_tensors_of_two_frameworks():
    torch = pytest.importorskip("torch")

    both_refuse("ids: an array of PyTorch, but tokens is an array of NumPy",
                lambda exchange, data, plan: exchange.dispatch(X, torch.zeros((3, TOP_K), dtype=torch.int32)))


def test_sparse_tensors():
    torch = pytest.importorskip("torch")
    tokens = torch.ones((3, HIDDEN), dtype=torch.bfloat16)
    ids = torch.zeros((3, TOP_K), dtype=torch.int32)
    both_refuse("tokens: tensors of layout torch.sparse_coo are not supported",
                lambda exchange, data, plan: exchange.dispatch(tokens.to_sparse(), ids))


def test_ferry_torch_refuses_other_arrays():
    torch = pytest.importorskip("torch")
    import ferry.torch

    def dispatch(exchange, data, plan):
        ferry.torch.dispatch(exchange, X, IDS, W)

    both_refuse("ferry.torch.dispatch: expected tensors of PyTorch, got arrays of NumPy", dispatch)

    def dispatch_of_float64(exchange, data, plan):
        ferry.torch.dispatch(exchange, torch.ones((3, HIDDEN), dtype=torch.float64), torch.tensor(IDS))

    both_refuse("x: expected bfloat16 or float16 or float32, got float64", dispatch_of_float64)

    def combine(exchange, data, plan):
        ferry.torch.combine(exchange, torch.ones((exchange.capacity, HIDDEN), dtype=torch.bfloat16), plan)

    both_refuse("dispatched: expected a DispatchResult of ferry.torch, got Plan", combine)

    def body(rank):
        exchange = ferry.Exchange(rank, experts=4, top_k=TOP_K, hidden=HIDDEN, max_tokens=TOKENS)
        rows = ferry.torch.dispatch(exchange, torch.ones((3, HIDDEN), dtype=torch.bfloat16), torch.tensor(IDS))
        with pytest.raises(ferry.UsageError, match="combine: expected tensors of PyTorch, got arrays of NumPy"):
            ferry.torch.combine(exchange, np.ones((exchange.capacity, HIDDEN), bf16), rows)
        with pytest.raises(ferry.UsageError, match="expected an Exchange or its handle, got Rank"):
            ferry.torch.dispatch(rank, rows.data, rows.counts)
        with pytest.raises(ferry.UsageError, match=r"there is no argument 'weight' \(did you mean weights\?\); the arguments are: exchange"):
            ferry.torch.dispatch(exchange, rows.data, torch.tensor(IDS), weight=W)
        with pytest.raises(ferry.UsageError, match=r"MoE: there is no argument 'topk' \(did you mean top_k\?\); the arguments are: group, experts, top_k"):
            ferry.torch.MoE(rank, experts=4, topk=2, hidden=16, ffn=8, max_tokens=4)
        with pytest.raises(ferry.UsageError, match="dtype: torch.float64 is not one of torch.bfloat16"):
            ferry.torch.MoE(rank, experts=4, top_k=2, hidden=16, ffn=8, max_tokens=4, dtype=torch.float64)

    ferry.Group.threads(1).run(body)
