"""Runs that sample completions: how they are scored and validated, and how much is sampled."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from nemo_like.config.data import REASONING_GYM, PromptsConfig
from nemo_like.config.generation import GenerationConfig, MismatchConfig, RefitConfig
from nemo_like.config.losses import LossConfig
from nemo_like.config.run import RunConfig
from nemo_like.config.section import Count, OnlyIf, Positive, Section
from nemo_like.config.texts import NEEDS_VALIDATION_ROWS
from nemo_like.doors import Door

REWARD_MODEL = "reward_model"
CODE = "code"
REWARDS = Door(
    "nemo_like.rewards",
    {
        REASONING_GYM: "nemo_like.data.reasoning_gym.reward",
        "math": "nemo_like.rewards.math.reward.reward",
        CODE: "nemo_like.rewards.code.reward.reward",
        REWARD_MODEL: "",
    },
)

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ON = OnlyIf(
    lambda here, _: here.every_steps > 0, "{here}.every_steps=0 turns validation off; raise it"
)
_HAS_ROWS = OnlyIf(
    lambda _, run: run.data.has_validation_rows, "there are no validation rows; set data.validation"
)
_NOT_GREEDY = OnlyIf(lambda here, _: here.temperature > 0, "{here}.temperature=0 is greedy")
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
_SEVERAL_TURNS = OnlyIf(
    lambda here, _: here.name != SINGLE_TURN, f"environment.name={SINGLE_TURN} takes one completion"
)
_OWN_FUNCTION = OnlyIf(
    lambda here, _: here.reward not in REWARDS.ours,
    "environment.reward is not a function of your own",
)
_NO_PARTS = OnlyIf(lambda here, _: not here.rewards, "environment.rewards takes its place")
_CODE = OnlyIf(lambda here, _: here.reward == CODE, f"environment.reward is not {CODE}")


def _faults_of_parts(key: str, parts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, part in parts.items():
        if not _VARIABLE.fullmatch(name):
            yield f"{key}: '{name}' must be a name of letters, digits and _."
        elif unknown := part.keys() - {"function", "weight"}:
            yield f"{key}.{name} has {sorted(unknown)[0]}, and takes function and weight."
        elif not isinstance(function := part.get("function"), str):
            yield f"{key}.{name}.function must name a reward, as environment.reward does."
        elif function in (REWARD_MODEL, CODE):
            yield f"{key}.{name}.function={function} goes alone only, as environment.reward."
        elif refusal := REWARDS.refusal(f"{key}.{name}.function", function):
            yield refusal
        elif isinstance(weight := part.get("weight", 1), bool) or not isinstance(
            weight, int | float
        ):
            yield f"{key}.{name}.weight={weight} must be a number."


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
    rewritten_history: Annotated[Literal["split", "refuse"], _SEVERAL_TURNS] = "split"
    """Where the chat template renders earlier turns in another way once others follow (it may strip
    thinking): ``split`` begins another row of the same trajectory there, ``refuse`` masks the
    trajectory and counts it."""
    reward: Annotated[str, REWARDS, _NO_PARTS] = REASONING_GYM
    """``reasoning_gym``, ``math`` (needs an ``answer`` field), ``code`` (runs the program in
    the completion against the field ``tests``), ``reward_model`` (the score of
    ``environment.reward_model``), ``file.py:function`` or ``package.module.function``; ``def
    reward(prompt, completion, **fields) -> float | dict``, where fields are the row's, and
    ``messages``, all of the prompt."""
    rewards: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Several rewards in place of one: ``{name: {function: ..., weight: 1}}``, where a function is
    what ``environment.reward`` may be, but for a reward model. The reward is their weighted sum,
    and each is logged as ``rollout/reward_NAME``. If one fails, so does the row."""
    timeout_s: Positive = 10.0
    """Seconds that one completion may take to score, or one step of an environment; after them its
    row is masked and counted."""
    num_processes: Count = 1
    """Reward processes of each generation worker."""
    rows_at_once: Annotated[
        Count | None,
        OnlyIf(
            lambda here, _: here.reward not in (REASONING_GYM, "math", CODE),
            "this environment.reward scores one completion after the other",
        ),
    ] = None
    """Completions that each reward process scores at once: of a reward function that is an ``async
    def`` (others score one after the other) on one event loop that lives as long as the process,
    None: 32; of a reward model in one forward pass, None: 8."""
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
    """Folder ``final/`` of a run of ``run_rm.py``, or another of transformers' models for sequence
    classification with one label; or a hub name. It runs on the CPU, and every reward process
    holds a copy of it. Its own tokenizer and chat template render prompt and completion (with those
    of ``data.template_switches`` that it uses), and the score is read at the token that ends the
    completion, as in training it. A completion that was cut off is scored as if it ended there."""

    code_credit: Annotated[Literal["strict", "partial"], _CODE] = "strict"
    """Reward of a program: 1 if all tests pass and 0 otherwise, or the share that passes."""
    code_seconds: Annotated[Positive, _CODE] = 5.0
    """Seconds of one test. All tests of a row together have ``environment.timeout_s`` less 2 s;
    those that are not reached fail."""
    code_memory_gib: Annotated[Positive, _CODE] = 0.5
    """GiB of address space of each process of a program, and of memory of all together."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """Names of variables only: an entry may hold a secret, and is not shown."""
        yield from _faults_of_parts(f"{here}.rewards", self.rewards)
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


class ValidationConfig(Section):
    """Measuring on held-out prompts: training rows with the same prompt are left out."""

    every_steps: Annotated[int, Field(ge=0), NEEDS_VALIDATION_ROWS] = 5
    """Steps between validations; one is made before the first and after the last step. 0: never."""
    num_generations_per_prompt: Annotated[Count, _ON, _HAS_ROWS] = 1
    """Completions of each validation prompt; all of them count."""
    temperature: Annotated[float, Field(ge=0), _ON, _HAS_ROWS] = 1.0
    """Sampling temperature; 0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1), _ON, _HAS_ROWS, _NOT_GREEDY] = 1.0
    """Nucleus sampling, in (0, 1]."""
    top_k: Annotated[int, Field(ge=0), _ON, _HAS_ROWS, _NOT_GREEDY] = 0
    """Most likely tokens to sample from. 0: all."""
    max_new_tokens: Annotated[Count | None, _ON, _HAS_ROWS] = None
    """Most tokens of one completion. None: ``generation.max_new_tokens``."""

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """A temperature that the engine samples at."""
        least = run.generation.kind.lowest_temperature
        if 0 < self.temperature < least:
            yield (
                f"{here}.temperature={self.temperature:g} must be at least {least:g}, or 0, which "
                "is greedy."
            )


class SamplingLoop(Section):
    """How much is sampled for one step, and for how many steps."""

    max_steps: Count = 40
    """Steps of the whole run, resumed parts included: each samples a batch and trains on it."""
    num_prompts_per_step: Count = 16
    """Distinct prompts sampled for one step."""
    num_generations_per_prompt: Count = 8
    """Completions of each prompt."""


class SamplingRunConfig(RunConfig):
    """Sections of runs that sample completions. An algorithm adds its own."""

    samples: ClassVar[bool] = True

    generation: GenerationConfig = GenerationConfig()
    refit: RefitConfig = RefitConfig()
    mismatch: MismatchConfig = MismatchConfig()
    data: PromptsConfig = PromptsConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    validation: ValidationConfig = ValidationConfig()

    @property
    def loop(self) -> SamplingLoop:
        """The algorithm's own section."""
        loop = getattr(self, self.section)
        assert isinstance(loop, SamplingLoop)
        return loop

    @property
    def max_steps(self) -> int:
        """Steps of the whole run."""
        return self.loop.max_steps

    @property
    def max_updates(self) -> int:
        """One optimizer step per step."""
        return self.max_steps

    @property
    def rows_per_step(self) -> int:
        """Completions of a step."""
        return self.loop.num_prompts_per_step * self.loop.num_generations_per_prompt

    @property
    def validates(self) -> bool:
        """Whether there are held-out prompts, and a step to measure them at."""
        return self.data.has_validation_rows and self.validation.every_steps > 0

    @property
    def metric_areas(self) -> tuple[str, ...]:
        """What is sampled, and how far engine and policy agree, are measured too."""
        return ("train/", "rollout/", "mismatch/", "policy/")

    @property
    def trains(self) -> bool:
        """Whether what is sampled also trains."""
        return True

    @property
    def num_critic_workers(self) -> int | None:
        """Bundles set apart for a critic."""
        return None

    @property
    def longest_completion(self) -> tuple[str, int]:
        """The key that limits completions, and its value."""
        return "generation.max_new_tokens", self.generation.max_new_tokens

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """A micro-batch must hold one completion with something before it."""
        tokens, least = self.policy.micro_batch_tokens, self.generation.max_new_tokens + 1
        if self.trains and tokens < least:
            yield (
                f"policy.micro_batch_tokens={tokens} cannot hold one prompt token and "
                f"generation.max_new_tokens={self.generation.max_new_tokens}; use at least "
                f"{least}, plus the length of your prompts."
            )


class UpdatesLoop(SamplingLoop):
    """How many optimizer steps a step's completions take."""

    num_epochs_per_batch: Count = 1
    """Passes over a step's completions."""
    num_mini_batches: Count = 1
    """Optimizer steps per pass; each pass deals the groups afresh."""

    @property
    def num_updates(self) -> int:
        """Optimizer steps of one step."""
        return self.num_epochs_per_batch * self.num_mini_batches

    def rules(self, here: str, run: Any) -> Iterator[str]:
        """Groups are dealt whole."""
        if self.num_mini_batches > self.num_prompts_per_step:
            yield (
                f"{here}.num_mini_batches={self.num_mini_batches} is more than the "
                f"{self.num_prompts_per_step} groups of {here}.num_prompts_per_step; use at most "
                "that."
            )


class PolicyGradientRunConfig(SamplingRunConfig):
    """Sections of runs that make completions with high advantages more likely."""

    loss: LossConfig = LossConfig()

    @property
    def loop(self) -> UpdatesLoop:
        """The algorithm's own section."""
        loop = getattr(self, self.section)
        assert isinstance(loop, UpdatesLoop)
        return loop

    @property
    def max_updates(self) -> int:
        """Optimizer steps of the policy in the whole run."""
        return self.max_steps * self.loop.num_updates

    @property
    def kl_in_reward(self) -> bool:
        """Whether a KL is subtracted from rewards."""
        return self.loss.kl_coef > 0 and self.loss.kl_in == "reward"

    @property
    def masks_mismatch(self) -> bool:
        """Whether rows that engine and policy disagree about do not train."""
        return self.mismatch.action == "mask"

    @property
    def reuses_logprobs(self) -> bool:
        """Whether a batch's only optimizer step gives the policy's logprobs: rewards or masks
        may need them before it."""
        return self.loop.num_updates == 1 and not self.kl_in_reward and not self.masks_mismatch

    @property
    def keeps_reference(self) -> bool:
        """For the KL term, wherever it stands."""
        return self.loss.kl_coef > 0
