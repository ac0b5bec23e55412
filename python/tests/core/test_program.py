"""Programs: the text form, and runs against the same calls made one by one."""

import contextlib
import sys
import threading
import time
import types

import ml_dtypes
import numpy as np
import pytest

import ferry
from ferry._evaluator import _Step
from ferry._streams import Streams
from oracle import random_step

LAYER = """
program moe
input x: tokens
input ids: ids
input weights: weights
rows = dispatch(x, ids, weights)
outputs: outputs = call experts(rows)
y = combine(outputs, rows, rows)
output y
"""


def experts(rows):
    factors = 1 + np.repeat(rows.group_expert, np.diff(rows.row_offsets))[:, None] % 5
    return (rows.data[:rows.total] * factors).astype(rows.data.dtype)


def exchange_of(rank, step, **settings):
    given = {"experts": step.experts, "top_k": 2, "hidden": 16, "max_tokens": 9, "format": "fp32", "combine_type": "fp32"}
    return ferry.Exchange(rank, **(given | settings))


def weights_of(step, rank):
    return (np.arange(step.ids[rank].size, dtype=np.float32).reshape(step.ids[rank].shape) % 7) / 8


def step_of(rng, ranks, dtype=np.float32):
    return random_step(rng, ranks, experts=2 * ranks + 1, top_k=2, hidden=16, most=9, dtype=dtype)


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def test_a_program_is_a_value():
    program = ferry.Program(LAYER)
    assert program == ferry.Program(str(program)) and hash(program) == hash(ferry.Program(LAYER))
    assert program != program.overlap(2) and program != LAYER
    assert repr(program) == "<ferry.Program moe, 3 steps>"
    assert (program.name, program.outputs) == ("moe", ["y"])
    assert program.inputs == [("x", "tokens"), ("ids", "ids"), ("weights", "weights")]
    step = program.steps[1]
    assert (step.kind, step.name, step.inputs, step.outputs, step.function) == (
        "call", "outputs (call experts)", ["rows"], [("outputs", "outputs")], "experts")
    assert [(s.lane, s.index, s.of) for s in program.overlap(2).steps[1:8:6]] == [(0, 1, 2), (1, 0, 1)]
    assert "outputs (call experts)" in program.svg()


@pytest.mark.parametrize(("text", "message"), [
    ("program a\nx = spin(y)", "program text, line 2: there is no kind of step 'spin'"),
    ("program a\ny = join(x)", "program a, step y (join): uses x, which is no input and which no step makes"),
])
def test_malformed_programs_are_refused(text, message):
    with pytest.raises(ferry.UsageError, match=message.replace("(", r"\(").replace(")", r"\)")):
        ferry.Program(text)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_run_makes_the_bits_of_eager_calls(rng, ranks, dtype):
    step, name = step_of(rng, ranks, dtype), {np.float32: "fp32"}.get(dtype, "bf16")

    def body(rank):
        x, ids, weights = step.tokens[rank.index], step.ids[rank.index], weights_of(step, rank.index)
        plain = exchange_of(rank, step, format=name, combine_type=name)
        layer = ferry.Evaluator(ferry.Program(LAYER), plain, {"experts": experts})
        for batches in (1, 2, 3):
            split = exchange_of(rank, step, format=name, combine_type=name, lanes=batches)
            batched = ferry.Evaluator(layer.program.overlap(batches), {"": split}, {"experts": experts})
            for _ in range(2):
                rows = plain.dispatch(x, ids, weights)
                y = plain.combine(experts(rows), rows.plan, row_weights=rows.weight)
                assert same(layer.run(x, ids, weights)[0], y)
                assert same(batched.run(x, ids, weights)[0], y)

    ferry.Group.threads(ranks).run(body)


def test_every_kind_of_step(rng):
    step = step_of(rng, 2)
    program = ferry.Program("""
        program all
        input x: tokens
        input ids: ids
        sent = dispatch_send(x, ids) exchange=inner lane=1
        gates: weights, n: count = call gate(ids)
        rows = dispatch_receive(sent)
        m = metadata(n) exchange=inner
        m2 = metadata(n) exchange=inner
        ready = wait(rows)
        outputs: outputs = call experts(ready) exchange=inner
        back = combine_send(outputs, ready) exchange=inner lane=1
        y = combine_receive(back)
        again = dispatch(y, rows, gates) exchange=inner
        outputs2: outputs = call experts(again) exchange=inner
        z = combine(outputs2, again, gates) exchange=inner
        output z
        output m
        output ready
    """)

    def gate(ids):
        return (ids % 3 / 4).astype(np.float32), len(ids)

    def body(rank):
        x, ids = step.tokens[rank.index], step.ids[rank.index]
        inner, eager = (exchange_of(rank, step, lanes=2) for _ in range(2))
        z, m, ready = ferry.Evaluator(program, {"inner": inner}, {"experts": experts, "gate": gate}).run(x, ids)
        rows = eager.dispatch(x, ids, lane=1)
        y = eager.combine(experts(rows), rows.plan, lane=1)
        again = eager.dispatch(y, rows.plan, gate(ids)[0])
        assert same(z, eager.combine(experts(again), again.plan, topk_weights=gate(ids)[0]))
        assert m.tolist() == eager.metadata(len(ids)).tolist()
        assert same(ready.data[:ready.total], rows.data[:rows.total])

    ferry.Group.threads(2).run(body)


GATHERED = ferry.Program("""
    program gathered
    input x: tokens
    input ids: ids
    all = all_gather_v(x)
    all_ids = all_gather_v(ids)
    part: tokens = call part(all, all_ids)
    y = reduce_scatter_v(part, x)
    output y
""")


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_gathered_rows(rng, framework):
    step = step_of(rng, 3)
    convert = pytest.importorskip(framework).asarray

    def part(tokens, ids):  # this rank's part of the sum: the tokens whose first expert is its own
        return tokens * (ids[:, :1] % 3 == rank_of.index)

    rank_of = threading.local()

    def body(rank):
        rank_of.index = rank.index
        x, ids = step.tokens[rank.index], step.ids[rank.index]
        plain = ferry.Evaluator(GATHERED, exchange_of(rank, step), {"part": part})
        batched = ferry.Evaluator(GATHERED.overlap(2), exchange_of(rank, step, lanes=2), {"part": part})
        for layer in (plain, batched):
            (y,) = layer.run(convert(x), convert(ids))
            assert same(np.asarray(y), x + np.float32(0))  # every token once, +0 from the other ranks

    ferry.Group.threads(3).run(body)


def test_check_refuses_what_configurations_cannot_do():
    settings = {"experts": 4, "top_k": 1, "hidden": 8, "max_tokens": 4}
    host, device = ferry.Config(**settings), ferry.Config(**settings, backend="cuda")
    GATHERED.check(host)
    GATHERED.check({"": host})
    GATHERED.check(device)
    joined = ferry.Program("program joined\ninput x: tokens\nall = all_gather_v(x)\nboth = join(x, all)\noutput both\n")
    joined.check(host)
    with pytest.raises(ferry.UnsupportedError, match=r"program joined, step both \(join\): all has the rows of all ranks in device memory"):
        joined.check(device)
    with pytest.raises(ferry.UsageError, match=r"step rows.sent.1 \(dispatch_send\): lane 1 does not exist"):
        ferry.Program(LAYER).overlap(2).check(host)


def test_a_function_that_fails_ends_the_run_on_all_ranks(rng):
    step = step_of(rng, 3)
    program = ferry.Program(LAYER).overlap(2)

    def body(rank):
        x, ids, weights = step.tokens[rank.index], step.ids[rank.index], weights_of(step, rank.index)
        calls_left = None

        def failing(rows):
            nonlocal calls_left
            if calls_left is not None:
                calls_left -= 1
                if calls_left < 0:
                    raise LookupError("no such expert")
            return experts(rows)

        layer = ferry.Evaluator(program, exchange_of(rank, step, lanes=2), {"experts": failing})
        expected = layer.run(x, ids, weights)[0]
        for call in range(2):
            calls_left = call if rank.index == 1 else None
            with pytest.raises(LookupError if rank.index == 1 else ferry.UsageError) as caught:
                layer.run(x, ids, weights)
            text = "no such expert" if rank.index == 1 else "failed on rank 1: no such expert"
            assert text in str(caught.value)
            if hasattr(caught.value, "__notes__"):
                where = f"outputs.{call} (call experts)" if rank.index == 1 else f"y.{call} (combine_receive)"
                assert caught.value.__notes__ == [f"program moe, step {where}"]
            calls_left = None
            assert same(layer.run(x, ids, weights)[0], expected)

    ferry.Group.threads(3).run(body)


def test_an_observer_sees_every_step_begin(rng):
    step = step_of(rng, 1)

    def body(rank):
        layer = ferry.Evaluator(ferry.Program(LAYER), exchange_of(rank, step), {"experts": lambda rows: seen.append("experts") or experts(rows)})
        seen, given = [], (step.tokens[0], step.ids[0], weights_of(step, 0))
        layer.set_observer(seen.append)
        layer.run(*given)
        layer.set_observer(None)
        layer.run(*given)
        assert seen == [0, 1, "experts", 2, 3, "experts"]

    ferry.Group.threads(1).run(body)


def test_what_is_missing_is_refused(rng):
    step = step_of(rng, 1)

    def body(rank):
        exchange, program = exchange_of(rank, step), ferry.Program(LAYER)
        with pytest.raises(ferry.UsageError, match=r"step outputs \(call experts\): no function experts was passed"):
            ferry.Evaluator(program, exchange)
        with pytest.raises(ferry.UsageError, match=r"step rows \(dispatch\): names no exchange, and no exchange without a name"):
            ferry.Evaluator(program, {"inner": exchange}, {"experts": experts})
        with pytest.raises(ferry.UsageError, match=r"lane 1 does not exist: its exchange has 1 lane; construct it with 2"):
            ferry.Evaluator(program.overlap(2), exchange, {"experts": experts})
        layer = ferry.Evaluator(program, exchange, {"experts": experts})
        with pytest.raises(ferry.UsageError, match="given 1 inputs, the program has 3: x, ids, weights"):
            layer.run(step.tokens[0])
        with pytest.raises(ferry.UsageError, match="operation is 'barrier'"):
            exchange.refuse("no", operation="barrier")

    ferry.Group.threads(1).run(body)


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")


# Whatever a function raises, the other ranks learn of it at once, and the program runs again.
@pytest.mark.parametrize("raised, text", [
    (ferry.TimeoutError("of another group", ferry.error.WaitRecord("dispatch", 1, 0, 1, 2, 1)), "failed on rank 0: of another group"),
    (ValueError(), "failed on rank 0: ValueError"), (Unprintable(), "failed on rank 0: Unprintable"),
])
def test_whatever_a_function_raises_reaches_all_ranks(rng, raised, text):
    step = step_of(rng, 2)

    def body(rank):
        fails = rank.index == 0

        def function(rows):
            if fails:
                raise raised
            return experts(rows)

        layer = ferry.Evaluator(ferry.Program(LAYER), exchange_of(rank, step, deadline=60.0), {"experts": function})
        given = step.tokens[rank.index], step.ids[rank.index], weights_of(step, rank.index)
        began = time.monotonic()
        with pytest.raises(type(raised)) if fails else pytest.raises(ferry.UsageError, match=text):
            layer.run(*given)
        assert time.monotonic() - began < 30
        fails = False
        layer.run(*given)

    ferry.Group.threads(2).run(body)


def test_arrays_of_pytorch(rng):
    torch = pytest.importorskip("torch")
    step = step_of(rng, 2)

    def body(rank):
        given = [torch.from_numpy(array) for array in (step.tokens[rank.index], step.ids[rank.index], weights_of(step, rank.index))]
        program = ferry.Program(LAYER.replace("call experts", "call twice"))
        plain = ferry.Evaluator(program, exchange_of(rank, step), {"twice": lambda rows: rows.data[:rows.total] * 2})
        batched = ferry.Evaluator(program.overlap(2), exchange_of(rank, step, lanes=2), plain._functions)
        assert torch.equal(plain.run(*given)[0], batched.run(*given)[0])

    ferry.Group.threads(2).run(body)


class FakeCuda:
    """Stands for torch.cuda, and writes down what streams wait for."""

    def __init__(self):
        self.log, self.now = [], "main"

    def Stream(self, device):
        return FakeStream(self, f"own{sum(line.startswith('new') for line in self.log) + 1}", new=True)

    def current_stream(self, device):
        return FakeStream(self, self.now)

    def is_current_stream_capturing(self):
        return False

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream.name
        yield
        self.now = before


class FakeStream:
    def __init__(self, cuda, name, new=False):
        self.cuda, self.name = cuda, name
        if new:
            cuda.log.append(f"new {name}")

    def wait_stream(self, other):
        self.cuda.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.cuda.log.append(f"{self.name} waits for {event}")

    def record_event(self):
        return f"a step of {self.name}"


def test_streams_wait_only_for_values_of_other_streams(monkeypatch):
    program = ferry.Program(LAYER).overlap(2)
    assert [step.stream for step in program.steps if step.kind == "call"] == [0, 1]
    fake = types.ModuleType("fake_framework")
    fake.cuda = cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "fake_framework", fake)
    tensor = type("Tensor", (), {"__module__": "fake_framework", "is_cuda": True, "device": 0})()
    steps = [_Step(step) for step in program.steps]
    streams = Streams(steps)
    for _ in range(2):
        streams.begin([tensor])
        for step in steps:
            with streams.of(step, {}):
                cuda.log.append(f"{step.outputs[0]} on {cuda.now}")
        streams.end([("y", tensor)])
    assert cuda.log[0] == "new own1" and cuda.log.count("new own1") == 1
    once = cuda.log[1:len(cuda.log) // 2 + 1]
    waits = [line for line in once if "waits" in line]
    turns = 3 * ["own1 waits for a step of main"]  # the second micro-batch's dispatch, experts and combine come after the first's
    assert waits == ["own1 waits for main", *turns, "main waits for a step of own1", "main waits for own1"]
    assert once[once.index("outputs.1 on own1") - 1] == turns[0]
    assert once.index("main waits for a step of own1") == once.index("y on main") - 1  # the join
    assert "outputs.1 on own1" in once and "outputs.0 on main" in once
    assert cuda.log[1:] == once * 2
