"""What a grouped matrix product loses when it leaves SMs to communication: the experts of a layer, bf16, on one GPU.

Each shape is one rank's share of a layer under uniform routing. Both products of its experts are timed in Triton with 0 to 32 SMs
left out or held by another kernel, beside torch's grouped product and a loop of products, in rounds in which all take turns:

- persistent: 132 - s thread blocks, s SMs idle
- persistent, held: the same thread blocks while another kernel holds s SMs
- tiles, held: one thread block for each tile, so that the product takes the SMs that are free
- torch, held; loop, held: torch._grouped_mm and a torch.mm for each group, which know nothing of the SMs that are held
- by index: as persistent, but the first product reads each token's row by its index instead of a copy of it for each route

Without a GPU, set TRITON_INTERPRET=1: the products are compared with torch at small shapes, and nothing is timed.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = "TRITON_INTERPRET" in os.environ
DEVICE = "cpu" if INTERPRETED else "cuda"
SPARED = (0, 8, 16, 24, 32)  # SMs
SHAPES = (7168, 2048, 256, 4096), (4096, 1536, 128, 4096), (2048, 768, 128, 8192), (7168, 2048, 256, 1024)
ROUNDS = 21
HELD_NS = 2_000_000_000  # the longest that an SM is held
SM_SHARED_BYTES = 228 * 1024


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    experts: int
    top_k: int
    tokens: int  # of each rank
    ranks: int

    def __str__(self):
        return (f"hidden {self.hidden}, inner {self.inner}, top-{self.top_k} of {self.experts}, "
                f"{self.tokens} tokens on each of {self.ranks} ranks")


@dataclass(frozen=True)
class Tiling:
    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    flatten: bool

    def __str__(self):
        return f"{self.rows}x{self.columns}x{self.depth}, {self.stages} stages, {self.warps} warps{', flattened' * self.flatten}"


TILINGS = (Tiling(128, 256, 64, 3, 8, False), Tiling(128, 256, 64, 3, 8, True), Tiling(128, 128, 64, 4, 8, True),
           Tiling(128, 128, 64, 3, 4, False), Tiling(64, 256, 64, 4, 4, False), Tiling(64, 128, 128, 3, 4, False))


@triton.jit(do_not_specialize=["blocks", "row_capacity"])
def product_kernel(rows, index, weights, out, block_group, blocks, row_capacity, depth, columns,
                   INDEXED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FLATTEN: tl.constexpr,
                   INTERPRETED: tl.constexpr):
    """out[p] = row of position p @ weights[group of p].T; every block of BM positions belongs to one group.

    `rows` is a descriptor of a row for each position or, INDEXED, the address of rows that `index` [positions] numbers;
    an index of `row_capacity` is padding.
    """
    across = columns // BN
    for tile in tl.range(tl.program_id(0), blocks * across, tl.num_programs(0), flatten=FLATTEN):
        first = tile // across * BM
        column = tile % across * BN
        weight_row = tl.load(block_group + tile // across) * columns + column
        if INDEXED:
            number = tl.load(index + first + tl.arange(0, BM))
            row_at = rows + number[:, None].to(tl.int64) * depth + tl.arange(0, BK)[None, :]
            present = (number < row_capacity)[:, None]
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for at in tl.range(0, depth, BK):
            if INDEXED:
                values = tl.load(row_at + at, mask=present, other=0.0)
            else:
                values = rows.load([first, at])
            factors = weights.load([weight_row, at])
            if INTERPRETED:  # Triton's interpreter multiplies fp32 only
                values = values.to(tl.float32)
                factors = factors.to(tl.float32)
            sums = tl.dot(values, factors.T, sums)
        out.store([first, column], sums.to(tl.bfloat16))


@triton.jit
def hold_kernel(arrived, release, values, result, longest_ns, SIZE: tl.constexpr):
    """Holds an SM until `release` is set. The product is there for its shared memory, which leaves no room for other blocks."""
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    some = tl.arange(0, 64)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(values + some), tl.load(values + at))
    tl.store(result + some, product)
    tl.atomic_add(arrived, 1)
    end = globaltimer() + longest_ns
    waiting = tl.load(release, volatile=True) == 0
    while waiting:
        waiting = (tl.load(release, volatile=True) == 0) & (globaltimer() < end)


@triton.jit
def await_kernel(arrived, wanted, longest_ns):
    end = globaltimer() + longest_ns
    waiting = tl.load(arrived, volatile=True) < wanted
    while waiting:
        waiting = (tl.load(arrived, volatile=True) < wanted) & (globaltimer() < end)


class Routing:
    """The routes of all ranks to the experts of the first rank."""

    def __init__(self, shape, generator):
        self.groups = shape.experts // shape.ranks
        self.source_rows = shape.ranks * shape.tokens
        ids = torch.rand(self.source_rows, shape.experts, generator=generator, device=DEVICE).topk(shape.top_k).indices
        token, slot = (ids < self.groups).nonzero(as_tuple=True)
        expert, order = ids[token, slot].sort(stable=True)
        self.token, self.expert = token[order].int(), expert
        self.counts = torch.bincount(expert, minlength=self.groups)
        self.ends = self.counts.cumsum(0).int()
        self.starts = [0, *self.ends.tolist()]
        self.routes = len(token)

    def blocks_of(self, size):
        """Positions when each group starts at a multiple of `size`: (position of each route, index, block_group)."""
        blocks = (self.counts + size - 1) // size
        shift = (blocks.cumsum(0) - blocks) * size - (self.ends - self.counts)
        position = torch.arange(self.routes, device=DEVICE) + shift[self.expert]
        index = torch.full((int(blocks.sum()) * size,), self.source_rows, dtype=torch.int32, device=DEVICE)
        index[position] = self.token
        return position, index, torch.repeat_interleave(torch.arange(self.groups, device=DEVICE), blocks).int()


class Product:
    """One product of all experts of a rank: [rows, depth] times [groups, columns, depth], transposed."""

    def __init__(self, routing, rows, columns, by_source, generator):
        """`rows`: by_source one for each source row, which positions index; else one for each route."""
        self.routing, self.depth, self.columns = routing, rows.shape[1], columns
        self.by_source, self.source = by_source, rows
        self.packed = rows[routing.token] if by_source else rows
        self.weights = torch.empty(routing.groups, columns, self.depth, dtype=torch.bfloat16, device=DEVICE)
        self.weights.normal_(0, self.depth ** -0.5, generator=generator)
        self.expected = torch.empty(routing.routes, columns, dtype=torch.bfloat16, device=DEVICE)
        self.loop()
        self.aligned = {}

    def loop(self):
        starts = self.routing.starts
        for group, (first, end) in enumerate(zip(starts, starts[1:])):
            if first < end:
                torch.mm(self.packed[first:end], self.weights[group].T, out=self.expected[first:end])

    def torch_grouped(self):
        return torch._grouped_mm(self.packed, self.weights.transpose(1, 2), offs=self.routing.ends)

    def triton(self, tiling, thread_blocks, indexed=False):
        """Enqueues the product with `thread_blocks` thread blocks, None: one for each tile. Returns (kernel, error of its rows)."""
        position, index, block_group, rows, out = self._aligned(tiling.rows)
        flat = self.weights.view(-1, self.depth)
        tiles = len(block_group) * (self.columns // tiling.columns)
        kernel = product_kernel[(min(thread_blocks or tiles, tiles),)](
            self.source if indexed else TensorDescriptor.from_tensor(rows, [tiling.rows, tiling.depth]), index,
            TensorDescriptor.from_tensor(flat, [tiling.columns, tiling.depth]),
            TensorDescriptor.from_tensor(out, [tiling.rows, tiling.columns]), block_group, len(block_group), len(self.source),
            self.depth, self.columns, INDEXED=indexed, BM=tiling.rows, BN=tiling.columns, BK=tiling.depth,
            FLATTEN=tiling.flatten, INTERPRETED=INTERPRETED, num_warps=tiling.warps, num_stages=tiling.stages)
        return kernel, lambda: self.error(out[position])

    def error(self, result):
        """The largest difference from the loop's result, relative to its largest value."""
        difference = max((a.float() - b.float()).abs().max().item() for a, b in zip(result.split(4096), self.expected.split(4096)))
        return difference / self.expected.abs().max().item()

    def _aligned(self, size):
        if size not in self.aligned:
            position, index, block_group = self.routing.blocks_of(size)
            rows = torch.zeros(len(index), self.depth, dtype=torch.bfloat16, device=DEVICE)
            rows[position] = self.packed
            out = torch.empty(len(index), self.columns, dtype=torch.bfloat16, device=DEVICE)
            self.aligned[size] = position, index, block_group, rows, out
        return self.aligned[size]


class Holder:
    """Times calls while another kernel holds some SMs."""

    SIZE = 256

    def __init__(self):
        self.side = torch.cuda.Stream(priority=-1)
        self.state = torch.zeros(2, dtype=torch.int32, device=DEVICE)
        self.values = torch.zeros(self.SIZE, self.SIZE, dtype=torch.bfloat16, device=DEVICE)
        self.result = torch.empty(64, self.SIZE, device=DEVICE)
        self.microseconds(lambda: None, 1)  # loads the kernels, for which a launch may wait until no SM is held

    def _hold(self, sms):
        arrived, release = self.state[:1], self.state[1:]
        self.state.zero_()
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            kernel = hold_kernel[(sms,)](arrived, release, self.values, self.result, HELD_NS, SIZE=self.SIZE, num_warps=8)
        await_kernel[(1,)](arrived, sms, HELD_NS, num_warps=1)
        self.shared_bytes = kernel.metadata.shared

    def microseconds(self, call, sms):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if sms:
            self._hold(sms)
        torch.cuda._sleep(3_000_000)  # while the host enqueues
        begin.record()
        call()
        end.record()
        self.state.fill_(1)
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1000


def chosen(product, holder, thread_blocks, indexed=False):
    """The fastest tiling for a number of thread blocks, with all that was tried."""
    tried = {}
    for tiling in TILINGS:
        if product.columns % tiling.columns or product.depth % tiling.depth:
            continue
        try:
            kernel, error_of = product.triton(tiling, thread_blocks, indexed)
            error = error_of()
            if error > 0.01:
                raise SystemExit(f"error: {tiling}: the largest error is {error:.3f} of the largest value")
            if kernel.metadata.shared + holder.shared_bytes <= SM_SHARED_BYTES:
                continue  # its thread blocks would fit beside those that hold an SM
            times = [holder.microseconds(lambda t=tiling: product.triton(t, thread_blocks, indexed), 0) for _ in range(3)]
            tried[tiling] = statistics.median(times)
        except (triton.TritonError, RuntimeError) as error:  # does not fit, or this Triton cannot compile it
            print(f"    {tiling}: {type(error).__name__}: {str(error).splitlines()[0]}")
    best = min(tried, key=tried.get)
    return best, {str(tiling): round(us, 1) for tiling, us in tried.items()}


def measure(product, holder):
    """{what: {SMs left out or held: times}}, and the tilings."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    tilings = {"persistent": chosen(product, holder, sms), "tiles": chosen(product, holder, None)}
    persistent, tiles = tilings["persistent"][0], tilings["tiles"][0]
    calls = {}
    for spared in SPARED:
        calls["persistent", spared] = 0, lambda s=spared: product.triton(persistent, sms - s)
        if spared:
            calls["persistent, held", spared] = spared, calls["persistent", spared][1]
        calls["tiles, held", spared] = spared, lambda: product.triton(tiles, None)
        if hasattr(torch, "_grouped_mm"):
            calls["torch, held", spared] = spared, product.torch_grouped
        calls["loop, held", spared] = spared, product.loop
    if product.by_source:
        tilings["by index"] = chosen(product, holder, sms, True)
        for spared in SPARED:
            calls["by index", spared] = 0, lambda s=spared: product.triton(tilings["by index"][0], sms - s, True)
    times = {key: [] for key in calls}
    for round_number in range(ROUNDS + 1):
        for key, (held, call) in calls.items():
            us = holder.microseconds(call, held)
            if round_number:  # the first warms up
                times[key].append(us)
    return times, {what: {"chosen": str(best), "tried_us": tried} for what, (best, tried) in tilings.items()}


def show(name, product, times, tilings):
    medians = {key: statistics.median(each) for key, each in times.items()}
    flops = 2 * product.routing.routes * product.depth * product.columns
    print(f"\n  {name}: {product.routing.routes} rows x {product.depth} x {product.columns}, {product.routing.groups} groups")
    for what, tiling in tilings.items():
        print(f"    {what}: {tiling['chosen']}")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    print(f"    {'us (to its time with all SMs)':30}" + "".join(f"{spared:>8} SMs   " for spared in SPARED) + "TFLOP/s")
    print(f"    {'ideal':30}" + "".join(f"{'':8}({sms / (sms - spared):5.3f})" for spared in SPARED))
    for what in dict.fromkeys(what for what, _ in times):
        whole = medians[what.replace("persistent, held", "persistent"), 0]
        cells = (f"{medians[what, s]:8.0f}({medians[what, s] / whole:5.3f})" if (what, s) in medians else " " * 15 for s in SPARED)
        print(f"    {what:30}" + "".join(cells) + f"{flops / whole / 1e6:8.0f}", flush=True)
    return {"product": name, "rows": product.routing.routes, "depth": product.depth, "columns": product.columns,
            "groups": product.routing.groups, "tilings": tilings,
            "times": [{"what": what, "sms": spared, "median_us": round(medians[what, spared], 1), "least_us": round(min(each), 1),
                       "most_us": round(max(each), 1), "slowdown": round(medians[what, spared] / medians[
                           what.replace("persistent, held", "persistent"), 0], 4)} for (what, spared), each in times.items()]}


def products_of(shape, generator):
    """The two products of the experts; the second reads what an activation made of the first's result."""
    routing = Routing(shape, generator)
    rows = torch.empty(routing.source_rows, shape.hidden, dtype=torch.bfloat16, device=DEVICE).normal_(generator=generator)
    yield "gate and up", Product(routing, rows, 2 * shape.inner, True, generator)
    inner = torch.empty(routing.routes, shape.inner, dtype=torch.bfloat16, device=DEVICE).normal_(generator=generator)
    yield "down", Product(routing, inner, shape.hidden, False, generator)


def check():
    """Compares the products with torch at small shapes."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    for shape in (Shape(128, 64, 8, 2, 40, 2), Shape(256, 128, 4, 3, 90, 1), Shape(128, 64, 16, 1, 3, 2)):
        tiling = Tiling(16, 64, 64, 2, 4, True)
        for name, product in products_of(shape, generator):
            for indexed in (False, True)[:1 + product.by_source]:
                for thread_blocks in (3, None):
                    error = product.triton(tiling, thread_blocks, indexed)[1]()
                    print(f"{shape}; {name}{', by index' * indexed}, {thread_blocks or 'all'} thread blocks: error {error:.4f}")
                    if not error < 0.01:
                        raise SystemExit("error: the products differ")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the measurements")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the layer (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=120, help="no shape begins later (default %(default)s)")
    arguments = parser.parse_args()
    if INTERPRETED:
        return check()
    if not torch.cuda.is_available():
        raise SystemExit("error: this measurement needs a GPU; TRITON_INTERPRET=1 compares the products without one")
    began = time.monotonic()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, Triton {triton.__version__}, medians of {ROUNDS} rounds")
    holder, generator, records = Holder(), torch.Generator(DEVICE).manual_seed(1), []
    for hidden, inner, experts, tokens in SHAPES:
        shape = Shape(hidden, inner, experts, 8, tokens, arguments.ranks)
        print(f"\n{shape}")
        if time.monotonic() - began > arguments.seconds:
            print("  left out: out of time")
            continue
        for name, product in products_of(shape, generator):
            records.append({**vars(shape), **show(name, product, *measure(product, holder))})
            del product
        print(f"  {time.monotonic() - began:.0f} s so far", flush=True)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump({"device": device, "torch": torch.__version__, "triton": triton.__version__, "rounds": ROUNDS,
                           "products": records}, file, indent=1)


if __name__ == "__main__":
    main()
