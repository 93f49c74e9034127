"""What a completion answers to, and what scores it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from nemo_like.config.data import REASONING_GYM
from nemo_like.config.section import Count, OnlyIf, Positive, Section
from nemo_like.doors import Door

JUDGE = "judge"


class JudgeConfig(Section):
    """A model on an OpenAI-compatible server that scores completions.

    With ``environment.pass_variables=[JUDGE_API_KEY]`` it is sent the key in that variable; no
    other is. At most 32 requests of the run are in flight, which reward processes share evenly, or
    ``environment.rows_at_once`` of each.
    """

    url: str | None = None
    """Base URL of the server, including the version: ``http://localhost:8000/v1``."""
    model: str | None = None
    """The model's name on that server."""
    template: str | None = None
    """The judge's prompt: a Jinja template, or a file with one, with ``prompt``, ``completion``,
    ``messages`` (of the prompt) and the row's fields. None: ask for a score from 0 to 10."""
    pattern: str = r"[Ss]core\W+?(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the verdict; the last match counts."""
    verdicts: dict[str, float] = Field(default_factory=dict)
    """The reward for each verdict in words, ``{yes: 1, no: 0}``. Empty: numbers from 0, which
    gives reward 0, to 10, which gives 1. Anything else is not a verdict."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Extra request parameters, such as ``{temperature: 0, max_tokens: 500}``."""

    def faults(self, here: str) -> Iterator[str]:
        """Errors in a section that the run uses."""
        if self.url is None or self.model is None:
            missing = "model" if self.url else "url"
            yield f"{here}.{missing} is not set; a judge needs url and model."
        elif not self.url.startswith(("http://", "https://")):
            yield f"{here}.url={self.url} must begin with http:// or https://."
        template = self.template or "{{"
        if "{{" not in template and not Path(template).expanduser().is_file():
            yield (
                f"{here}.template={template} is neither a file nor a template, which has "
                "{{ completion }}."
            )
        try:
            if not re.compile(self.pattern).groups:
                yield f"{here}.pattern={self.pattern} has no group (...), which is the verdict."
        except re.error as error:
            yield f"{here}.pattern={self.pattern} is no regular expression: {error}."


REWARD_MODEL = "reward_model"
REWARD_MODEL_KEY = "environment.reward_model"
CODE = "code"
REWARDS = Door(
    "nemo_like.rewards",
    {
        REASONING_GYM: "nemo_like.data.reasoning_gym.reward",
        "math": "nemo_like.rewards.math.reward.reward",
        CODE: "nemo_like.rewards.code.reward.reward",
        REWARD_MODEL: "",
        JUDGE: "nemo_like.rewards.judge.Judge",
    },
)

SINGLE_TURN = "single_turn"
ENVIRONMENTS = Door(
    "nemo_like.environments",
    {
        SINGLE_TURN: "",
        "tools": "nemo_like.environments.tools.Tools",
        "search": "nemo_like.environments.search.Search",
        "guess": "nemo_like.environments.guess.Guess",
        "program": "nemo_like.environments.program.run",
    },
)

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SEVERAL_TURNS = OnlyIf(
    lambda here, _: here.name != SINGLE_TURN, f"environment.name={SINGLE_TURN} takes one completion"
)
_OWN_FUNCTION = OnlyIf(
    lambda here, _: here.judges or here.runs_other_than(*REWARDS.ours),
    "environment.reward is not a function of your own",
)
_NO_PARTS = OnlyIf(lambda here, _: not here.rewards, "environment.rewards takes its place")
_CODE = OnlyIf(lambda here, _: here.reward == CODE, f"environment.reward is not {CODE}")


class RewardPart(Section):
    """One of several rewards."""

    function: Annotated[str, REWARDS] = REASONING_GYM
    """What ``environment.reward`` may be, but for ``reward_model`` and ``code``."""
    weight: float = 1.0
    """What it is multiplied by in the sum."""


class EnvironmentConfig(Section):
    """What a completion answers to, and what scores it."""

    name: Annotated[str, ENVIRONMENTS] = SINGLE_TURN
    """``single_turn``: one completion, scored by ``environment.reward``; ``tools``: functions to
    call, a calculator by default; ``search``: a local corpus; ``guess``: a game; ``program``: a
    command that reaches the model by ``OPENAI_BASE_URL``; ``file.py:Class`` or
    ``package.module.Class`` with ``reset(row)`` and ``step(action)``; or an ``async def run(row,
    base_url, api_key)`` that calls the model as it likes and returns the reward, a number or a
    dict."""
    options: Annotated[dict[str, Any], _SEVERAL_TURNS] = Field(default_factory=dict)
    """Keyword arguments of that class or function."""
    max_turns: Annotated[Count, _SEVERAL_TURNS] = 8
    """Most completions of one trajectory."""
    max_tokens: Annotated[Count | None, _SEVERAL_TURNS] = None
    """Most tokens of one trajectory's row, prompt and turns together. None: what the model's
    context and ``policy.micro_batch_tokens`` hold."""
    trajectory_timeout_s: Annotated[Positive, _SEVERAL_TURNS] = 600.0
    """Seconds that one trajectory may take; after them its rows are masked and counted."""
    reward: Annotated[str, REWARDS, _NO_PARTS] = REASONING_GYM
    """``reasoning_gym``, ``math`` (needs an ``answer`` field), ``code`` (runs the program in
    the completion against the field ``tests``), ``reward_model`` (the score of
    ``environment.reward_model``), ``judge`` (see ``environment.judge``), ``file.py:function`` or
    ``package.module.function``. Signature: ``def reward(prompt, completion, **fields) -> float |
    dict``, where fields are the row's, and ``messages``, all messages of the prompt; or TRL's
    ``def reward(prompts, completions, **columns) -> list``, which gets texts, or lists of messages
    if a row's prompt is one."""
    rewards: dict[str, RewardPart] = Field(default_factory=dict)
    """Several rewards in place of one: ``{name: {function: ..., weight: 1}}``, where a function is
    what ``environment.reward`` may be, but for ``reward_model`` and ``code``. The reward is their
    weighted sum, and each is logged as ``rollout/reward_NAME``. If one fails, so does the row."""
    timeout_s: Positive = 10.0
    """Seconds that one completion may take to score, or one step of an environment; after them its
    row is masked and counted. The first completion that a reward process scores may take six times
    as long, but at most 60 s more, since the function may import."""
    num_processes: Count = 1
    """Reward processes of each rollout worker."""
    rows_at_once: Annotated[
        Count | None,
        OnlyIf(
            lambda here, _: here.runs_other_than(REASONING_GYM, "math", CODE),
            "this environment.reward scores one completion after the other",
        ),
    ] = None
    """Completions that each reward process scores at once: of a reward function that is an ``async
    def``, on one event loop that lives as long as the process; for a function that takes lists,
    the waiting completions passed in one call; None: 32. For a reward model, those in one forward
    pass; None: 8. For a judge, its requests; None: an equal part of 32 for the whole run."""
    process_memory_gib: Positive | None = None
    """GiB of data that each reward process may hold; a process that keeps half of them is
    replaced. None: half of the node's memory, shared by all of the run's on that node."""
    pass_variables: Annotated[list[str], _OWN_FUNCTION] = Field(default_factory=list)
    """Names of environment variables that the reward function needs, such as
    ``[OPENAI_API_KEY]``. It gets those for programs, folders, languages, threads, caches and
    proxies (``nemo_like/rewards/variables.py``), and no others."""
    reward_model: Annotated[
        str | None,
        OnlyIf(
            lambda here, _: here.reward == REWARD_MODEL,
            f"environment.reward is not {REWARD_MODEL}",
        ),
    ] = None
    """Folder ``final/`` of a run of ``nemo-like rm``, or another of transformers' models for
    sequence classification with one label; or a hub name. It runs on the CPU, and every reward
    process holds a copy of it. Its own tokenizer and chat template render prompt and completion
    (with those of ``data.template_switches`` that it uses), and the score is read at the token
    that ends the completion, as in training it. A completion that was cut off is scored as if it
    ended there."""

    max_failed_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a step's, a validation's or an evaluation's trajectories whose reward may fail;
    above it the run stops. At 1 it stops only if all fail."""
    judge: Annotated[
        JudgeConfig,
        OnlyIf(lambda here, _: here.judges, f"environment.reward is not {JUDGE}"),
    ] = JudgeConfig()
    tasks: dict[str, "EnvironmentConfig"] = Field(default_factory=dict)
    """Environments that rows can name in their column ``environment``, ``{NAME: {name: ...,
    reward: ...}}``. Each takes the keys of this section, with the usual defaults. Rows without that
    column use the run's environment. A file of a mixture can name one for all its rows
    (docs/agents.md)."""
    code_credit: Annotated[Literal["strict", "partial"], _CODE] = "strict"
    """Reward of a program: 1 if all tests pass and 0 otherwise, or the share that passes."""
    code_seconds: Annotated[Positive, _CODE] = 5.0
    """Seconds of one test. All tests of a row together have ``environment.timeout_s`` less 2 s;
    those that are not reached fail."""
    code_memory_gib: Annotated[Positive, _CODE] = 0.5
    """GiB of address space of each process of a program, and of memory of all together."""

    @property
    def by_name(self) -> dict[str, "EnvironmentConfig"]:
        """The run's own environment, under the empty name, and those of ``tasks``."""
        return {"": self, **self.tasks}

    @property
    def name_in_messages(self) -> str:
        """What scores, in messages."""
        if self.tasks:
            return "a reward of environment or environment.tasks"
        if not self.is_single_turn:
            return f"environment.name={self.name}"
        return "environment.rewards" if self.rewards else f"environment.reward={self.reward}"

    @property
    def is_single_turn(self) -> bool:
        """Whether a trajectory is one completion."""
        return self.name == SINGLE_TURN

    @property
    def most_turns(self) -> int:
        """Most completions of any trajectory of the run."""
        each = self.by_name.values()
        return max(1 if one.is_single_turn else one.max_turns for one in each)

    @property
    def functions(self) -> list[str]:
        """What scores, by name."""
        return [part.function for part in self.rewards.values()] or [self.reward]

    @property
    def judges(self) -> bool:
        """Whether a judge scores, alone or among others."""
        return JUDGE in self.functions

    def runs_other_than(self, *rewards: str) -> bool:
        """Whether conversations are had, or anything but these functions is called."""
        return not self.is_single_turn or any(one not in rewards for one in self.functions)

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """Names of variables only: an entry may hold a secret, and is not shown."""
        if self.judges:
            yield from self.judge.faults(f"{here}.judge")
        for name, task in self.tasks.items():
            if task.max_failed_share != 1:
                yield f"{here}.tasks.{name}.max_failed_share would have no effect: it is the run's."
            elif task.tasks:
                yield f"{here}.tasks.{name}.tasks would have no effect: tasks have none."
            elif not _VARIABLE.fullmatch(name):
                yield f"{here}.tasks: '{name}' must be a name of letters, digits and _."
        for name, part in self.rewards.items():
            if not _VARIABLE.fullmatch(name):
                yield f"{here}.rewards: '{name}' must be a name of letters, digits and _."
            elif part.function in (REWARD_MODEL, CODE):
                yield (
                    f"{here}.rewards.{name}.function={part.function} goes alone only, as "
                    "environment.reward."
                )
        if self.reward in (REWARD_MODEL, CODE) and self.name != SINGLE_TURN:
            yield (
                f"{here}.reward={self.reward} scores one completion; set {here}.name="
                f"{SINGLE_TURN}, or a reward function of your own."
            )
        if self.reward == CODE and self.timeout_s < self.code_seconds + 2:
            yield (
                f"{here}.timeout_s={self.timeout_s:g} must be at least 2 s more than "
                f"{here}.code_seconds={self.code_seconds:g}; raise it."
            )
        for name in self.pass_variables:
            if not _VARIABLE.fullmatch(name):
                yield (
                    f"{here}.pass_variables: an entry of {len(name)} characters is not the name of "
                    "a variable; list names alone, as in [OPENAI_API_KEY], and export their values."
                )
