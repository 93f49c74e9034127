"""Plot reward over training time: ``python benchmarks/plot_learning.py OUT.png results.jsonl``.

The file is what ``grpo.py --workload learning --only trl,ours`` wrote, once a seed. Thick lines are
running means of ten steps; points are held-out rewards before and after. Start-up and validation
are not in the time.
"""

import argparse
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from grpo_table import accuracies, steps_of
from matplotlib.axes import Axes
from workloads import read_rows

STYLES = {"ours": ("nemo-like", "C0"), "trl": ("TRL 1.16", "C1")}
NUM_AVERAGED = 10


def main() -> None:
    """Draw the latest record of each contender and seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--workload", default="learning")
    args = parser.parse_args()
    latest = {
        (record["contender"], record["seed"]): record
        for record in read_rows(args.results)
        if record["workload"]["name"] == args.workload and record["contender"] in STYLES
    }
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=120)
    named: set[str] = set()
    for (contender, _), record in sorted(latest.items()):
        plot_record(axes, record, labelled=contender not in named)
        named.add(contender)
    axes.set(xlabel="seconds of training", ylabel="reward", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(args.out)


def plot_record(axes: Axes, record: dict[str, Any], labelled: bool) -> None:
    """Training reward of one run, and its held-out rewards."""
    name, color = STYLES[record["contender"]]
    steps = steps_of(record)
    seconds = list(accumulate(step["wall_s"] for step in steps))
    rewards = [step["reward"] for step in steps]
    axes.plot(seconds, rewards, color=color, alpha=0.25, linewidth=0.8)
    label = name if labelled else None
    axes.plot(seconds, running_means(rewards, NUM_AVERAGED), color=color, label=label)
    validated = accuracies(record)
    if validated is not None:
        axes.plot((0.0, seconds[-1]), validated, color=color, marker="o", linestyle="none")


def running_means(values: list[float], width: int) -> list[float]:
    """Mean of each value and of those before it, ``width`` at most.

    >>> running_means([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    windows = (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


if __name__ == "__main__":
    main()
