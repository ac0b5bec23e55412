"""Splits the host time of a call of ferry.deep_ep into named parts."""

import cProfile
import pstats

import ferry
from ferry import _core

METHODS = "methods of Buffer"
COMPILED = ("dispatch", "dispatch_send", "dispatch_receive", "combine", "combine_send", "combine_receive")

# Parts by the file and name of a function; the first match counts. Functions that match none are the rest.
PARTS = {
    "exchange and launch": tuple(f"host_profile.py:exchange_{name}" for name in COMPILED),
    "collective of hosts": ("all_gather", "_exchanges.py"),
    "streams and events": ("_events.py", "torch/cuda/", "contextlib.py", "_cuda_", "EventOverlap", "Event", "Stream"),
    "operations of PyTorch": ("_arrays.py", "_layout.py", "_normal.py", "torch", "method"),
    METHODS: ("_buffer.py", "deep_ep_calls.py"),
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

    The profiler slows functions down, so its times only say how to share `host_us`, the time of a call without it. It counts
    compiled code that a method calls as the method's: the module itself measures its parts, in calls of their own.
    """
    _core._measure_parts(True)
    for _ in range(repeats):
        call()
    compiled = {part: seconds / repeats * 1e6 for part, seconds in _core._measured_parts().items() if seconds > 0}
    _core._measure_parts(False)
    python = profile_of_functions(call, repeats)
    # The rest of the methods' time is the interpreter's, and the conversion of arguments at the border of compiled code.
    calling = ("exchange and launch", METHODS)
    scale = host_us / sum(python.values())
    parts = {part: time * scale for part, time in python.items() if part not in calling}
    inside = sum(compiled.values())
    parts[METHODS] = max(host_us - sum(parts.values()) - inside, 0.0)
    for part, time in compiled.items():
        parts[part] = parts.get(part, 0.0) + time
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def profile_of_functions(call, repeats):
    """Seconds of each part in the functions that the profiler sees."""
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
    return times
