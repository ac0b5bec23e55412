"""Timelines of programs on all ranks, in Chrome's trace format: steps as the evaluator enqueues them, kernels as the profiler sees them."""

import json
import pathlib
import tempfile
import traceback

import torch
from graph_times import ON_GPU, Clock, gathered, synchronize


def step_times(evaluator, inputs, runs):
    """Of each run: (name, begin, end) of each step, in microseconds."""
    evaluator.run(*inputs)
    names = [step.name for step in evaluator.program.steps]
    made = []
    for _ in range(runs):
        synchronize()
        clock, moments = Clock(), []
        evaluator.set_observer(lambda _, clock=clock, moments=moments: moments.append(clock.now()))
        evaluator.run(*inputs)
        evaluator.set_observer(None)
        begins = [clock.of(moment) for moment in moments]
        made.append([(name, begins[i], begins[i + 1]) for i, name in enumerate(names)])
    return made


def kernels_of(call):
    """Kernels of a call as the profiler saw them: (name, begin, end, stream)."""
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(pathlib.Path(folder, "trace.json").read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    start = min((event["ts"] for event in kernels), default=0)
    return [(event["name"][:120], event["ts"] - start, event["ts"] - start + event["dur"], event["tid"]) for event in kernels]


class Timelines:
    """The events of a trace."""

    def __init__(self):
        self.events, self._processes = [], 0

    def add(self, title, mine):
        """Rows of [(name, begin, end, thread)] of all ranks."""
        for rank, steps in enumerate(gathered(mine)):
            pid = 100 * self._processes + rank
            self.events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"{title}, rank {rank}"}})
            self.events += [{"ph": "X", "pid": pid, "tid": thread, "name": name, "ts": begin, "dur": end - begin}
                            for name, begin, end, thread in steps]
        self._processes += 1

    def add_kernels(self, title, evaluator, inputs, found):
        """Those of a run. The profiler is not needed for any result: `found` gets its error."""
        if not ON_GPU:
            return
        evaluator.run(*inputs)
        kernels = []
        try:
            kernels = kernels_of(lambda: evaluator.run(*inputs))
        except Exception:
            found["profiler"] = traceback.format_exc()
        self.add(title, kernels)

    def text(self):
        return json.dumps({"traceEvents": self.events, "displayTimeUnit": "ns"})
