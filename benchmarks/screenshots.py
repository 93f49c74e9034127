"""Screenshots of each view of the dashboard, by Debian's chromium and the package playwright.

    python benchmarks/screenshots.py docs runs/seed0 runs/seed1

Those in ``docs/`` are of two real runs, ``nemo-like grpo run.seed=N validation.every_steps=5``.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

VIEWS = {
    "curves": ("curves?x=step&smooth=0.6", "[data-metric] canvas"),
    "phases": ("phases?run=0", ".lane"),
    "rollouts": ("rollouts?run=0&phase=train&reward_max=0.5&sort=-num_tokens", "tr.link"),
    "group": ("group?run=0&phase=train&step=6&group=83&index=1&color=logprob", ".trajectory"),
    "config": ("config", "main td"),
    "log": ("log?run=0", "main pre"),
}
"""Each view: its address, and what is there once it is drawn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+")
    options = parser.parse_args()
    code = "from nemo_like.cli import main; main()"
    command = [sys.executable, "-c", code, "dashboard", *options.runs]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served,
        sync_playwright() as playwright,
    ):
        assert served.stdout is not None
        url = served.stdout.readline().strip()
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1240, "height": 560})
        for name, (view, drawn) in VIEWS.items():
            page.goto(f"{url}#{view}")
            page.wait_for_selector(drawn)
            page.wait_for_timeout(600)
            page.screenshot(path=options.out / f"viewer-{name}.png")
        browser.close()
        served.terminate()


if __name__ == "__main__":
    main()
