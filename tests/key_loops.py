"""An algorithm's own loop in a real run folder, with stand-ins for models and engines that remember
what they are asked: no process is started, and nothing is trained.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from nemo_like.algorithms.setup import Setup
from nemo_like.algorithms.text_rows import TextRows, TextSetup
from nemo_like.config.rollout_checks import has_validation

from nemo_like.algorithms import distillation, dpo, grpo, ppo, reward_model, sft
from nemo_like.algorithms.distillation.config import DistillationConfig, OffPolicyDistillationConfig
from nemo_like.algorithms.dpo.config import DPOConfig
from nemo_like.algorithms.eval.config import EvalConfig
from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.algorithms.ppo.config import PPOConfig
from nemo_like.algorithms.rm.config import RewardModelConfig
from nemo_like.algorithms.sft.config import SFTConfig
from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.data.loader import EpochLoader
from nemo_like.distributed.driver_meter import DriverMeter
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.losses.advantages import Moments
from nemo_like.losses.protocol import Denominators
from nemo_like.observe.metrics import Metric, Metrics
from nemo_like.run.run import Run

NUM_ROWS, TOKENS, TOP_K = 20, 9, 5


def local_rows() -> TensorBatch:
    """Groups of four, of unequal rewards, lengths and logprobs; every column of a loss."""
    draw = torch.Generator().manual_seed(1)
    n = NUM_ROWS * TOKENS
    logprobs = -2 + 0.5 * torch.randn(n, generator=draw)
    position = torch.arange(n) % TOKENS
    # Rows of 3 to 6 trained tokens.
    first = (3 + torch.arange(NUM_ROWS) % 4).repeat_interleave(TOKENS)
    teacher = torch.randn(n, TOP_K + 3, generator=draw).log_softmax(-1)
    return TensorBatch(
        lengths=torch.full((NUM_ROWS,), TOKENS),
        tokens={
            keys.INPUT_IDS: torch.randint(3, 200, (n,), generator=draw),
            keys.LOSS_MASK: position >= first,
            keys.GENERATION_LOGPROBS: logprobs + 0.6 * torch.randn(n, generator=draw),
            keys.POLICY_LOGPROBS: logprobs,
            keys.REFERENCE_LOGPROBS: logprobs + 0.3 * torch.randn(n, generator=draw),
            keys.VALUES: torch.randn(n, generator=draw),
            keys.RETURNS: torch.randn(n, generator=draw),
            keys.TEACHER_IDS: torch.randint(0, 200, (n, TOP_K), generator=draw),
            keys.TEACHER_LOGPROBS: teacher[:, :TOP_K],
            keys.ENTROPIES: torch.rand(n, generator=draw),
        },
        rows={
            keys.ADVANTAGES: torch.randn(NUM_ROWS, generator=draw),
            keys.REWARDS: torch.randint(0, 5, (NUM_ROWS,), generator=draw).double(),
            keys.PROMPT_IDS: torch.arange(NUM_ROWS) // 4,
            keys.SAMPLE_MASK: torch.ones(NUM_ROWS, dtype=torch.bool),
            keys.NUM_LOSS_TOKENS: TOKENS - 3 - torch.arange(NUM_ROWS) % 4,
            keys.TRUNCATED: torch.arange(NUM_ROWS) % 3 == 0,
            keys.SEEDS: torch.arange(NUM_ROWS),
            keys.REFERENCE_KL: torch.rand(NUM_ROWS, generator=draw).double(),
        },
    )


def numbers_of(loss: Any) -> tuple[Any, Metrics]:
    """Value and gradient of a loss on ``local_rows``, away from what sampled them; its metrics."""
    batch = local_rows()
    draw = torch.Generator().manual_seed(2)
    current = batch.tokens[keys.POLICY_LOGPROBS] + torch.randn(batch.num_tokens, generator=draw)
    if loss.needs.ids_column:
        current = batch.tokens[keys.TEACHER_LOGPROBS] + 0.3 * torch.randn(
            batch.num_tokens, TOP_K, generator=draw
        )
    if not loss.needs.entropy:
        del batch.tokens[keys.ENTROPIES]
    current = current.clone().requires_grad_()
    whole = Denominators(tokens=float(batch.tokens[keys.LOSS_MASK].sum()), sequences=NUM_ROWS)
    value, metrics = loss(current, batch, whole)
    value.backward()
    assert current.grad is not None
    return (value.item(), current.grad.flatten().tolist(), sorted(metrics)), metrics


class StandIn:
    """Every model and engine of a run: answers as they would, and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.weight_version = 0
        self.temperature = 1.0

    def next_batch(self, step: int, *how: Any) -> Any:
        self.calls.append(("next_batch", step, [getattr(one, "__name__", one) for one in how]))
        rows = local_rows().rows
        rows[keys.WEIGHT_VERSIONS] = torch.full((NUM_ROWS,), self.weight_version)
        del rows[keys.ADVANTAGES]
        return RemoteBatch(lengths=torch.full((NUM_ROWS,), TOKENS), rows=rows), {}

    def validate(self, step: int) -> Any:
        self.calls.append(("validate", step))
        # Rises and falls, so that the best checkpoint is neither the first nor the last.
        names = ("validation/reward", "validation/loss")
        return {name: Metric(1.0 - abs(step - 2)) for name in names}

    def logprobs(self, batch: RemoteBatch, **how: Any) -> Any:
        self.calls.append(("logprobs", how))
        return {}

    def score(self, batch: RemoteBatch, column: str) -> None:
        self.calls.append(("score", column))

    def top_logprobs(self, batch: RemoteBatch, k: int, vocabulary: int | None = None) -> None:
        self.calls.append(("top_logprobs", k, vocabulary))

    def derive(self, batch: RemoteBatch, make: Any) -> Any:
        columns, summary = make(local_rows() if not hasattr(make, "moments") else _with_gae())
        self.calls.append(("derive", {name: one.tolist() for name, one in columns.items()}))
        return [summary if summary is not None else Moments()]

    def train(self, batch: RemoteBatch, loss: Any, check: Any = None, **how: Any) -> Any:
        rows = {name: column.tolist() for name, column in batch.rows.items()}
        numbers, metrics = numbers_of(loss)
        metrics.pop("train/max_log_ratio", None)  # of a policy that has moved: no first step's
        self.calls.append(("train", rows, numbers, getattr(check, "limits", None), how))
        self.weight_version += 1
        return metrics | {"train/loss": Metric(1.0 / self.weight_version)}

    def evaluate(self, batch: RemoteBatch, loss: Any, **how: Any) -> Any:
        self.calls.append(("evaluate", numbers_of(loss)[0], how))
        return {"train/loss": Metric(1.0 + abs(self.weight_version - 2))}

    def release_memory(self) -> None:
        pass

    def save(self, folder: str) -> None:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "weights").write_text(str(self.weight_version))

    def load(self, folder: str, weight_version: int) -> None:
        self.weight_version = weight_version


def _with_gae() -> TensorBatch:
    batch = local_rows()
    batch.tokens[keys.ADVANTAGES] = batch.tokens[keys.VALUES]
    return batch


class Position:
    """A loader of prompts, as a checkpoint sees it."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        pass


def looped(config: Any, folder: Path) -> Any:
    """Run the loop of ``config``'s algorithm; what was asked, and the files that are left."""
    config = replace(config, run=replace(config.run, dir=str(folder)))
    policy, critic = StandIn(), StandIn()
    with Run(config, "loop") as run:
        models: Any = {"policy": policy}
        if isinstance(config, PPOConfig) and config.critic.enabled:
            models["critic"] = critic
        run.restore(models, Position())
        if isinstance(config, EvalConfig):
            for _ in run.rounds(2):
                run.log({})
        elif isinstance(config, SamplingRunConfig):
            sampled_loop(config, policy, critic, run)
        else:
            _text_loop(config, policy, critic, run)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return {
        "policy": policy.calls,
        "critic": critic.calls,
        "records": [(each["step"], sorted(each)) for each in records],
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").glob("*")),
        "tensorboard": (folder / "tensorboard").is_dir(),
    }


def sampled_loop(config: Any, policy: Any, critic: Any, run: Run) -> None:
    """The loop of an algorithm that samples, with stand-ins for all that it calls."""
    with_critic = isinstance(config, PPOConfig) and config.critic.enabled
    setup: Any = Setup(
        policy=policy,
        critic=critic if with_critic else None,
        rollouts=policy,
        loader=Position(),  # pyright: ignore
        meter=DriverMeter(),
        cluster=None,  # pyright: ignore
    )
    match config:
        case GRPOConfig():
            grpo.train(config, setup, run)
        case PPOConfig():
            ppo.train(config, setup, run)
        case DistillationConfig():
            compared = distillation.Compared(top_k=config.teacher.top_k or 200)
            teacher = distillation.Teacher(model=critic, compared=compared)
            distillation.train_on_samples(config, setup, teacher, run)
        case _:
            raise AssertionError(type(config))


def _text_loop(config: Any, policy: Any, critic: Any, run: Run) -> None:
    rows = local_rows()
    unit = config.passes.rows_per_unit
    passes = config.passes
    loader = EpochLoader(
        range(NUM_ROWS // unit),
        batch_size=passes.units_per_step,
        num_epochs=passes.num_epochs if passes.max_steps is None else None,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        drop_last=passes.drop_last,
        fingerprint="",
    )
    remote = RemoteBatch(lengths=rows.lengths, rows=rows.rows)
    setup: Any = TextSetup(
        policy=policy,
        train=remote,
        held_out=remote if has_validation(config) else None,
        rows=TextRows(
            train=rows,
            held_out=None,
            loader=loader,
            rows_per_unit=unit,
            max_steps=passes.max_steps or passes.num_epochs * loader.steps_per_epoch,
        ),
        meter=DriverMeter(),
        cluster=None,  # pyright: ignore
    )
    match config:
        case SFTConfig():
            sft.train(config, setup, run)
        case DPOConfig():
            if not config.loss.reference_free:
                setup = dpo.with_reference_logprobs(setup, config.keeps_reference)
            dpo.train(config, setup, run, config.keeps_reference)
        case RewardModelConfig():
            reward_model.train(config, setup, run)
        case OffPolicyDistillationConfig():
            compared = distillation.Compared(top_k=config.teacher.top_k or 200)
            teacher = distillation.Teacher(model=critic, compared=compared)
            distillation.train_on_texts(config, setup, teacher, run)
        case _:
            raise AssertionError(type(config))
