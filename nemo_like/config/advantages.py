"""Section ``advantage``: from rewards to advantages; each key cites its paper."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_like.config.section import OnlyIf, Section
from nemo_like.doors import Door

ADVANTAGES = Door("nemo_like.advantages")


class AdvantageConfig(Section):
    """From rewards to advantages."""

    function: Annotated[str | None, ADVANTAGES] = None
    """Your own function, ``file.py:function`` or ``package.module.function``, with the arguments
    of ``group_advantages`` in ``nemo_like/losses/advantages.py``. None: that function."""
    baseline: Literal["leave_one_out", "mean", "none"] = "leave_one_out"
    """``leave_one_out``: mean reward of the prompt's other completions (RLOO, arXiv:2402.14740
    Eq. 7); ``mean``: mean of all of them (GRPO, arXiv:2402.03300 section 4.1.2;
    REINFORCE++-baseline); ``none``: no baseline (REINFORCE, REINFORCE++)."""
    scale: Literal["std", "batch", "none"] = "std"
    """``std``: divide by the unbiased standard deviation of the baseline's rewards (GRPO), unless
    it is 0 or there is only one reward. With ``leave_one_out`` these are the other completions: if
    their rewards nearly agree, as those of a reward model may, an outlier has a large advantage.
    ``batch``: subtract the mean of all advantages of the step and divide by their unbiased standard
    deviation (REINFORCE++, arXiv:2501.03262); ``none``: neither (RLOO; Dr. GRPO,
    arXiv:2503.20783)."""
    count_untrained: Annotated[
        bool,
        OnlyIf(
            lambda _, run: run.grpo.mask_truncated or run.masks_mismatch,
            "all scored completions train; set grpo.mask_truncated=true or mismatch.action=mask "
            "too",
        ),
        OnlyIf(
            lambda here, run: (
                here.baseline != "none" or here.scale != "none" or run.grpo.dynamic_sampling
            ),
            "advantage.baseline=none and advantage.scale=none count nothing",
        ),
    ] = False
    """Whether completions that do not train (``grpo.mask_truncated``, ``mismatch.action=mask``)
    count in the mean and deviation of their group and step. True: only the loss leaves them out,
    like the overlong filter of DAPO (arXiv:2503.14476 section 3.4). Completions with a failed
    reward never count."""
    each_reward: Annotated[
        bool,
        OnlyIf(lambda _, run: run.environment.rewards, "environment.rewards is empty"),
    ] = False
    """True: compute advantages for each of ``environment.rewards`` separately, add them by weight,
    subtract their mean over the step and divide by their deviation (GDPO, arXiv:2601.05242). A
    reward that varies little then counts as much as one that varies a lot. False: compute
    advantages from the weighted sum of the rewards."""
    credit: Annotated[
        Literal["trajectory", "step"],
        OnlyIf(
            lambda _, run: run.environment.most_turns > 1,
            "a trajectory of one completion is one step; set environment.name and max_turns",
        ),
    ] = "trajectory"
    """``trajectory``: every token gets the advantage of its trajectory's reward. ``step``: step
    rewards are centred and scaled over the group, and each token gets the sum for its own and later
    completions (process supervision, arXiv:2402.03300 section 4.1.3)."""
    per_task: Annotated[
        bool,
        OnlyIf(
            lambda here, _: here.scale == "batch" or here.each_reward or here.function,
            "a group has one task, and no statistic is taken over the step; set "
            "advantage.scale=batch",
        ),
    ] = False
    """Compute statistics of the step (``scale=batch``, ``each_reward``), and call ``function``,
    separately for each task: an environment of ``environment.tasks``, or a part of a mixture."""
    overlong_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """Completions that end within this many tokens of ``generation.max_new_tokens`` lose reward in
    proportion to their tokens in the buffer, up to 1 (DAPO, arXiv:2503.14476 Eq. 13). 0: off."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        if self.each_reward and run.environment.tasks:
            yield f"{here}.each_reward=true reads environment.rewards; set environment.tasks={{}}."
        if self.credit == "step" and self.baseline == "leave_one_out":
            yield (
                f"{here}.credit=step uses several rewards per trajectory, and "
                f"{here}.baseline=leave_one_out leaves out one of them; set {here}.baseline=mean."
            )
        if self.credit == "step" and (self.each_reward or run.kl_in_reward):
            yield (
                f"{here}.credit=step uses step rewards only; set {here}.each_reward=false, "
                "and loss.kl_in=loss if there is a KL."
            )
        if self.each_reward and (self.overlong_buffer_tokens or run.kl_in_reward):
            yield (
                f"{here}.each_reward=true has no single reward to subtract from; set "
                "advantage.overlong_buffer_tokens=0, and loss.kl_in=loss if there is a KL."
            )
        buffer, most = self.overlong_buffer_tokens, run.generation.max_new_tokens
        if buffer and run.environment.most_turns > 1:
            yield (
                f"{here}.overlong_buffer_tokens={buffer} is about one completion "
                "(arXiv:2503.14476 Eq. 13), and trajectories may have "
                f"{run.environment.most_turns}; set it to 0, or environment.max_turns=1."
            )
        if buffer > most:
            yield (
                f"{here}.overlong_buffer_tokens={buffer} must be at most "
                f"generation.max_new_tokens={most}: the buffer is the last part of a completion."
            )
