"""Where the effect of a key is looked for: each function takes a configuration, and gives what its
last reader makes of it.
"""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from nemo_like.algorithms.setup import _rollout_setup

from nemo_like.algorithms import evaluation, setup, text_rows
from nemo_like.algorithms.distillation.loop import find_teacher
from nemo_like.algorithms.dpo.config import DPOConfig
from nemo_like.algorithms.eval.config import EvalConfig
from nemo_like.algorithms.eval.report import Measured
from nemo_like.algorithms.ppo.config import PPOConfig
from nemo_like.algorithms.ppo.loop import find_critic
from nemo_like.algorithms.rm.config import RewardModelConfig
from nemo_like.algorithms.rows import read_rows
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.data import conversations, preferences
from nemo_like.generation.vllm.settings import engine_args
from nemo_like.launch.slurm_script import BatchJob, render_script
from nemo_like.models.resolve import resolve_model
from nemo_like.planning.layout import parallel_sizes, resolve_mesh_shape
from nemo_like.planning.resources import plan_run
from nemo_like.policy.parallel.stages import bins_for_pipeline, stages_of_rank
from nemo_like.rewards.protocol import Grade
from nemo_like.rollout.rollout import Sample
from nemo_like.rollout.sources import SyncRolloutSource
from nemo_like.rollout.weight_sync import WeightSync
from tests.key_loops import looped
from tests.key_steps import policy_steps


def placed(config: Any) -> Any:
    """Bundles, who sits in which, and what each rank of the policy is for."""
    plan = plan_run(config)
    parallel = resolve_mesh_shape(config.policy, len(plan.policy))
    stages = [stages_of_rank(parallel, rank) for rank in range(parallel.pipeline_parallel_size)]
    sizes = parallel_sizes(config.policy, len(plan.policy))
    return plan, sizes, stages, bins_for_pipeline(parallel)


def queued(config: Any) -> str:
    """The batch script that ``nemo-like slurm`` hands to Slurm."""
    job = BatchJob(name="run", config=config, commands=[["python"]], folder=Path("/mine"))
    return render_script(job, Path("ray.sbatch"))


@cache
def _prepared(shown: str) -> Any:
    config = _PREPARED[shown]
    model = str(resolve_model(config.policy.model))
    if isinstance(config, EvalConfig):
        return evaluation.prepare(config, read_rows(config), model)
    if isinstance(config, SamplingRunConfig):
        return setup.prepare(config, read_rows(config), model)
    pairs = isinstance(config, DPOConfig | RewardModelConfig)
    return text_rows.prepare(config, (preferences if pairs else conversations).load, model)


_PREPARED: dict[str, Any] = {}


def _ready(config: Any) -> Any:
    _PREPARED[repr(config)] = config
    return _prepared(repr(config))


def read(config: Any) -> Any:
    """The rows that a run reads, as tokens, in the order in which it uses them."""
    found = _ready(config)
    if isinstance(config, SamplingRunConfig):
        loader = found.loader
        rows = loader.next_rows(2 * loader.rows_left)
        loader.load_state(loader.state() | {"epoch": 0, "position": 0})
        held_out = [row.prompt_ids for row in found.validation_rows]
        return [row.prompt_ids for row in rows], held_out, found.max_model_len
    batches = [next(found.loader) for _ in range(found.max_steps)]
    found.loader.load_state(found.loader.state() | {"epoch": 0, "position": 0})
    parts = [each for each in (found.train, found.held_out) if each is not None]
    tokens = [[column.tolist() for column in each.tokens.values()] for each in parts]
    return batches, [each.lengths.tolist() for each in parts], tokens


class AskedError(Exception):
    """Ends a call as soon as what it asks of workers is known."""


class Replicas:
    """The handle of generation, and its group: notes what its workers would be sent."""

    def __init__(self, num: int) -> None:
        self.world_size, self.group, self.sent = num, self, ()

    def scatter(self, _: Any, requests: Sequence[Any]) -> Any:
        self.sent = requests
        raise AskedError

    def submit_each(self, _: Any, *arguments: Any) -> Any:
        self.sent = arguments
        raise AskedError


def _source(config: Any) -> tuple[SyncRolloutSource, Replicas]:
    found, replicas = _ready(config), Replicas(len(plan_run(config).generation))
    source: Any = SyncRolloutSource(
        config,
        generation=replicas,  # pyright: ignore
        sync=SimpleNamespace(is_due=False),  # pyright: ignore
        loader=found.loader,
        validation_rows=found.validation_rows,
        stop_token_ids=found.eos_token_ids,
        span=lambda _: nullcontext(),
    )
    return source, replicas


def sampled(config: Any) -> Any:
    """Requests of a training step: prompts, seeds and how to sample, for each replica."""
    source, replicas = _source(config)
    with suppress(AskedError):
        source.next_batch(1)
    loader = _ready(config).loader
    loader.load_state(loader.state() | {"epoch": 0, "position": 0})
    return repr(replicas.sent)


def validated(config: Any) -> Any:
    """Requests of a validation, or of an evaluation's first step."""
    source, replicas = _source(config)
    with suppress(AskedError):
        if isinstance(config, EvalConfig):
            rows = _ready(config).validation_rows[: config.eval.num_prompts_per_step]
            source.sample(1, rows, 0, config.eval)
        else:
            source.validate(0)
    return repr(replicas.sent)


def started(config: Any) -> Any:
    """What generation workers start with: engine, vLLM's arguments, environment."""
    processes: Any = SimpleNamespace(
        run=SimpleNamespace(dir=Path("never-made"), first_step=0),
        cluster=SimpleNamespace(plan=plan_run(config)),
        model_path=str(resolve_model(config.policy.model)),
    )
    made = _rollout_setup(config, processes, _ready(config))
    known = ("max_num_seqs", "gpu_memory_utilization", "enforce_eager")
    return made, engine_args(made.engine, known, 80 << 30)


def sent(config: Any) -> Any:
    """What a policy is asked for when engines connect to it."""
    replicas: Any = Replicas(1)
    with suppress(AskedError):
        engine: Any = SimpleNamespace(sleep=False, lora=None)
        WeightSync(config.refit, replicas, replicas, plan_run(config), engine)
    return repr(replicas.sent)


def trained(config: Any) -> Any:
    """Two steps of the policy's engine; of a model with scores where that is what trains."""
    output = "values" if isinstance(config, RewardModelConfig) else "logprobs"
    model = str(resolve_model(config.policy.model))
    return policy_steps(model, config.policy, output, config.max_steps or 4)


def critic_trained(config: PPOConfig) -> Any:
    """Two steps of the critic's engine; None where there is none."""
    critic = find_critic(config, str(resolve_model(config.policy.model)))
    if critic is None:
        return None
    return policy_steps(critic.model_path, critic.config, "values_before", critic.max_updates)


def taught(config: Any) -> Any:
    """The teacher's folder, and how much of its distributions is asked for."""
    return find_teacher(config, str(resolve_model(config.policy.model)))


def loop(config: Any) -> Any:
    """Everything that the algorithm's loop asks for, and what it leaves in its folder."""
    with TemporaryDirectory() as folder:
        return looped(config, Path(folder))


def again(config: Any) -> Any:
    """The loop in the folder of a run that has ended."""
    with TemporaryDirectory() as folder:
        looped(replace(config, run=replace(config.run, resume=False)), Path(folder))
        return looped(config, Path(folder))


def reported(config: EvalConfig) -> Any:
    """The report on two completions of each row; some pass, and answers differ."""
    rows = _ready(config).validation_rows
    measured = Measured(config, rows)
    samples = [
        Sample(
            prompt=prompt,
            index=index,
            text="t",
            grade=Grade(reward=0.5 * ((prompt + index) % 3), answer=str(index)),
            num_tokens=3,
            truncated=False,
        )
        for prompt in range(len(rows))
        for index in range(config.eval.num_generations_per_prompt)
    ]
    return list(measured.add(samples)), measured.report()
