"""Balances the experts of a routing trace, and again when the load has moved.

    python examples/balance.py [TRACE]       # default: a synthesised trace of 256 experts
"""

import sys

import ferry

RANKS, SLOTS = 32, 9  # 288 slots for 256 experts


def unevenness(trace, layer, placement):
    """Routes to the busiest rank over the mean of all ranks."""
    routes = trace.rank_counts(layer, placement)
    return routes.max() / routes.mean()


def main():
    trace = ferry.open_trace(sys.argv[1] if len(sys.argv) > 1 else "synth:prefill:tokens=8192,layers=2,seed=5")
    blocks = ferry.Placement.blocks(trace.experts, RANKS)
    before, after = (ferry.balance([trace.expert_counts(layer)], RANKS, SLOTS)[0] for layer in (0, 1))
    moved = ferry.balance([trace.expert_counts(1)], RANKS, SLOTS, earlier=[before])[0]

    print("layer 0, blocks of neighbouring experts:", f"{unevenness(trace, 0, blocks):.3f}")
    print("layer 0, balanced:                      ", f"{unevenness(trace, 0, before):.3f}")
    print("replicas:                               ", before.total_replicas - trace.experts, "more than experts")
    print("layer 1, placement of layer 0:          ", f"{unevenness(trace, 1, before):.3f}")
    print("layer 1, balanced anew:                 ", f"{unevenness(trace, 1, after):.3f},", ferry.moved_experts(before, after), "experts moved")
    print("layer 1, balanced from layer 0:         ", f"{unevenness(trace, 1, moved):.3f},", ferry.moved_experts(before, moved), "experts moved")


if __name__ == "__main__":
    main()
