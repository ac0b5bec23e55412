"""Runs a routing trace over ranks that are threads, and draws the traffic between ranks and the load of every expert.

    python examples/pictures.py [TRACE] [OUTPUT.svg]       # default: synth:decode, pictures.svg
"""

import sys

import ml_dtypes
import numpy as np

import ferry

RANKS, TOKENS, HIDDEN, STEPS = 8, 64, 128, 4


def run_trace(trace):
    """(tokens between ranks [R, R], routes to experts [E], routes to ranks [R]), summed over all steps."""

    def body(rank):
        exchange = ferry.Exchange(rank, experts=trace.experts, top_k=trace.top_k, hidden=HIDDEN, max_tokens=TOKENS)
        tokens = np.ones((TOKENS, HIDDEN), ml_dtypes.bfloat16)
        between = np.zeros((RANKS, RANKS), np.int64)
        for step in range(STEPS):
            ids, weights = trace.partition(0, rank=rank.index, ranks=RANKS, tokens_per_rank=TOKENS, step=step)
            rows = exchange.dispatch(tokens, ids, weights)
            between += rows.plan.tokens_between  # every rank knows the whole matrix
            exchange.combine(rows.data, rows.plan, row_weights=rows.weight)
        return between, exchange.load_counts()

    between, load = ferry.Group.threads(RANKS).run(body)[0]
    return between, load.experts, load.ranks


def traffic_matrix(between, size=40):
    """A square for each pair of ranks, darker for more tokens."""
    parts = ['<text x="0" y="-12">tokens from rank (down) to rank (across)</text>']
    for (source, destination), count in np.ndenumerate(between):
        x, y, shade = destination * size, source * size, count / between.max()
        parts.append(f'<rect x="{x}" y="{y}" width="{size - 2}" height="{size - 2}" fill="#1f4e79" fill-opacity="{shade:.3f}"/>')
        parts.append(f'<text x="{x + size / 2}" y="{y + size / 2 + 4}" text-anchor="middle" '
                     f'fill="{"white" if shade > 0.5 else "black"}">{count}</text>')
    return "".join(parts), between.shape[1] * size


def bars(title, loads, width, height=120):
    """A bar for each expert or rank, and a line at the mean load."""
    step, most = width / len(loads), loads.max()
    parts = [f'<text x="0" y="-12">{title}: busiest {most / loads.mean():.2f} x the mean</text>']
    for index, load in enumerate(loads):
        h = height * load / most
        parts.append(f'<rect x="{index * step:.2f}" y="{height - h:.2f}" width="{step * 0.8:.2f}" height="{h:.2f}" fill="#c55a11"/>')
    mean = height * (1 - loads.mean() / most)
    parts.append(f'<line x1="0" x2="{width}" y1="{mean:.2f}" y2="{mean:.2f}" stroke="black" stroke-dasharray="4"/>')
    return "".join(parts)


def picture(between, experts, ranks):
    squares, side = traffic_matrix(between)
    rows = [(0, squares), (side + 50, bars("routes to experts", experts, 2 * side)), (side + 220, bars("routes to ranks", ranks, side))]
    charts = "".join(f'<g transform="translate(20, {y + 40})">{part}</g>' for y, part in rows)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * side + 40}" height="{side + 400}" '
            f'font-family="sans-serif" font-size="12">{charts}</svg>\n')


def main():
    name, output = (sys.argv[1:] + ["synth:decode", "pictures.svg"][len(sys.argv) - 1 :])[:2]
    between, experts, ranks = run_trace(ferry.open_trace(name))
    with open(output, "w") as file:
        file.write(picture(between, experts, ranks))
    statistics = ferry.load_statistics(experts)
    print(f"{statistics.routes} routes, busiest expert {statistics.max:.2f} x the mean, {statistics.idle} experts idle: {output}")


if __name__ == "__main__":
    main()
