"""Sampling seeds: no two completions of a step share one, and a repeated run draws the same."""

import hashlib

_BITS = 63  # non-negative in an int64 column


def completion_seed(run_seed: int, phase: str, step: int, prompt: int, index: int) -> int:
    """Seed of completion ``index`` of prompt ``prompt`` in ``step`` of ``phase``.

    >>> completion_seed(0, "train", 1, 2, 3) == completion_seed(0, "train", 1, 2, 3)
    True
    """
    text = f"{run_seed}/{phase}/{step}/{prompt}/{index}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _BITS)
