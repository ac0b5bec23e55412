"""ferry.max in every format against loops written from docs/guides/max.md, docs/contract.md and docs/formats.md."""

import numpy as np

import ferry
import ferry.max
from format_loops import FORMATS, TYPES, parts_of_row, received_parts
from random_cases import F, Ranks, each_case, fma, numbers, one_of

# By the scales of experts, and raw parts.
KINDS = [*FORMATS, "fp8*", "mxfp8*", "nvfp4*", "raw:48+16"]


class MaxCase:
    """A dispatch in one format, and a combine of its rows in another order."""

    def __init__(self, draw, name):
        self.name, self.skip = name, bool(draw.random() < 0.25)
        self.step = step = Ranks(draw, repeats=True, same=self.skip)
        self.where, self.lane = step.where(draw), int(draw.integers(2))
        self.hidden = int(one_of(draw, 32, 64, 96, 160, 256))
        self.shared, self.alignment = int(one_of(draw, 0, 0, 1, 2)), int(one_of(draw, 1, 1, 4, 8))
        self.world = int(draw.integers(0, step.ranks + 1)) if self.skip and self.shared else 0
        self.reduction = "partial" if self.skip else one_of(draw, "exact", "exact", "unreduced")
        self.combine_type, self.output_type = one_of(draw, *TYPES), one_of(draw, *TYPES)
        self.result_type = one_of(draw, None, *TYPES)
        self.type_of_tokens = name if name in TYPES else one_of(draw, *TYPES)
        self.tokens = [numbers(draw, (count, self.hidden), TYPES[self.type_of_tokens]) for count in step.counts]
        if self.type_of_tokens != "fp16" and draw.random() < 0.4:  # rows of any size, with blocks of zeros
            for rows in self.tokens:
                rows *= (2.0 ** draw.integers(-120, 120, (len(rows), 1))).astype(rows.dtype)
                rows[draw.random(len(rows)) < 0.5, :32] = 0
        if name.startswith("raw"):
            self.tokens = [(draw.integers(0, 256, (count, 48)).astype(np.uint8), draw.random((count, 4), F)) for count in step.counts]
        if self.skip:
            self.tokens = self.tokens[:1] * step.ranks
        self.scales = draw.uniform(0.01, 1, step.experts + self.shared).astype(F) if name.endswith("*") else None
        self.g = F(2.0 ** draw.uniform(-9, 0)) if name.startswith("nvfp4") and "token" not in name and "*" not in name else None
        self.split, self.earlier = bool(draw.random() < 0.5), bool(draw.random() < 0.3)
        summed = self.reduction != "unreduced"
        self.weights = [draw.standard_normal((count, step.top_k)).astype(F) for count in step.counts] if (
            summed and draw.random() < 0.7 and not (self.skip and self.split)) else None
        result = TYPES[self.result_type or self.output_type]
        self.residual = [numbers(draw, (count, self.hidden), result) for count in step.counts] if summed and draw.random() < 0.4 else None
        self.scale = float(one_of(draw, 1, 1, 0.5, 3.7)) if summed else 1.0
        self.apart = self.shared > 0 and (not summed or bool(draw.random() < 0.3))
        self.seed = int(draw.integers(1 << 31))

    def shared_tokens(self, rank):
        """Tokens whose rows of shared experts are on a rank."""
        count = self.step.counts[rank]
        if self.world == 0:
            return range(count)
        return range(rank * count // self.world, (rank + 1) * count // self.world) if rank < self.world else range(0)

    def groups(self, rank):
        """By group of a rank, the (source rank, token, slot) of its rows."""
        step = self.step
        shared = [[(rank, token, step.top_k + s) for token in self.shared_tokens(rank)] for s in range(self.shared)]
        sources = [rank] if self.skip else range(step.ranks)
        return shared + [[(source, token, slot) for source in sources for token in range(step.counts[source]) for slot in range(step.top_k)
                          if step.ids[source][token, slot] == expert] for expert in step.experts_of(rank)]

    def outputs_of(self, source, token, slot):
        """What the experts return for a row, rounded to the combine type, in fp32; and as it is passed."""
        sent_by = 0 if self.skip else source
        draw = np.random.default_rng([self.seed, sent_by, token, slot])
        row = numbers(draw, (self.hidden,), TYPES[self.output_type])
        return row.astype(TYPES[self.combine_type]).astype(F), row

    def parts_of(self, rank, group, source, token):
        """The bytes of each part of a row."""
        if self.name.startswith("raw"):
            return [part[token].tobytes() for part in self.tokens[source]]
        g = F(1) if self.g is None else self.g
        if self.scales is not None:
            experts = self.step.experts_of(rank)
            g = self.scales[self.step.experts + group if group < self.shared else experts[group - self.shared]]
        return parts_of_row(self.name, self.tokens[source][token], g)

    def check_dispatch(self, received, rank):
        groups, ranks = self.groups(rank), self.step.ranks
        counts = np.array([[sum(row[0] == source for row in group) for source in range(ranks)] for group in groups], np.int32).reshape(-1, ranks)
        assert received.counts.dtype == np.int32 and np.array_equal(received.counts, counts)
        filled = [index for index, group in enumerate(groups) if group]
        starts, at, tiles = {}, 0, [0]
        for index, group in enumerate(groups):
            starts[index] = at
            at += -(-len(group) // self.alignment) * self.alignment
            tiles.append(tiles[-1] + -(-len(group) // 128))
        assert received.row_offsets.tolist() == [starts[index] for index in filled] + [at] and received.row_offsets.dtype == np.uint32
        assert received.expert_ids.tolist() == filled and received.expert_ids.dtype == np.int32
        assert received.expert_usage_stats.tolist() == [max(map(len, groups), default=0), len(filled)]
        info = np.full((at, 2), -1, np.int32)
        for index, group in enumerate(groups):
            for position, (source, token, slot) in enumerate(group):
                row = starts[index] + position
                info[row] = token, slot
                got = received_parts(self.name, received.parts, row, 128 * tiles[index] + position)
                assert got == self.parts_of(rank, index, source, token), (index, position)
        assert np.array_equal(received.src_info, info) and received.src_info.dtype == np.int32
        assert received.output_tokens is received.parts[0]
        for index, part in enumerate(received.parts):
            assert len(part) == (tiles[-1] if "tiles" in self.name and index == 1 else at)
        assert (received.tile_offsets is None) if "tiles" not in self.name else received.tile_offsets.tolist() == tiles
        return starts, groups

    def arrays_of_combine(self, draw, received, starts, groups):
        """Outputs and src_info, with the routed rows of each group and source in another order."""
        rows = np.zeros((len(received.src_info), self.hidden), TYPES[self.output_type])
        info = received.src_info.copy()
        for index, group in enumerate(groups):
            order = list(range(len(group)))
            if index >= self.shared:
                order.sort(key=lambda position: (group[position][0], draw.random()))
            for position, taken in enumerate(order):
                rows[starts[index] + position] = self.outputs_of(*group[taken])[1]
                info[starts[index] + position] = group[taken][1:]
        return rows, info

    def expected(self, rank):
        """(result, shared outputs) of a rank."""
        step, result_type = self.step, TYPES[self.result_type or self.output_type]
        count = step.counts[rank]
        apart = np.zeros((self.shared, count, self.hidden), result_type)
        for s in range(self.shared):
            for token in self.shared_tokens(rank):
                apart[s, token] = self.outputs_of(rank, token, step.top_k + s)[0].astype(result_type)
        shape = (count, step.top_k, self.hidden) if self.reduction == "unreduced" else (count, self.hidden)
        result = np.zeros(shape, result_type)
        for token in range(count):
            a = np.zeros(self.hidden, F)
            for slot in range(step.top_k):
                expert = step.ids[rank][token, slot]
                if expert < 0 or (self.skip and step.owner[expert] != rank):
                    continue
                v = self.outputs_of(rank, token, slot)[0]
                if self.reduction == "unreduced":
                    result[token, slot] = v.astype(result_type)
                else:
                    a = fma(v, 1 if self.weights is None else self.weights[rank][token, slot], a)
            if self.reduction == "unreduced":
                continue
            if self.skip:
                a = F(0) + a.astype(TYPES[self.combine_type]).astype(F)
            for s in range(0 if self.apart else self.shared):
                if token in self.shared_tokens(rank):
                    a = a + self.outputs_of(rank, token, step.top_k + s)[0]
            y = a.astype(result_type).astype(F)
            residual = self.residual[rank][token].astype(F) if self.residual is not None else np.full(self.hidden, F(-0.0))
            result[token] = fma(y, F(self.scale), residual).astype(result_type)
        return result, apart

    def check(self, rank):
        step, me = self.step, rank.index
        settings = {"skip_a2a": True, "allreduce_world_size": self.world} if self.skip else {"reduction": self.reduction}
        exchange = ferry.max.Exchange(rank, experts=step.experts, top_k=step.top_k, hidden=self.hidden, max_tokens=step.most, format=self.name if self.scales is None else self.type_of_tokens,
                                      combine_type=self.combine_type, shared_experts=self.shared, alignment=self.alignment,
                                      placement=step.placement, lanes=1 + self.lane, **settings, **self.where)
        given = {"lane": self.lane} | ({} if self.g is None else {"global_scale": float(self.g)})
        if self.scales is not None:
            given |= {"format": self.name[:-1], "input_scales": self.scales}

        def dispatch():
            if not self.split:
                return exchange.ep_fused_dispatch(self.tokens[me], step.ids[me], **given)
            exchange.ep_dispatch_async(self.tokens[me], step.ids[me], **given)
            return exchange.ep_dispatch_wait(lane=self.lane)

        received = dispatch()
        starts, groups = self.check_dispatch(received, me)
        rows, info = self.arrays_of_combine(np.random.default_rng([self.seed, me]), received, starts, groups)
        arguments = {"lane": self.lane, "router_weights": None if self.weights is None else self.weights[me], "scale": self.scale,
                     "residual": None if self.residual is None else self.residual[me]}
        if self.earlier:  # another dispatch between
            count = step.counts[me] // 2
            tokens = tuple(part[:count] for part in self.tokens[me]) if isinstance(self.tokens[me], tuple) else self.tokens[me][:count]
            exchange.ep_fused_dispatch(tokens, step.ids[me][:count], **given)
            arguments["topk_ids"] = step.ids[me]
        y, apart = self.expected(me)
        if self.result_type is not None:
            arguments["output_tokens"] = np.full(y.shape, 7, y.dtype)
        if self.apart:
            arguments["shared_outputs"] = np.full(apart.shape, 7, apart.dtype)
        if self.split:
            exchange.ep_combine_async(rows, info, received.row_offsets, received.counts, **arguments)
            got = exchange.ep_combine_wait(lane=self.lane)
        else:
            got = exchange.ep_fused_combine(rows, info, received.row_offsets, received.counts, **arguments)
        assert got.dtype == y.dtype and got.shape == y.shape and got.tobytes() == y.tobytes()
        assert not self.apart or arguments["shared_outputs"].tobytes() == apart.tobytes()


def test_every_format_agrees_with_loops(rng):
    for kind, draw in each_case(rng, len(KINDS)):
        case = MaxCase(draw, KINDS[kind])
        case.step.run(case.check)
