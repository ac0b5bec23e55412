"""A rank's exchanges, experts and inputs for program_overlap.py."""

import ferry
import torch
import torch.distributed as dist
from graph_times import ON_GPU, Recorded, gathered, quick_times
from grouped_experts import STEP

HIDDEN, MOST_INNER = (7168, 1024) if ON_GPU else (256, 256)


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

    def buffers_of(self, rows):
        key = rows.data.data_ptr()
        if key not in self._buffers:  # before any capture
            capacity = rows.data.shape[0]
            self._buffers[key] = (torch.empty(capacity * MOST_INNER, dtype=torch.bfloat16, device=rows.data.device),
                                  torch.empty(capacity, HIDDEN, dtype=torch.bfloat16, device=rows.data.device))
        return self._buffers[key]

    def run_experts(self, rows):
        inner_rows, out = self.buffers_of(rows)
        return out if self.fixed else self.experts.run(rows, inner_rows, out, self.blocks)

    def spare(self, blocks):
        """The experts leave so many SMs to others from now on."""
        self.blocks = max(1, self.all_blocks - blocks)

    def evaluator(self, program, exchange):
        functions = {"experts": self.run_experts, "shared_experts": lambda x: x @ self.shared, "add": lambda a, b: a + b}
        return ferry.Evaluator(program, exchange, functions)

    def record(self, program, exchange, spared=0):
        """The program as a graph; `spared`: SMs that the experts leave to others."""
        self.spare(spared)
        layer = self.evaluator(program, exchange)
        return Recorded(lambda: layer.run(*self.inputs)[0])

    def by_hand(self):
        x, ids, weights = self.inputs
        rows = self.whole.dispatch(x, ids, weights)
        return self.whole.combine(self.run_experts(rows), rows.plan, row_weights=rows.weight)

    def scale_weights(self):
        """So that the result of a layer is as large as its input, and layers in a row neither vanish nor grow."""
        size = self.by_hand().float().pow(2).mean().sqrt().item()
        self.inputs[2].div_(max(sum(gathered(size)) / dist.get_world_size(), 1e-9))

    def half_parts(self, blocks):
        """Microseconds of dispatch, experts and combine of half of the tokens, alone, with at most so many thread blocks in a call
        and as many SMs spared by the experts; 0: the share of a lane, and none."""
        half = [each[:self.tokens // 2] for each in self.inputs]
        rows, others = (self.halves.dispatch(*half, lane=lane) for lane in (0, 1))
        self.spare(blocks)
        self.buffers_of(rows)
        outputs = self.run_experts(others)
        graphs = {"experts": Recorded(lambda: self.run_experts(rows)),
                  "combine": Recorded(lambda: self.halves.combine(outputs, others.plan, row_weights=others.weight, lane=1, sm_limit=blocks)),
                  "dispatch": Recorded(lambda: self.halves.dispatch(*half, lane=0, sm_limit=blocks))}
        self.spare(0)
        return quick_times(graphs)

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


def choose_inner(layer, wanted_us):
    """Sets the inner columns for which experts take about `wanted_us`. Returns them, their time, and what was tried."""
    rows = layer.whole.dispatch(*layer.inputs)
    layer.buffers_of(rows)
    tried = {}

    def measure(inner):
        layer.experts.set_inner(inner)
        tried[inner] = quick_times({"experts": Recorded(lambda: layer.run_experts(rows))})["experts"]

    def distance(inner):
        return abs(tried[inner] - wanted_us)

    for inner in (2 * STEP, MOST_INNER // 2):
        measure(inner)
    for _ in range(4):
        (low, high) = sorted(sorted(tried, key=distance)[:2])
        slope = (tried[high] - tried[low]) / (high - low)
        wanted = low + (wanted_us - tried[low]) / slope if slope > 0 else low
        inner = min(max(round(wanted / STEP), 1), MOST_INNER // STEP) * STEP
        if inner in tried:
            break
        measure(inner)
    best = min(tried, key=distance)
    layer.experts.set_inner(best)
    return best, tried[best], tried
