"""Plot learning curves: ``python examples/plot_runs.py OUT.png FOLDER ... [--metric NAME]``.

A folder is that of a run (any algorithm, finished or not) or contains runs, like that of a sweep.
Thin lines show training, thick lines with dots validation. Without ``--metric`` they are rewards or
accuracies for runs that sample, and losses for others.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

TRAINING = ("rollout/reward", "train/loss")
VALIDATION = ("validation/accuracy", "validation/reward", "validation/loss")


def main() -> None:
    """Draw all runs into one picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--metric", help="a metric in metrics.jsonl to plot instead")
    arguments = parser.parse_args()
    runs = {file.parent: None for one in arguments.folders for file in one.rglob("metrics.jsonl")}
    if not runs:
        parser.error(f"there is no metrics.jsonl in {', '.join(map(str, arguments.folders))}")
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=120)
    names: set[str] = set()
    for i, folder in enumerate(sorted(runs)):
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found = [arguments.metric] if arguments.metric else [_first(TRAINING, records)]
        found += [] if arguments.metric else [_first(VALIDATION, records)]
        names |= _draw(axes, records, [one for one in found if one], _label(folder), f"C{i}")
    if not names:
        parser.error(f"no run has {arguments.metric or 'a reward or a loss'}")
    axes.set(xlabel="step", ylabel=", ".join(sorted(names)))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(arguments.out)


def _first(names: Sequence[str], records: Sequence[dict[str, float]]) -> str | None:
    return next((name for name in names if any(name in one for one in records)), None)


def _label(folder: Path) -> str:
    """Label from the summary of a run that has ended, or else the folder's name."""
    summary = folder / "summary.json"
    if not summary.is_file() or "=" in folder.name:
        return folder.name
    found = json.loads(summary.read_text())
    return f"{found['model']}, seed {found['seed']}"


def _draw(
    axes: Axes, records: Sequence[dict[str, float]], names: Sequence[str], label: str, color: str
) -> set[str]:
    """Draw one run, with the label on its last line; returns the metrics it has."""
    drawn = [name for name in names if any(name in one for one in records)]
    for name in drawn:
        having = [one for one in records if name in one]
        steps, values = [one["step"] for one in having], [one[name] for one in having]
        if "validation" in name:
            axes.plot(steps, values, color=color, marker="o")
        else:
            axes.plot(steps, values, color=color, alpha=0.35, linewidth=1)
        axes.lines[-1].set_label(label if name == drawn[-1] else "_")
    return set(drawn)


if __name__ == "__main__":
    main()
