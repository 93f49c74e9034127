"""The section ``policy.debug``: checks, measurements and profiles of training."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from nemo_like.config.section import Count, OnlyIf, Positive, Section

_OWN_GRADIENTS = OnlyIf(
    lambda _, run: run.policy.parallel.ddp.average_every_steps == 1,
    "policy.parallel.ddp.average_every_steps above 1 lets each rank keep its own gradients; set it "
    "to 1",
)


class DebugConfig(Section):
    """Checks that cost time; each raises or logs by itself."""

    checks: Annotated[bool, _OWN_GRADIENTS] = False
    """Stop unless ranks that should hold equal parameters have equal gradients before each step and
    equal parameters after it, bit for bit; if two data-parallel ranks get the same rows; or if
    ranks that should share rows do not."""
    metrics: bool = False
    """Log each rank's memory by phase, and count and time the collectives of logprobs, backward and
    optimizer: ``memory/…`` and ``collective/…``, of the ranks that have the loss (the last
    stage's)."""
    hang_report_s: Positive | None = None
    """Seconds in one phase after which each rank writes where it stands to ``logs/hang-*.txt``."""
    profile_steps: list[Count] = Field(default_factory=list)
    """Optimizer steps, counted from 1, that rank 0 of the policy profiles by ``torch.profiler``:
    ``logs/profile-0-stepN.json`` is a Chrome trace (Perfetto). On a GPU a memory snapshot
    ``.pickle`` is written too, for pytorch.org/memory_viz. These steps are slower."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """A hang is reported before its limit ends the run; steps to profile exist."""
        limit_s = run.cluster.call_timeout_s
        last: int | None = run.max_updates
        for step in self.profile_steps:
            if last is not None and step > last:
                yield f"{here}.profile_steps: the run ends at optimizer step {last}, before {step}."
        if self.hang_report_s is not None and self.hang_report_s >= limit_s:
            yield (
                f"{here}.hang_report_s={self.hang_report_s:g} must be below "
                f"cluster.call_timeout_s={limit_s:g}, at which the run ends; lower it."
            )
