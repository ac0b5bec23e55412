"""Runs programs on the exchanges of a rank."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ferry._streams import Streams
from ferry.error import PeerLostError, TimeoutError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ferry._core import Exchange, Program, ProgramStep

_SEND_PHASES = ("dispatch_send", "combine_send")
_CALLS = ("dispatch", "combine", "metadata", "all_gather_v", "reduce_scatter_v", *_SEND_PHASES)  # steps that start a call of a lane


class Evaluator:
    """Runs a program, any number of times.

    program    the same on every rank
    exchanges  an Exchange, which takes every step, or a dict of exchanges by the names that the steps give them, '' for steps
               that name none
    functions  the callables that the program's calls name: each takes the values of its step, in order, and returns one
               value, or a tuple of them where the step makes several

    Values are arrays of tokens [N, H], ids and weights [N, K], and outputs [rows, H], ints for counts, and DispatchResult.
    With backends on GPUs all work, that of the functions too, is enqueued on the current stream of the arrays' framework. With
    PyTorch, steps of other streams than 0 run on streams of the evaluator, which a run forks from the current one and joins.

    Raises what Program.check() raises for the configurations of the exchanges, and UsageError for functions that are missing.
    """

    def __init__(self, program: Program, exchanges: Exchange | Mapping[str, Exchange],
                 functions: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self.program = program
        self._exchanges = dict(exchanges) if isinstance(exchanges, Mapping) else {"": exchanges}
        program.check({name: exchange.config for name, exchange in self._exchanges.items()})
        self._functions = dict(functions or {})
        self._steps: list[_Step] = []
        made_by = {}  # value: step
        for given in program.steps:
            step = self._bind(given, made_by)
            made_by.update((name, step) for name in step.outputs)
            self._steps.append(step)
        self._streams = Streams(self._steps)
        self._inputs, self._outputs = [name for name, _ in program.inputs], program.outputs
        self._observer = None

    def set_observer(self, observer: Callable[[int], None] | None) -> None:
        """From now on run() calls `observer` with the number of each step before that step begins, and with the number of steps
        after the last: for timelines. With PyTorch on GPUs the step's stream is then the current one. It must not raise."""
        self._observer = observer

    def _bind(self, given, made_by):
        step = _Step(given)
        if step.kind == "call":
            step.function = self._functions.get(given.function)
            if not callable(step.function):
                raise UsageError(f"program {self.program.name}, step {step.name}: no function {given.function} was passed: "
                                 "pass it in the functions of the evaluator")
        elif step.kind in _CALLS:
            step.exchange = self._exchanges.get(given.exchange) or self._exchanges[""]  # one without a name takes every step
            step.lane = given.lane
        elif step.kind not in ("part", "join"):  # receive phases, wait
            call = made_by[step.inputs[0]]
            step.exchange, step.lane = call.exchange, call.lane
        return step

    def run(self, *inputs: Any) -> tuple[Any, ...]:
        """Runs the steps in order and returns the program's outputs. Collective.

        `inputs` are in the order of Program.inputs. Received values are memory of their lane, valid until its next dispatch.

        When a step fails, the run ends with its error, whose note names the step. The rank refuses its calls that are left, so
        that the runs of the other ranks end with a UsageError at the next call that needs this rank (on GPUs: their
        `Exchange.synchronize()`, or a step `wait`). After that the program may be run again. TimeoutError and PeerLostError
        are final for the group.
        """
        run = _Run(self)
        try:
            run.bind(inputs)
            self._streams.begin(inputs)
            for at, step in enumerate(self._steps):
                run.at, run.in_call = at, False
                with self._streams.of(step, run.values):
                    if self._observer is not None:
                        self._observer(at)
                    run.step(step)
        except BaseException as error:
            # A function may raise such an error of another group: then this one goes on.
            if not run.in_call or not isinstance(error, (TimeoutError, PeerLostError)):
                run.refuse_rest(error)
            if run.at is not None and hasattr(error, "add_note"):
                error.add_note(f"program {self.program.name}, step {self._steps[run.at].name}")
            raise
        finally:
            self._streams.end((name, run.values.get(name)) for name in self._outputs)
        if self._observer is not None:
            self._observer(len(self._steps))
        return tuple(run.values[name] for name in self._outputs)


class _Step:
    """A step with what it needs looked up: properties of a ProgramStep take about a microsecond each."""

    __slots__ = ("after", "exchange", "function", "index", "inputs", "kind", "lane", "name", "of", "outputs", "run", "sends", "sm_limit",
                 "stream")

    def __init__(self, step: ProgramStep) -> None:
        for field in ("after", "index", "inputs", "kind", "name", "of", "sm_limit", "stream"):
            setattr(self, field, getattr(step, field))
        self.outputs = [name for name, _ in step.outputs]
        self.exchange = self.lane = self.function = None
        self.run = getattr(_Run, "_" + self.kind)
        self.sends = self.kind in _SEND_PHASES


def _framework(array):
    return sys.modules[type(array).__module__.partition(".")[0]]  # numpy, torch or cupy


def _empty_like(rows, count):
    if hasattr(rows, "new_empty"):  # PyTorch: on the same device
        return rows.new_empty((count, *rows.shape[1:]))
    return _framework(rows).empty((count, *rows.shape[1:]), dtype=rows.dtype)


def _on_device(array):
    return getattr(array, "is_cuda", False) or type(array).__module__.partition(".")[0] == "cupy"


def _device_number(rows, number):
    framework = _framework(rows)
    if hasattr(rows, "new_full"):
        return rows.new_full((1,), number, dtype=framework.int32)
    return framework.full((1,), number, dtype=framework.int32)


def _text_of(error):
    try:
        return str(error) or type(error).__name__
    except Exception:  # of a __str__ of the caller's
        return type(error).__name__


def _operation_of(kind):
    return kind.removesuffix("_send")


class _Run:
    """One run: its values, and how far it has come."""

    def __init__(self, evaluator):
        self._program, self._steps, self._streams = evaluator.program, evaluator._steps, evaluator._streams
        self._inputs = evaluator._inputs
        self.values = {}
        self._sent = set()  # send phases that have begun a call
        self.at = None  # the step; None: no step has begun
        self.in_call = False  # whether the step's call of an exchange has begun: then it ends alike on all ranks

    def bind(self, inputs):
        names = self._inputs
        if len(inputs) != len(names):
            raise UsageError(f"program {self._program.name}: run() was given {len(inputs)} inputs, the program has {len(names)}: "
                             f"{', '.join(names)}")
        self.values.update(zip(names, inputs))

    def step(self, step):
        self.values[step.outputs[0]] = step.run(self, step, *[self.values[name] for name in step.inputs])
        if step.sends:
            self._sent.add(step.outputs[0])

    def _begin(self, step):
        self.in_call = True
        return step.exchange, step.lane

    def _dispatch(self, step, tokens, routes, weights=None):
        exchange, lane = self._begin(step)
        return getattr(exchange, step.kind)(tokens, getattr(routes, "plan", routes), weights, lane=lane, sm_limit=step.sm_limit)

    def _combine(self, step, outputs, received, weights=None):
        exchange, lane = self._begin(step)
        return getattr(exchange, step.kind)(outputs, received.plan, lane=lane, sm_limit=step.sm_limit, **self._weights(weights))

    def _dispatch_receive(self, step, _):
        exchange, lane = self._begin(step)
        return getattr(exchange, step.kind)(lane=lane)

    _dispatch_send, _combine_send, _combine_receive = _dispatch, _combine, _dispatch_receive

    @staticmethod
    def _weights(weights):
        if weights is None:
            return {}
        return {"row_weights": weights.weight} if hasattr(weights, "plan") else {"topk_weights": weights}

    def _metadata(self, step, count):
        exchange, lane = self._begin(step)
        found = exchange.metadata(count, lane=lane)  # memory of the lane, which its next call overwrites
        return found.clone() if hasattr(found, "clone") else found.copy()

    def _all_gather_v(self, step, rows):
        exchange, lane = self._begin(step)
        most = exchange.config.max_tokens * exchange.ranks
        return exchange.all_gather_v(rows, _empty_like(rows, most), lane=lane)

    def _reduce_scatter_v(self, step, rows, like):
        exchange, lane = self._begin(step)
        if getattr(like, "ndim", 0) == 1:
            raise UsageError("the count is in device memory, but the host must know how many rows this rank has: pass it as a number, "
                             "or pass tokens")
        rows_of_rank = len(like) if hasattr(like, "shape") else like
        # With a count in device memory the kernel accepts more rows than the sum, as a gather leaves there.
        count = _device_number(rows, rows_of_rank) if _on_device(rows) else None
        return exchange.reduce_scatter_v(rows, _empty_like(rows, rows_of_rank), count=count, lane=lane)

    def _wait(self, step, value):
        exchange, lane = self._begin(step)
        exchange.synchronize(lane=lane)
        exchange.check(lane)
        return value

    def _part(self, step, whole):
        rows = len(whole)
        return whole[step.index * rows // step.of:(step.index + 1) * rows // step.of]

    def _join(self, step, *parts):
        return _framework(parts[0]).concatenate(parts)

    def _call(self, step, *given):
        made = step.function(*given)
        if len(step.outputs) == 1:
            return made
        if not isinstance(made, tuple) or len(made) != len(step.outputs):
            raise UsageError(f"the function of step {step.name} has returned {made!r:.100}, not a tuple of {len(step.outputs)} values")
        for name, one in zip(step.outputs[1:], made[1:]):
            self.values[name] = one
        return made[0]

    def _rank(self):
        return next((step.exchange.rank for step in self._steps if step.exchange is not None), "?")

    def refuse_rest(self, error):
        """Takes part in the calls that are left without doing them: receives what has been sent, and refuses the others, so
        that each lane has had the same calls on every rank."""
        where = f"program {self._program.name}"
        if self.at is not None:
            where += f", step {self._steps[self.at].name}"
        reason = f"{where}: failed on rank {self._rank()}: {_text_of(error)}"
        for step in self._steps[(self.at or 0) + self.in_call:]:
            if step.kind not in _CALLS and not (step.kind.endswith("_receive") and step.inputs[0] in self._sent):
                continue
            exchange, lane = step.exchange, step.lane
            try:
                with self._streams.of(step, self.values):
                    if step.kind.endswith("_receive"):
                        getattr(exchange, step.kind)(lane=lane)
                    else:
                        exchange.refuse(reason, lane=lane, operation=_operation_of(step.kind))
            except (TimeoutError, PeerLostError):
                return
            except Exception:  # of a call whose result this run does not need any more
                continue
