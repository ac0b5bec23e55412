"""Splits the host time of a call of ferry.deep_ep into named parts."""

import cProfile
import pstats

import ferry

COMPILED = ("dispatch", "dispatch_send", "dispatch_receive", "combine", "combine_send", "combine_receive")

# Parts by the file and name of a function; the first match counts. Functions that match none are the rest.
PARTS = {
    "exchange and launch": (*(f"host_profile.py:exchange_{name}" for name in COMPILED), "wait_total"),
    "collective of hosts": ("all_gather", "_exchanges.py:agree", "_exchanges.py:_gather"),
    "streams and events": ("_events.py", "torch/cuda/", "contextlib.py", "record_stream", "_cuda_", "EventOverlap",
                           "streams.py", "Event", "Stream"),
    "statistics": ("_low_latency.py:finish", "_low_latency.py:receive"),
    "allocation": ("LowLatencyBuffers", "NormalBuffers", ".empty", "torch.full", "_arrays.py:empty", "_arrays.py:full",
                   "_arrays.py:type", "plan_bytes", "_low_latency.py:__init__", "_low_latency.py:recv_x",
                   "_normal.py:empty", "_normal.py:recv_x"),
    "handle and pool": ("_exchanges.py", "_layout.py:__init__", "_low_latency.py:rows", "_low_latency.py:make_hook",
                        "_low_latency.py:hook", "_config.py"),
    "argument checks": ("_checks.py", "_check", "read_format", "tensors_of", "accepts", "dtypes", "type_name", "require",
                        "isinstance", "builtins.len", "_normal.py:read_input", "_normal.py:routes_of"),
    "array conversion": ("contiguous", "detached", "detach", "arrays_of"),
    "operations of PyTorch": ("_arrays.py", "_layout.py", "torch", "method"),
    "methods of Buffer": ("_buffer.py", "_low_latency.py", "_normal.py", "deep_ep_calls.py"),
}


def part_of(file, function):
    name = f"{file}:{function}"
    return next((part for part, texts in PARTS.items() if any(text in name for text in texts)), "rest")


def patched_exchange():
    """Gives each compiled call of Exchange a Python function, which the profiler can see. Returns the original ones."""
    originals = {name: getattr(ferry.Exchange, name) for name in COMPILED}
    for name, original in originals.items():
        scope = {"original": original}
        exec(compile(f"def exchange_{name}(*given, **named): return original(*given, **named)", __file__, "exec"), scope)
        setattr(ferry.Exchange, name, scope[f"exchange_{name}"])
    return originals


def profile(call, repeats, host_us):
    """Microseconds of each part, from `repeats` calls.

    The profiler slows functions down, so its times only say how to share `host_us`, the time of a call without it.
    """
    originals = patched_exchange()
    profiler = cProfile.Profile()
    try:
        profiler.enable()
        for _ in range(repeats):
            call()
    finally:
        profiler.disable()
        for name, original in originals.items():
            setattr(ferry.Exchange, name, original)
    times = {}
    for (file, _, function), (_, _, own_time, _, _) in pstats.Stats(profiler).stats.items():
        part = part_of(file, function)
        times[part] = times.get(part, 0.0) + own_time
    total = sum(times.values())
    return {part: host_us * time / total for part, time in sorted(times.items(), key=lambda item: -item[1])}
