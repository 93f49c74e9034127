"""Reward functions of jobs of tests/test_ray_jobs.py."""

from pathlib import Path

import nemo_like


def short(prompt: str, completion: str) -> float:
    if "working_dir_files" not in Path(nemo_like.__file__).parts:
        raise ImportError(f"not the submitted package: {nemo_like.__file__}")
    return 1 / (1 + len(completion))


def broken(prompt: str, completion: str) -> float:
    raise LookupError("no answer column")
