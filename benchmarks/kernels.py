"""Which kernels took a GPU's time, for scripts here with ``--kernels``."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

NUM_NAMED = 24


def kernel_times(work: Callable[[], Any]) -> dict[str, Any]:
    """Do ``work`` under torch's profiler.

    ``busy_ms``: kernels together (on a CPU operators, nested ones twice); ``span_ms``: from the
    first one's start to the last one's end; ``kernels``: name, ms and calls of the longest.
    """
    on_gpu = torch.cuda.is_available()
    activity = (
        torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    )
    with torch.profiler.profile(activities=[activity]) as profile:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    events = [
        each
        for each in profile.events()
        if each.device_type == device and not each.is_user_annotation
    ]
    times: dict[str, list[float]] = defaultdict(list)
    for event in events:
        times[event.name[:100]].append(event.time_range.elapsed_us() / 1e3)
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:NUM_NAMED]
    start, end = min(e.time_range.start for e in events), max(e.time_range.end for e in events)
    return {
        "busy_ms": round(sum(map(sum, times.values())), 3),
        "span_ms": round((end - start) / 1e3, 3),
        "kernels": [[name, round(sum(each), 3), len(each)] for name, each in longest],
    }
