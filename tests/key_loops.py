"""A run as its algorithm makes it, in a real folder, with stand-ins for the ranks of its workers.

They answer as models and engines would, and keep what they are asked: no process is started, and
nothing is trained.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch

from nemo_like.algorithms.rows import read_rows
from nemo_like.algorithms.session import Session, find_model
from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.compose import registry
from nemo_like.config.environment import EnvironmentConfig
from nemo_like.config.sampling import SamplingRunConfig
from nemo_like.config.section import Section
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.distributed.virtual_cluster import Bundle
from nemo_like.distributed.waiting import DriverMeter
from nemo_like.distributed.worker import RankLayout
from nemo_like.distributed.worker_group import Pending, WorkerGroup, worker_contexts
from nemo_like.generation.protocol import EngineConfig
from nemo_like.generation.vllm.settings import engine_args
from nemo_like.losses.advantages import Moments
from nemo_like.losses.protocol import Denominators
from nemo_like.losses.value import TokenAdvantages, WhitenedAdvantages
from nemo_like.observe.metrics import Metric, Metrics
from nemo_like.planning.layout import parallel_sizes
from nemo_like.planning.offload import Placement
from nemo_like.planning.resources import plan_run
from nemo_like.policy.worker import SenderAddress, Started
from nemo_like.rewards.protocol import RewardResult
from nemo_like.rollout.trajectory import RolloutTask, Sample
from nemo_like.rollout.worker import RolloutRequest, RolloutResult
from nemo_like.run.run import Run

NUM_ROWS, TOKENS, TOP_K = 20, 9, 5
ENGINE_ARGUMENTS = ("max_num_seqs", "gpu_memory_utilization", "enforce_eager")


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
            keys.GROUP_IDS: torch.arange(NUM_ROWS) // 4,
            keys.SAMPLE_MASK: torch.ones(NUM_ROWS, dtype=torch.bool),
            keys.NUM_LOSS_TOKENS: TOKENS - 3 - torch.arange(NUM_ROWS) % 4,
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


def derived(make: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """What a rank computes of ``local_rows``."""
    batch = local_rows()
    if isinstance(make, WhitenedAdvantages):
        batch.tokens[keys.ADVANTAGES] = batch.tokens[keys.VALUES]
    return make(batch)


def shown(value: Any) -> Any:
    """What a worker is sent, as it would use it: of a section only what is computed from it."""
    match value:
        case EnvironmentConfig():  # read as it is, by reward processes
            return value.model_dump()
        case Section():
            return type(value).__name__
        case EngineConfig():
            lora = None if value.lora is None else value.lora.model_dump()
            return engine_args(value, ENGINE_ARGUMENTS, 80 << 30), lora
        case torch.Tensor():
            return value.tolist()
        case RemoteBatch():
            return shown([value.lengths, value.rows])
        case TokenAdvantages() | WhitenedAdvantages():
            return shown(derived(value)[0])
        case dict():
            return {name: shown(one) for name, one in value.items()}
        case list() | tuple():
            plain = all(type(one) in (int, float) for one in value)
            return list(value) if plain else [shown(one) for one in value]
    if hasattr(value, "needs"):  # a loss
        return shown(numbers_of(value)[0])
    if is_dataclass(value):
        return {field.name: shown(getattr(value, field.name)) for field in fields(value)}
    return value


class Ranks:
    """Every rank of a model or of generation: its methods are those of their workers."""

    weight_version = 0

    @cached_property
    def nothing(self) -> Any:
        """What tokens are; nobody looks at them."""
        return ray.put(None)

    def start(self, setup: Any, *where: Any) -> Started:
        return Started(num_trained=1, placement=Placement(offload="none"))

    def rollout(self, request: RolloutRequest) -> RolloutResult:
        tasks = request.tasks
        index = torch.tensor([task.index for task in tasks])
        prompts = torch.tensor([task.group for task in tasks])
        # All rewards of every third group are equal.
        rewards = torch.where(prompts % 3 == 0, 2, (prompts + index * index) % 5).double()
        if request.tasks[0].request_id.startswith("validation"):
            # Rises and falls, so that the best checkpoint is neither the first nor the last.
            rewards -= abs(self.weight_version - 2)
        num_tokens = (3 + (prompts + index) % 6).clamp(max=request.sampling.max_new_tokens)
        samples = map(_sample, tasks, rewards.tolist())
        return RolloutResult(
            tokens=self.nothing,
            lengths=num_tokens + torch.tensor([len(task.row.prompt_ids) for task in tasks]),
            rows={
                keys.REWARDS: rewards,
                keys.SAMPLE_MASK: torch.ones(len(tasks), dtype=torch.bool),
                keys.NUM_LOSS_TOKENS: num_tokens,
                keys.TRUNCATED: index % 3 == 1,
                keys.GROUP_IDS: prompts,
                keys.SIBLINGS: index,
                keys.SEEDS: torch.tensor([task.seed for task in tasks]),
                keys.MEAN_VERSIONS: torch.full((len(tasks),), float(self.weight_version)),
                keys.WEIGHT_VERSIONS: torch.full((len(tasks),), self.weight_version),
                keys.NEWEST_VERSIONS: torch.full((len(tasks),), self.weight_version),
                keys.NUM_OLDER: torch.zeros(len(tasks), dtype=torch.int64),
            },
            metrics={},
            errors={},
            dropped_metrics={},
            samples=tuple(samples) if request.with_samples else (),
        )

    def load_weights(self, version: int, adapters_only: bool = False) -> float:
        self.weight_version = version
        return 0.0

    def send_weights(self, version: int, adapters_only: bool) -> float:
        return 0.0

    def open_sender(self, *how: Any) -> SenderAddress:
        return SenderAddress(ipc="somewhere")  # pyright: ignore

    def logprobs(self, shard: Any, with_policy: bool, kl: Any) -> Any:
        found = torch.arange(len(shard.batch), dtype=torch.float64)
        rows = {keys.MEAN_MISMATCHES: found * 1e-6} if with_policy else {}
        return self.nothing, {}, rows | ({keys.REFERENCE_KL: found} if kl else {})

    def score(self, *how: Any) -> Any:
        return self.nothing

    def top_logprobs(self, *how: Any) -> Any:
        return self.nothing

    def derive(self, batch: RemoteBatch, make: Any) -> Any:
        return self.nothing, derived(make)[1] or Moments()

    def train(self, shard: Any, loss: Any, *how: Any) -> Metrics:
        metrics = numbers_of(loss)[1]
        metrics.pop("train/max_log_ratio", None)  # of a policy that has moved: no first step's
        self.weight_version += 1
        return metrics | {"train/loss": Metric(1.0 / self.weight_version)}

    def evaluate(self, *how: Any) -> Metrics:
        return {"train/loss": Metric(1.0 + abs(self.weight_version - 2))}

    def state_bytes(self) -> int:
        return 0

    def save(self, folder: str) -> None:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "weights").write_text(str(self.weight_version))

    def load(self, folder: str) -> None:
        self.weight_version = int((Path(folder) / "weights").read_text())

    def __getattr__(self, method: str) -> Callable[..., None]:
        """What gives no answer: of ``open_store``, ``sleep``, ``export`` and the like."""
        return lambda *_: None


def _sample(task: RolloutTask, reward: float) -> Sample:
    return Sample(
        prompt=task.group,
        index=task.index,
        text="t",
        result=RewardResult(reward=reward / 4, answer=str(task.index)),
        num_tokens=3,
        truncated=False,
    )


class CalledHere(WorkerGroup[Any]):
    """A worker group without processes: ``Ranks`` in this one."""

    def __init__(
        self, role: str, layout: RankLayout, log_dir: str, ranks: Ranks | None = None
    ) -> None:
        self.role, self.layout, self.ranks = role, layout, ranks or Ranks()
        self.timeout_s, self.meter, self.calls, self.watches = 1e9, DriverMeter(), {}, {}
        size = layout.world_size
        place: Any = None
        bundle = Bundle(group=place, index=0, node_id="", address="", gpu_id=None)
        self.bundles = [[bundle]] * size
        self.contexts = worker_contexts(role, self.bundles, log_dir)
        self.actors = [None] * size
        self.asked: list[Any] = []
        self._answers: dict[Any, Any] = {}
        """By reference; those of answers that were read serve again."""
        self._free: list[Any] = []

    def _send(
        self, work: dict[int, tuple[Any, Any]], method: Callable[..., Any], **_: Any
    ) -> Pending[Any]:
        name, refs = method.__name__, {}
        for rank, (args, kwargs) in work.items():
            self.asked.append((name, rank, shown(args), kwargs))
            ref = self._free.pop() if self._free else ray.put(None)
            self._answers[ref] = getattr(self.ranks, name)(*args, **kwargs)
            refs[ref] = rank
        return Pending(group=self, refs=refs, phase=name)

    def submit_missing(self, paths: list[str]) -> Pending[list[str]]:
        self.asked.append(("missing", paths))
        ref = ray.put(None)
        self._answers[ref] = []
        return Pending(group=self, refs={ref: 0}, phase="start-up")

    def result(self, ref: Any, rank: int, when: str) -> Any:
        self._free.append(ref)
        return self._answers.pop(ref)

    def watch(self, method: Any) -> None:
        pass

    def shutdown(self) -> None:
        pass


@dataclass(kw_only=True)
class SessionHere(Session):
    """A session of such groups; ``others`` are those of its further models."""

    others: dict[str, CalledHere]

    def new_group(self, config: Any, model_path: str, role: str) -> Any:
        size = len(self.cluster.plan.policy)
        self.others[role] = _models(config, role, size, self.run.log_dir)
        self.look_for_folders(self.others[role], model_path)
        return self.others[role]


def _models(
    config: Any, role: str, size: int, log_dir: str, ranks: Ranks | None = None
) -> CalledHere:
    return CalledHere(role, RankLayout(parallel_sizes(config, size).axes), log_dir, ranks)


def looped(config: Any, folder: Path, of_policy: Ranks | None = None) -> str:
    """Make a run of ``config``: what its workers were asked, and the files that are left.

    ``of_policy``: the policy's ranks, if they are to answer otherwise.
    """
    config = config.replace(run=config.run.replace(dir=str(folder)))
    name, model, plan = registry.name_of(type(config)), find_model(config), plan_run(config)
    with Run(config, name) as run, ExitStack() as stack:
        samples = isinstance(config, SamplingRunConfig)
        policy = _models(config.policy, "policy", len(plan.policy), run.log_dir, of_policy)
        generation = CalledHere("generation", RankLayout({"dp": len(plan.generation)}), run.log_dir)
        cluster: Any = SimpleNamespace(plan=plan)
        session = SessionHere(
            run=run,
            stack=stack,
            model_path=model,
            cluster=cluster,
            meter=DriverMeter(),
            policy_group=policy,
            rollout_group=generation if samples else None,
            rows=read_rows(config) if samples else {},
            others={},
        )
        session.look_for_folders(policy, model)
        registry.find(name).loop()(config, session)
    groups = {"policy": policy, "generation": generation, **session.others}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    report = folder / "eval.json"
    left = {
        "calls": {role: group.asked for role, group in groups.items()},
        "records": [(each["step"], sorted(each)) for each in records],
        "checkpoints": sorted(path.name for path in (folder / "checkpoints").glob("*")),
        "tensorboard": (folder / "tensorboard").is_dir(),
        "report": report.read_text() if report.is_file() else "",
    }
    return repr(left).replace(str(folder), "FOLDER")
