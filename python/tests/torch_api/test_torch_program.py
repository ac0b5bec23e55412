"""Programs with tensors, one process for each rank; on GPUs also captured whole in a CUDA graph."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ferry
from oracle import bf16, partial_sums, random_step
from torch_processes import GPUS, RANKS, bits, run, tensor

HIDDEN, MOST, EXPERTS, TOP_K = 512, 40, 8 * RANKS, 4
LAYER = ferry.Program("""
    program layer
    input x: tokens
    input ids: ids
    input weights: weights
    rows = dispatch(x, ids, weights)
    outputs: outputs = call experts(rows)
    y = combine(outputs, rows, rows)
    output y
""")


GATHERED = ferry.Program("""
    program gathered
    input x: tokens
    all = all_gather_v(x)
    part: tokens = call twice(all)
    y = reduce_scatter_v(part, x)
    output y
""")


def inputs(rng, rank, device):
    step = random_step(rng, RANKS, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, most=MOST, dtype=bf16, ids=np.int64)
    expected = partial_sums(step, rank, lambda r, t, k: step.tokens[r][t].astype(np.float32)).astype(bf16).tobytes()
    return [tensor(array[rank], device) for array in (step.tokens, step.ids, step.weights)], expected


def exchange_of(device, lanes):
    return ferry.Exchange(ferry.Group.torch(), experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=MOST, lanes=lanes,
                          backend="cuda" if device.type == "cuda" else "cpu")


def rows_as_they_are(rows):
    return rows.data


def check_micro_batches(rank, device, rng):
    given, expected = inputs(rng, rank, device)
    for batches in (1, 2, 3):
        exchange = exchange_of(device, batches)
        layer = ferry.Evaluator(LAYER.overlap(batches), exchange, {"experts": rows_as_they_are})
        for _ in range(2):
            (y,) = layer.run(*given)
            for lane in range(batches):
                exchange.synchronize(lane)
            assert y.device == device and bits(y) == expected


def check_failing_function(rank, device, rng):
    given, expected = inputs(rng, rank, device)
    exchange, fails = exchange_of(device, 2), False

    def experts(rows):
        if fails:
            raise LookupError("no such expert")
        return rows.data

    layer = ferry.Evaluator(LAYER.overlap(2), exchange, {"experts": experts})

    def run_to_the_end():
        (y,) = layer.run(*given)
        for lane in range(2):
            exchange.synchronize(lane)
        return y

    assert bits(run_to_the_end()) == expected
    fails = rank == 1
    with pytest.raises(LookupError if fails else ferry.UsageError, match="no such expert"):
        run_to_the_end()
    fails = False
    for lane in range(2):  # on GPUs the refusals of this rank's own calls end on the device
        try:
            exchange.synchronize(lane)
        except ferry.UsageError as error:
            assert "no such expert" in str(error)
    assert bits(run_to_the_end()) == expected


# On GPUs the function gets as many rows as there is room for.
def check_gathered_rows(rank, device, rng):
    (x, *_), _ = inputs(rng, rank, device)
    expected = torch.zeros(x.shape, device=device)
    for _ in range(RANKS):
        expected += 2 * x.float()
    for batches in (1, 2):
        exchange = exchange_of(device, batches)
        layer = ferry.Evaluator(GATHERED.overlap(batches), exchange, {"twice": lambda rows: 2 * rows})
        (y,) = layer.run(x)
        for lane in range(batches):
            exchange.synchronize(lane)
        assert y.device == device and bits(y) == bits(expected.bfloat16())


def check_all(rank, device, rng):  # starting processes with PyTorch takes most of the time
    check_micro_batches(rank, device, rng)
    check_failing_function(rank, device, rng)
    check_gathered_rows(rank, device, rng)


def test_micro_batches_and_a_function_that_fails(rng):
    run(check_all, rng)


def check_capture(rank, device, rng):
    given, expected = inputs(rng, rank, device)
    layer = ferry.Evaluator(LAYER.overlap(2), exchange_of(device, 2), {"experts": rows_as_they_are})
    layer.run(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        (y,) = layer.run(*given)
    # Processes that share a GPU take turns of milliseconds, so that a replay takes tens of them.
    for replays in (1, 10_000 if GPUS >= RANKS else 100):
        y.fill_(float("nan"))
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
        assert bits(y) == expected


@pytest.mark.skipif(not GPUS, reason="no GPU here")
def test_a_program_is_captured_whole(rng):
    run(check_capture, rng)
