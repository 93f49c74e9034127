"""Which tensors travel together."""

from collections.abc import Mapping


def plan_buckets(sizes_bytes: Mapping[str, int], bucket_bytes: int) -> list[list[str]]:
    """Split tensors, in order, into buckets of at most ``bucket_bytes``.

    Each name is in exactly one bucket; a tensor larger than a bucket gets one of its own.

    >>> plan_buckets({"a": 3, "b": 3, "c": 9, "d": 1}, bucket_bytes=6)
    [['a', 'b'], ['c'], ['d']]
    """
    buckets: list[list[str]] = []
    room = 0
    for name, size in sizes_bytes.items():
        if size > room or not buckets:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(name)
        room -= size
    return buckets
