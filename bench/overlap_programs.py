"""The programs of program_overlap.py: layers of dispatch, experts and combine, whole and in two micro-batches."""

import ferry

INPUTS = """
input x: tokens
input ids: ids
input weights: weights
"""

SHARED = ferry.Program(f"""
program shared
{INPUTS}
sent = dispatch_send(x, ids, weights)
shared: tokens = call shared_experts(x)
rows = dispatch_receive(sent)
outputs: outputs = call experts(rows)
routed = combine(outputs, rows, rows)
y: tokens = call add(routed, shared)
output y
""")

# The same without shared experts.
PHASES = ferry.Program(f"""
program phases
{INPUTS}
sent = dispatch_send(x, ids, weights)
rows = dispatch_receive(sent)
outputs: outputs = call experts(rows)
routed = combine(outputs, rows, rows)
y: tokens = call add(routed, x)
output y
""")


def limit(blocks):
    return f" sm_limit={blocks}" if blocks else ""


def whole(layers, blocks=0):
    """`layers` in a row, each of which takes the result of the one before."""
    text, x = f"program whole\n{INPUTS}", "x"
    for layer in range(layers):
        text += (f"rows{layer} = dispatch({x}, ids, weights){limit(blocks)}\n"
                 f"outputs{layer}: outputs = call experts(rows{layer})\n"
                 f"y{layer} = combine(outputs{layer}, rows{layer}, rows{layer}){limit(blocks)}\n")
        x = f"y{layer}"
    return ferry.Program(f"{text}output {x}\n")


def by_turns(layers, blocks):
    """Two micro-batches whose calls are in one piece. The second starts when the first has its rows, and experts run one at a time.
    So the messages of one travel under the experts of the other, with few thread blocks; only the first dispatch and the last
    combine have the GPU to themselves."""
    text, x = f"program by_turns\n{INPUTS}", ["x.0", "x.1"]
    for batch in (0, 1):
        text += "".join(f"{name}.{batch} = part({name}) index={batch} of=2 stream={batch}\n" for name in ("x", "ids", "weights"))
    before = None  # the experts before
    for layer in range(layers):
        for batch in (0, 1):
            on, name = f"stream={batch}", f"{layer}.{batch}"
            first = layer == batch == 0
            after = f" after=rows{layer}.0" if layer == 0 and batch == 1 else ""
            text += f"rows{name} = dispatch({x[batch]}, ids.{batch}, weights.{batch}) lane={batch} {on}{limit(0 if first else blocks)}{after}\n"
        for batch in (0, 1):
            on, name = f"stream={batch}", f"{layer}.{batch}"
            last = layer == layers - 1 and batch == 1
            text += f"outputs{name}: outputs = call experts(rows{name}) {on}{f' after={before}' if before else ''}\n"
            text += f"y{name} = combine(outputs{name}, rows{name}, rows{name}) lane={batch} {on}{limit(0 if last else blocks)}\n"
            before, x[batch] = f"outputs{name}", f"y{name}"
    return ferry.Program(f"{text}y = join({x[0]}, {x[1]})\noutput y\n")


def variants(layers, limits):
    """{name: (program, SMs that experts leave to others)}, with at most so many thread blocks in a call, 0: half of the GPU."""
    made = {}
    for blocks in limits:
        # Micro-batches share a program's limit.
        made[f"overlap(2), {blocks} blocks"] = whole(layers, 2 * blocks).overlap(2), blocks
        made[f"by turns, {blocks} blocks"] = by_turns(layers, blocks), blocks
    return made


def least_time(dispatch, experts, combine, layers):
    """How long two micro-batches take at least, whose calls and experts take this long: one call of an exchange and one function
    at a time, each as early as it can, and neither slows the other down."""
    ready, left = [0.0, 0.0], [[("link", dispatch), ("experts", experts), ("link", combine)] * layers for _ in range(2)]
    free = {"link": 0.0, "experts": 0.0}
    while any(left):
        def start(batch):
            return max(ready[batch], free[left[batch][0][0]])
        batch = min((batch for batch in (0, 1) if left[batch]), key=start)
        resource, time = left[batch].pop(0)
        ready[batch] = free[resource] = max(ready[batch], free[resource]) + time
    return max(ready)
