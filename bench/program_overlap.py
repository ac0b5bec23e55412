"""Layers as programs on GPUs: whole, and in two micro-batches whose messages travel under each other's experts.

One process for each GPU. Tokens are dispatched in fp8, the experts are two grouped products that read the groups' offsets on the
device (grouped_experts.py), and combine carries bf16. The inner columns of the experts are chosen so that the experts and the
communication take equally long, within 20 %. All times are those of CUDA graphs, of the slowest rank, medians of runs in turn.

target: two micro-batches take at most the time of the whole program less half of the smaller of the two parts.

One layer, and four in a row. With one, two micro-batches hide at most the half of the communication that runs between the first
dispatch and the last combine: `least_us` is what the parts of half of the tokens allow, measured alone.

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

import ferry
import torch
import torch.distributed as dist
from graph_times import ON_GPU, QUICK_ROUNDS, ROUNDS, Recorded, gathered, in_turns, medians, quick_times, synchronize
from grouped_experts import GroupedExperts
from overlap_layer import HIDDEN, MOST_INNER, Layer, choose_inner
from overlap_programs import PHASES, SHARED, least_time, variants, whole
from step_timeline import Timelines, step_times

RATIO = 0.84  # of the experts' time to that of the communication
LAYERS = (1, 4) if ON_GPU else (1, 2)
LIMITS = (0, 16, 24, 32, 48) if ON_GPU else (0,)  # thread blocks of calls under experts; 0: half of the GPU


def measure_shape(group, device, weights, tokens, experts, top_k, found, save):
    layer = Layer(group, device, tokens, experts, top_k, weights)
    found |= {"tokens": tokens, "experts": experts, "top_k": top_k, "hidden": HIDDEN, "programs": []}
    layer.run_experts(layer.whole.dispatch(*layer.inputs))  # compiles the kernels
    layer.fixed = True
    communication = quick_times({"of": layer.record(whole(1), layer.whole)}, 3 * QUICK_ROUNDS)["of"]
    layer.fixed = None
    inner, alone, tried = choose_inner(layer, RATIO * communication)
    found |= {"communication_us": communication, "experts_us": alone, "inner": inner, "experts_us_by_inner": tried,
              "within_20_percent": bool(abs(alone - communication) <= 0.2 * max(alone, communication))}
    found["experts_error"] = layer.check_experts()
    found["half_us"] = halves = {blocks: layer.half_parts(blocks) for blocks in LIMITS}
    layer.scale_weights()
    save()
    for layers in LAYERS:
        found["programs"].append({"layers": layers})
        measure_program(layer, layers, min(communication, alone), halves, found["programs"][-1])
        save()
    return layer


def measure_program(layer, layers, smaller, halves, found):
    """Whole and in micro-batches, in every variant, and the best ones against the whole in turns."""
    graphs = {"whole": layer.record(whole(layers), layer.whole)}
    if layers == 1:
        graphs["by hand"] = Recorded(layer.by_hand)
    split = {name: layer.record(program, layer.halves, spared) for name, (program, spared) in variants(layers, LIMITS).items()}
    synchronize()
    for graph in (*graphs.values(), *split.values()):
        graph.again()
    synchronize()
    expected = graphs["whole"].result.clone()
    found["differing"] = [name for name, graph in {**graphs, **split}.items()
                          if not all(gathered(torch.equal(graph.result.view(torch.int16), expected.view(torch.int16))))]
    found["finite"] = all(gathered(bool(expected.isfinite().all())))
    found["quick_us"] = quick = quick_times(split)
    found["least_us"] = {blocks: round(least_time(parts["dispatch"], parts["experts"], parts["combine"], layers), 2)
                         for blocks, parts in halves.items()}
    found["best"] = best = min(quick, key=quick.get)
    found["best_of_overlap"] = overlap = min((name for name in quick if name.startswith("overlap")), key=quick.get)
    graphs |= {"overlap(2)": split[overlap], "best": split[best]}
    times = in_turns({name: graph.again for name, graph in graphs.items()}, ROUNDS)
    found["graph_us"] = final = medians(times)
    found["rounds_us"] = {name: [round(time, 1) for time in of_rounds] for name, of_rounds in times.items()}
    allowed = final["whole"] - 0.5 * layers * smaller
    found |= {"allowed_us": round(allowed, 2), "reached": final["best"] <= allowed and not found["differing"],
              "hidden_part_of_the_smaller": round((final["whole"] - final["best"]) / (layers * smaller), 3)}
    # The evaluator's own time: a graph holds the same work as that of the calls by hand; without one it is the host's.
    if layers == 1:
        found["own_us_in_a_graph"] = round(final["whole"] - final["by hand"], 2)


def own_time(layer):
    """Microseconds that the evaluator takes for a step on the host, without a graph."""
    layer.spare(0)
    evaluator = layer.evaluator(whole(1), layer.whole)
    steps = len(evaluator.program.steps)

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


def shared_times(layer):
    """Microseconds of the layer with shared experts between the phases of dispatch, and of its parts alone: together they take less
    than one after the other."""
    layer.spare(0)
    x = layer.inputs[0]
    times = quick_times({"program": layer.record(SHARED, layer.whole), "without shared experts": layer.record(PHASES, layer.whole),
                         "shared experts": Recorded(lambda: x @ layer.shared)}, 3 * QUICK_ROUNDS)
    return times | {"less_than_the_sum": times["program"] < times["without shared experts"] + times["shared experts"]}


def record_timelines(layer, found, timelines):
    layer.spare(0)
    shared = layer.evaluator(SHARED, layer.whole)
    runs = step_times(shared, layer.inputs, 20 if ON_GPU else 2)
    layer.whole.synchronize()
    between = True  # whether the shared experts always ran between the phases
    for steps in runs:
        at = {name.partition(" ")[0]: (begin, end) for name, begin, end in steps}
        between &= at["shared"][0] >= at["sent"][1] and at["shared"][1] <= at["rows"][0]
    found["shared_experts_between_the_phases"] = all(gathered(between))
    timelines.add("shared experts, steps", [(*step, 0) for step in runs[-1]])
    timelines.add_kernels("shared experts, kernels", shared, layer.inputs, found)
    for of_program in found["programs"]:
        layers, best = of_program["layers"], of_program["best"]
        program, spared = variants(layers, LIMITS)[best]
        layer.spare(spared)
        timelines.add_kernels(f"{layers} layers, {best}, kernels", layer.evaluator(program, layer.halves), layer.inputs, found)


def run_rank(rank, ranks, folder, given):
    faulthandler.dump_traceback_later(given.seconds, exit=True)
    device = torch.device("cuda", rank) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if ON_GPU else "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    group, record, timelines = ferry.Group.torch(), {"seconds": {}, "shapes": []}, Timelines()
    start = time.perf_counter()

    def save():
        if rank == 0 and given.json:
            pathlib.Path(given.json).write_text(json.dumps(record, indent=1))
        if rank == 0 and given.timeline and timelines.events:
            pathlib.Path(given.timeline).write_text(timelines.text())

    record |= {"ranks": ranks, "device": torch.cuda.get_device_name() if ON_GPU else "cpu", "torch": torch.__version__,
               "format": "fp8", "combine_type": "bf16", "target": "whole - 0.5 x smaller part"}
    for tokens in given.tokens:
        for experts, top_k in given.shapes:
            weights = GroupedExperts(experts // ranks, HIDDEN, MOST_INNER, device, seed=rank)
            found = {}
            record["shapes"].append(found)
            layer = measure_shape(group, device, weights, tokens, experts, top_k, found, save)
            if len(record["shapes"]) == 1:
                found["own_us_a_step_eager_python"] = own_time(layer)
                found["shared_us"] = shared_times(layer)
                save()
                record_timelines(layer, found, timelines)
            record["seconds"][f"top-{top_k} of {experts}, {tokens}"] = round(time.perf_counter() - start, 1)
            save()
            if rank == 0:
                report_shape(found)
            synchronize()
            del layer, weights
            if ON_GPU:
                torch.cuda.empty_cache()
    if rank == 0:
        first = record["shapes"][0]
        print(f"evaluator: {first['programs'][0]['own_us_in_a_graph']} us in a graph, {first['own_us_a_step_eager_python']} us a step "
              f"without (Python); shared experts between the phases: {first['shared_experts_between_the_phases']}, "
              f"{json.dumps(first['shared_us'])}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def report_shape(found):
    print(f"{found['tokens']:,} tokens, top-{found['top_k']} of {found['experts']}, {found['inner']} inner columns: communication "
          f"{found['communication_us']:.0f} us, experts {found['experts_us']:.0f} us; halves {json.dumps(found['half_us'])}")
    for of_program in found["programs"]:
        times = of_program["graph_us"]
        print(f"  {of_program['layers']} layers: whole {times['whole']:.0f} us, overlap(2) {times['overlap(2)']:.0f} us, best "
              f"{times['best']:.0f} us ({of_program['best']}), least {json.dumps(of_program['least_us'])}, allowed "
              f"{of_program['allowed_us']:.0f} us: {'reached' if of_program['reached'] else 'missed'}; "
              f"with other bytes: {of_program['differing'] or 'none'}", flush=True)
        print(f"    {json.dumps(of_program['quick_us'])}", flush=True)


def shape_of(text):
    experts, _, top_k = text.partition("/")
    return int(experts), int(top_k)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the measurements")
    parser.add_argument("--timeline", help="file for the timelines, in Chrome trace format")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 2048] if ON_GPU else [8], help="tokens of a rank")
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=[(16, 1), (16, 2), (64, 8)] if ON_GPU else [(4, 2)],
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
