"""A layer as a program on GPUs: whole, and in two micro-batches whose messages travel under each other's experts.

One process for each GPU. Tokens are dispatched in fp8, the experts are two grouped products that read the groups' offsets on the
device (grouped_experts.py), and combine carries bf16. The inner columns of the experts are chosen so that the experts and the
communication take equally long, within 20 %. All times are those of CUDA graphs, of the slowest rank, medians of runs in turn.

target: two micro-batches take at most the time of the whole program less half of the smaller of the two parts.

Also: the evaluator's own time, and a timeline in which shared experts run between the phases of dispatch. Without a GPU: small shapes
in Triton's interpreter (TRITON_INTERPRET=1), which show only that the program runs.
"""

import argparse
import contextlib
import faulthandler
import json
import pathlib
import statistics
import tempfile
import time
import traceback

import ferry
import torch
import torch.distributed as dist
from grouped_experts import STEP, GroupedExperts

LAYER = """
program moe
input x: tokens
input ids: ids
input weights: weights
rows = dispatch(x, ids, weights){limit}
outputs: outputs = call experts(rows)
y = combine(outputs, rows, rows){limit}
output y
"""

# The second micro-batch starts when the first has its rows. So the messages of one travel under the experts of the other, with
# few thread blocks, and only the first dispatch and the last combine have the GPU to themselves.
IN_TURNS = """
program moe_in_turns
input x: tokens
input ids: ids
input weights: weights
x.0 = part(x) index=0 of=2
ids.0 = part(ids) index=0 of=2
weights.0 = part(weights) index=0 of=2
x.1 = part(x) index=1 of=2
ids.1 = part(ids) index=1 of=2 stream=1
weights.1 = part(weights) index=1 of=2 stream=1
rows.0 = dispatch(x.0, ids.0, weights.0)
x.late: tokens = call after(x.1, rows.0)
rows.1 = dispatch(x.late, ids.1, weights.1) lane=1 stream=1{limit}
outputs.0: outputs = call experts(rows.0)
y.0 = combine(outputs.0, rows.0, rows.0){limit}
outputs.1: outputs = call experts(rows.1) stream=1
y.1 = combine(outputs.1, rows.1, rows.1) lane=1 stream=1
y = join(y.0, y.1)
output y
"""

SHARED = """
program shared
input x: tokens
input ids: ids
input weights: weights
sent = dispatch_send(x, ids, weights)
shared: tokens = call shared_experts(x)
rows = dispatch_receive(sent)
outputs: outputs = call experts(rows)
routed = combine(outputs, rows, rows)
y: tokens = call add(routed, shared)
output y
"""

ON_GPU = torch.cuda.is_available()
HIDDEN, MOST_INNER, RATIO = (7168, 1024, 0.84) if ON_GPU else (256, 256, 0.84)
LIMITS = (0, 8, 16, 24, 32)  # thread blocks of calls under experts; 0: half of the GPU
QUICK_ROUNDS, ROUNDS, REPLAYS = (5, 31, 5) if ON_GPU else (1, 3, 1)


class Recorded:
    """A call that can be made again: on GPUs as a CUDA graph."""

    def __init__(self, call):
        self.result = call()
        self.again = call
        if ON_GPU:
            torch.cuda.synchronize()
            dist.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.result = call()
            self.again, self._graph = graph.replay, graph


class Clock:
    """Moments of this rank's current stream, in microseconds."""

    def __init__(self):
        self._start = self.now()

    @staticmethod
    def now():
        if not ON_GPU:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def between(begin, end):
        if not ON_GPU:
            return (end - begin) * 1e6
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def of(self, moment):
        return self.between(self._start, moment)


def synchronize():
    if ON_GPU:
        torch.cuda.synchronize()
    dist.barrier()


def time_of(again):
    """Microseconds of one of several calls in a row, on this rank."""
    synchronize()
    again()  # so that all ranks have begun before the clock does
    begin = Clock.now()
    for _ in range(REPLAYS):
        again()
    return Clock.between(begin, Clock.now()) / REPLAYS


def gathered(mine):
    all_of = [None] * dist.get_world_size()
    dist.all_gather_object(all_of, mine)
    return all_of


def in_turns(calls, rounds):
    """{name: microseconds of each round, of the slowest rank}"""
    mine = {name: [] for name in calls}
    for number in range(rounds):
        names = list(calls) if number % 2 == 0 else list(calls)[::-1]
        for name in names:
            mine[name].append(time_of(calls[name]))
    ranks = gathered(mine)
    return {name: [max(times) for times in zip(*(rank[name] for rank in ranks))] for name in calls}


def medians(times):
    return {name: round(statistics.median(of_rounds), 2) for name, of_rounds in times.items()}


class Layer:
    """The exchanges, experts and inputs of a rank for one shape."""

    def __init__(self, group, device, tokens, experts, top_k, weights):
        self.tokens, self.top_k = tokens, top_k
        shape = dict(experts=experts, top_k=top_k, hidden=HIDDEN, format="fp8", combine_type="bf16",
                     backend="cuda" if ON_GPU else "cpu", deadline=10.0)
        self.whole = ferry.Exchange(group, max_tokens=tokens, **shape)
        self.halves = ferry.Exchange(group, max_tokens=(tokens + 1) // 2, lanes=2, **shape)
        self.experts = weights
        rank = dist.get_rank()
        generator = torch.Generator(device).manual_seed(100 + rank)
        x = torch.randn(tokens, HIDDEN, generator=generator, device=device).bfloat16()
        ids = torch.rand(tokens, experts, generator=generator, device=device).topk(top_k).indices
        self.inputs = x, ids, torch.rand(tokens, top_k, generator=generator, device=device)
        self.blocks = self.all_blocks = torch.cuda.get_device_properties(device).multi_processor_count if ON_GPU else 3
        self._buffers = {}
        self.fixed = None  # outputs of experts that take no time
        self.shared = torch.randn(HIDDEN, HIDDEN, generator=generator, device=device).bfloat16() * 0.02

    def _buffers_of(self, rows):
        key = rows.data.data_ptr()
        if key not in self._buffers:  # before any capture
            capacity = rows.data.shape[0]
            self._buffers[key] = (torch.empty(capacity * MOST_INNER, dtype=torch.bfloat16, device=rows.data.device),
                                  torch.empty(capacity, HIDDEN, dtype=torch.bfloat16, device=rows.data.device))
        return self._buffers[key]

    def run_experts(self, rows):
        inner_rows, out = self._buffers_of(rows)
        return out if self.fixed else self.experts.run(rows, inner_rows, out, self.blocks)

    def evaluator(self, program, exchange):
        functions = {"experts": self.run_experts, "after": lambda x, _: x, "shared_experts": lambda x: x @ self.shared,
                     "add": lambda a, b: a + b}
        return ferry.Evaluator(program, exchange, functions)

    def record(self, program, exchange, spared=0):
        """The program as a graph; `spared`: SMs that the experts leave to others."""
        self.blocks = max(1, self.all_blocks - spared)
        layer = self.evaluator(program, exchange)
        return Recorded(lambda: layer.run(*self.inputs)[0])

    def by_hand(self):
        x, ids, weights = self.inputs
        rows = self.whole.dispatch(x, ids, weights)
        return self.whole.combine(self.run_experts(rows), rows.plan, row_weights=rows.weight)

    def check_experts(self):
        """The largest error of a few rows against fp32, relative to the largest value."""
        rows = self.whole.dispatch(*self.inputs)
        out = self.run_experts(rows).float()
        offsets = rows.row_offsets.tolist()
        error = largest = 0.0
        for group in (0, len(offsets) // 2 - 1, len(offsets) - 2):
            some = slice(offsets[group], min(offsets[group] + 3, offsets[group + 1]))
            if some.start < some.stop:
                expected = self.experts.reference(rows.data[some], rows.scales[some], group)
                error = max(error, (out[some] - expected).abs().max().item())
                largest = max(largest, expected.abs().max().item())
        return max(gathered(error / max(largest, 1e-9)))


def choose_inner(layer, communication):
    """Sets the inner columns for which experts take RATIO of the communication's time. Returns what was tried."""
    rows = layer.whole.dispatch(*layer.inputs)
    layer._buffers_of(rows)
    tried = {}

    def measure(inner):
        layer.experts.set_inner(inner)
        graph = Recorded(lambda: layer.run_experts(rows))
        tried[inner] = medians(in_turns({"experts": graph.again}, QUICK_ROUNDS))["experts"]

    def distance(inner):
        return abs(tried[inner] - RATIO * communication)

    for inner in (2 * STEP, MOST_INNER // 2):
        measure(inner)
    for _ in range(4):
        near = sorted(tried, key=distance)[:2]
        (low, high), slope = sorted(near), 0
        slope = (tried[high] - tried[low]) / (high - low)
        wanted = low + (RATIO * communication - tried[low]) / slope if slope > 0 else low
        inner = min(max(round(wanted / STEP), 1), MOST_INNER // STEP) * STEP
        if inner in tried:
            break
        measure(inner)
    best = min(tried, key=distance)
    layer.experts.set_inner(best)
    return best, tried[best], tried


def variants():
    """{name: (program, SMs that experts leave to others)}"""
    made = {}
    for limit in LIMITS if ON_GPU else (0,):
        for spared in sorted({0, limit}):
            # Micro-batches share a program's limit.
            made[f"overlap(2), limit {limit}, experts spare {spared}"] = (
                ferry.Program(LAYER.format(limit=f" sm_limit={2 * limit}" if limit else "")).overlap(2), spared)
            made[f"in turns, limit {limit}, experts spare {spared}"] = (
                ferry.Program(IN_TURNS.format(limit=f" sm_limit={limit}" if limit else "")), spared)
    return made


def measure_shape(group, device, weights, tokens, experts, top_k, found, save):
    layer = Layer(group, device, tokens, experts, top_k, weights)
    plain = ferry.Program(LAYER.format(limit=""))
    found |= {"tokens": tokens, "experts": experts, "top_k": top_k, "hidden": HIDDEN}
    layer.run_experts(layer.whole.dispatch(*layer.inputs))  # compiles the kernels
    layer.fixed = True
    communication = medians(in_turns({"communication": layer.record(plain, layer.whole).again}, 3 * QUICK_ROUNDS))["communication"]
    layer.fixed = None
    inner, alone, tried = choose_inner(layer, communication)
    found |= {"communication_us": communication, "experts_us": alone, "inner": inner, "experts_us_by_inner": tried,
              "within_20_percent": bool(abs(alone - communication) <= 0.2 * max(alone, communication))}
    found["experts_error"] = layer.check_experts()
    save()
    whole, hand = layer.record(plain, layer.whole), Recorded(layer.by_hand)
    split = {name: layer.record(program, layer.halves, spared) for name, (program, spared) in variants().items()}
    synchronize()
    for graph in (whole, hand, *split.values()):
        graph.again()
    synchronize()
    expected = whole.result.clone()
    found["differing"] = [name for name, graph in {"by hand": hand, **split}.items()
                          if not all(gathered(torch.equal(graph.result.view(torch.int16), expected.view(torch.int16))))]
    quick = medians(in_turns({name: graph.again for name, graph in split.items()}, QUICK_ROUNDS))
    best = min(quick, key=quick.get)
    overlaps = {name: time for name, time in quick.items() if name.startswith("overlap")}
    best_overlap = min(overlaps, key=overlaps.get)
    found |= {"quick_us": quick, "best": best, "best_of_overlap": best_overlap}
    save()
    calls = {"whole": whole.again, "by hand": hand.again, "overlap(2)": split[best_overlap].again, "best": split[best].again}
    times = in_turns(calls, ROUNDS)
    found["graph_us"] = final = medians(times)
    found["rounds_us"] = {name: [round(time, 1) for time in of_rounds] for name, of_rounds in times.items()}
    allowed = final["whole"] - 0.5 * min(communication, alone)
    found |= {"allowed_us": round(allowed, 2), "reached": final["best"] <= allowed and not found["differing"],
              "hidden_part_of_the_smaller": round((final["whole"] - final["best"]) / min(communication, alone), 3)}
    # The evaluator's own time: a graph holds the same work as that of the calls by hand; without one it is the host's.
    found["own_us_in_a_graph"] = round(final["whole"] - final["by hand"], 2)
    save()
    return layer


def own_time(layer):
    """Microseconds that the evaluator takes for a step on the host, without a graph."""
    layer.blocks, plain = layer.all_blocks, ferry.Program(LAYER.format(limit=""))
    evaluator = layer.evaluator(plain, layer.whole)
    steps = len(plain.steps)

    def host_us(call):
        synchronize()
        call()
        if ON_GPU:
            torch.cuda._sleep(20_000_000)  # the GPU has work, so the host never waits for it
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6

    differences = []
    for _ in range(2 * QUICK_ROUNDS + 1):
        program, hand = host_us(lambda: evaluator.run(*layer.inputs)), host_us(layer.by_hand)
        differences.append((program - hand) / steps)
    synchronize()
    return round(statistics.median(differences), 2)


def timeline(layer, runs):
    """Begins and ends of the steps of each run, in microseconds, and whether the shared experts always ran between the phases."""
    program = ferry.Program(SHARED)
    evaluator = layer.evaluator(program, layer.whole)
    evaluator.run(*layer.inputs)
    names = [step.name for step in program.steps]
    at = {name.partition(" ")[0]: number for number, name in enumerate(names)}
    between, last = True, []
    for _ in range(runs):
        synchronize()
        clock, moments = Clock(), []
        evaluator.set_observer(lambda _, clock=clock, moments=moments: moments.append(clock.now()))
        evaluator.run(*layer.inputs)
        evaluator.set_observer(None)
        begins = [clock.of(moment) for moment in moments]
        last = [(name, begins[i], begins[i + 1]) for i, name in enumerate(names)]
        between &= last[at["shared"]][1] >= last[at["sent"]][2] and last[at["shared"]][2] <= last[at["rows"]][1]
    layer.whole.synchronize()
    return between, last


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


def add_trace(events, process, ranks, title):
    """Adds rows of [(name, begin, end, thread)] of all ranks to a Chrome trace."""
    for rank, steps in enumerate(ranks):
        pid = 100 * process + rank
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"{title}, rank {rank}"}})
        events += [{"ph": "X", "pid": pid, "tid": thread, "name": name, "ts": begin, "dur": end - begin}
                   for name, begin, end, thread in steps]


def record_timelines(layer, found, events, best):
    between, steps = timeline(layer, 20 if ON_GPU else 2)
    found["shared_experts_between_the_phases"] = all(gathered(between))
    add_trace(events, 0, gathered([(*step, 0) for step in steps]), "shared experts, steps")
    if not ON_GPU:
        return
    shared = layer.evaluator(ferry.Program(SHARED), layer.whole)
    program, spared = variants()[best]
    layer.blocks = layer.all_blocks - spared
    in_batches = layer.evaluator(program, layer.halves)
    in_batches.run(*layer.inputs)
    for number, (title, evaluator) in enumerate((("shared experts, kernels", shared), ("two micro-batches, kernels", in_batches)), 1):
        try:
            kernels = kernels_of(lambda evaluator=evaluator: evaluator.run(*layer.inputs))
        except Exception:  # the profiler is not needed for any result
            kernels = []
            found["profiler"] = traceback.format_exc()
        add_trace(events, number, gathered(kernels), title)


def run_rank(rank, ranks, folder, given):
    faulthandler.dump_traceback_later(given.seconds, exit=True)
    device = torch.device("cuda", rank) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if ON_GPU else "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    group, record, events = ferry.Group.torch(), {"seconds": {}, "shapes": []}, []
    start = time.perf_counter()

    def save():
        if rank == 0 and given.json:
            pathlib.Path(given.json).write_text(json.dumps(record, indent=1))
        if rank == 0 and given.timeline and events:
            pathlib.Path(given.timeline).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))

    record |= {"ranks": ranks, "device": torch.cuda.get_device_name() if ON_GPU else "cpu", "torch": torch.__version__,
               "format": "fp8", "combine_type": "bf16", "target": "whole - 0.5 x smaller part"}
    for experts, top_k in given.shapes:
        weights = GroupedExperts(experts // ranks, HIDDEN, MOST_INNER, device, seed=rank)
        for tokens in given.tokens:
            found = {}
            record["shapes"].append(found)
            layer = measure_shape(group, device, weights, tokens, experts, top_k, found, save)
            if len(record["shapes"]) == 1:
                found["own_us_a_step_eager_python"] = own_time(layer)
                save()
                record_timelines(layer, found, events, found["best"])
            record["seconds"][f"top-{top_k} of {experts}, {tokens}"] = round(time.perf_counter() - start, 1)
            save()
            if rank == 0:
                print(json.dumps({key: value for key, value in found.items() if key != "rounds_us"}), flush=True)
            synchronize()
            del layer
            if ON_GPU:
                torch.cuda.empty_cache()
    if rank == 0:
        report(record)
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def report(record):
    for found in record["shapes"]:
        print(f"{found['tokens']:,} tokens, top-{found['top_k']} of {found['experts']}, {found['inner']} inner columns: "
              f"communication {found['communication_us']:.0f} us, experts {found['experts_us']:.0f} us; "
              f"whole {found['graph_us']['whole']:.0f} us, overlap(2) {found['graph_us']['overlap(2)']:.0f} us, "
              f"best {found['graph_us']['best']:.0f} us ({found['best']}), allowed {found['allowed_us']:.0f} us: "
              f"{'reached' if found['reached'] else 'missed'}; {len(found['differing'])} variants with other bytes", flush=True)
    first = record["shapes"][0]
    print(f"evaluator: {first['own_us_in_a_graph']} us in a graph, {first['own_us_a_step_eager_python']} us a step without (Python); "
          f"shared experts between the phases: {first['shared_experts_between_the_phases']}", flush=True)


def shape_of(text):
    experts, _, top_k = text.partition("/")
    return int(experts), int(top_k)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the measurements")
    parser.add_argument("--timeline", help="file for the timelines, in Chrome trace format")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 2048] if ON_GPU else [8], help="tokens of a rank")
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=[(64, 8), (16, 2)] if ON_GPU else [(4, 2)],
                        help="experts of all ranks/experts of a token, as 64/8")
    parser.add_argument("--seconds", type=float, default=85, help="a rank that takes longer prints where it is and ends")
    given = parser.parse_args()
    ranks = torch.cuda.device_count() if ON_GPU else 2
    if ranks < 2:
        raise SystemExit("error: this measurement needs two GPUs")
    if ON_GPU and not ferry.has_cuda():
        raise SystemExit("error: this measurement needs a build with the CUDA backend")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (ranks, folder, given), nprocs=ranks)


if __name__ == "__main__":
    main()
