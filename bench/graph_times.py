"""Times of calls that all ranks make together: as CUDA graphs, of the slowest rank. Without a GPU the calls run as they are."""

import statistics
import time

import torch
import torch.distributed as dist

ON_GPU = torch.cuda.is_available()
QUICK_ROUNDS, ROUNDS, REPLAYS = (5, 31, 5) if ON_GPU else (1, 1, 1)


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


def quick_times(graphs, rounds=QUICK_ROUNDS):
    return medians(in_turns({name: graph.again for name, graph in graphs.items()}, rounds))
