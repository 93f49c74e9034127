"""What this machine cannot test is skipped, and said in red at the end; in CI it fails."""

import os
from collections import Counter

import pytest

MARK = "NOT TESTED HERE: "


def cannot_test(reason: str, required_by: str) -> None:
    """Skip, or fail where the variable ``required_by`` is 1, as in CI."""
    if os.environ.get(required_by) == "1":
        pytest.fail(reason)
    pytest.skip(f"{MARK}{reason}; with {required_by}=1 this is a failure")


def say_loudly(reporter: pytest.TerminalReporter) -> None:
    """A section of its own for what was skipped by ``cannot_test``."""
    reasons = [str(report.longrepr) for report in reporter.stats.get("skipped", [])]
    counts = Counter(text.partition(MARK)[2].rstrip("')") for text in reasons if MARK in text)
    if counts:
        reporter.section("NOT TESTED ON THIS MACHINE", sep="!", red=True, bold=True)
    for reason, count in counts.items():
        reporter.line(f"{count} tests skipped: {reason}", red=True)
