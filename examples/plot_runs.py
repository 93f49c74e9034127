"""Plot the learning curves of finished runs: ``python examples/plot_runs.py OUT.png RUN_DIR ...``.

Reads each run's ``metrics.jsonl``: thin lines are the training reward of a step, thick lines the
validation accuracy (or reward, where there is no accuracy) on held-out prompts.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes


def main() -> None:
    """Draw all runs into one picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("run_dirs", type=Path, nargs="+")
    arguments = parser.parse_args()
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=120)
    for i, run_dir in enumerate(arguments.run_dirs):
        plot_run(axes, run_dir, f"C{i}")
    axes.set(xlabel="optimizer step", ylabel="accuracy", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(arguments.out)


def plot_run(axes: Axes, run_dir: Path, color: str) -> None:
    """Training reward and validation of one run."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    trained = [(r["step"], r["rollout/reward"]) for r in records if "rollout/reward" in r]
    axes.plot(*zip(*trained, strict=True), color=color, alpha=0.35, linewidth=1)
    validated = [
        (r["step"], r.get("validation/accuracy", r["validation/reward"]))
        for r in records
        if "validation/reward" in r
    ]
    summary = json.loads((run_dir / "summary.json").read_text())
    label = f"{summary['model']}, seed {summary['seed']}"
    axes.plot(*zip(*validated, strict=True), color=color, marker="o", label=label)


if __name__ == "__main__":
    main()
