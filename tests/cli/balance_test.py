"""Load balance inside a GPU: an expert with ten times the mean load costs no more than the bytes of the busiest rank.

The lower bound counts bytes that cross NVLink. Between two GPUs a token crosses it once and is then stored as four rows, so that uniform routing itself
takes 1.3 times the bound: there the busy expert may cost 5 % more, relative to its bound, than uniform routing does."""

import glob
import json
import os
import random
import struct
import unittest

from program import ProgramTest

GPUS = len(glob.glob("/dev/nvidia[0-9]*"))
EXPERTS, TOP_K, TOKENS, HOT = 256, 8, 4096, 10


def write_ids(path, rows):
    """Writes a .npy file of bytes, [tokens, top_k]."""
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({len(rows)}, {len(rows[0])}), }}"
    text += " " * (63 - (len(text) + 10) % 64) + "\n"
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + bytes(id for row in rows for id in row))


def hot_rows(tokens, generator):
    """Expert 0 is chosen HOT times as often as the mean, all others equally often."""
    rows = []
    for _ in range(tokens):
        hot = generator.random() < HOT * TOP_K / EXPERTS
        rows.append(([0] if hot else []) + generator.sample(range(1, EXPERTS), TOP_K - hot))
    return rows


class BalanceTest(ProgramTest):
    def trace(self, tokens):
        """The path of a trace with one hot expert, and its rows."""
        seed = int(os.environ.get("FERRY_SEED", random.randrange(2**32)))
        print(f"FERRY_SEED={seed}", flush=True)
        path, rows = self.path("hot.ids.npy"), hot_rows(tokens, random.Random(seed))
        write_ids(path, rows)
        return path, rows

    def test_the_trace_has_one_hot_expert(self):
        path, rows = self.trace(2000)
        point = json.loads(self.succeed("bench", "--trace", path, "--tokens", "500", "--ranks", "4", "--hidden", "64",
                                        "--repetitions", "1", "--json", "-"))["points"][0]
        self.assertEqual((point["experts"], point["top_k"]), (EXPERTS, TOP_K))
        ids = [id for row in rows for id in row]
        # 0.0013 is the standard deviation of the share of expert 0.
        self.assertAlmostEqual(ids.count(0) / len(ids), HOT / EXPERTS, delta=6 * 0.0013)
        of_rank = [sum(id // (EXPERTS // 4) == rank for id in ids) for rank in range(4)]
        self.assertAlmostEqual(point["busiest_share"], max(of_rank) / len(ids))

    @unittest.skipIf(GPUS < 2, f"needs two GPUs, there are {GPUS}")
    def test_a_hot_expert_costs_no_more_than_its_bytes(self):
        ranks = min(GPUS, 8)
        hot = self.ratios(ranks, "--trace", self.trace(ranks * TOKENS)[0])
        bounds = {"dispatch": 1.3, "combine": 1.3}
        if ranks == 2:
            uniform = self.ratios(ranks, "--trace", "synth:uniform", "--experts", EXPERTS, "--top-k", TOP_K)
            bounds = {work: max(1.3, 1.05 * ratio) for work, ratio in uniform.items()}
        self.assertEqual(hot.keys(), bounds.keys())
        for work, ratio in hot.items():
            self.assertLessEqual(ratio, bounds[work], work)

    def ratios(self, ranks, *routing):
        rows = json.loads(self.succeed("bench", "--backend", "cuda", *routing, "--tokens", TOKENS, "--ranks", ranks, "--json", "-"))["rows"]
        return {row["work"]: row["ratio_to_lower_bound"] for row in rows}


if __name__ == "__main__":
    unittest.main()
