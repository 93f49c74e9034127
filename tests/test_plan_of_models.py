"""Predicted memory of critics, reward models, teachers and adapters is that of real engines."""

from itertools import chain
from pathlib import Path

import pytest
import torch

from nemo_like.algorithms.distillation.config import DistillationConfig
from nemo_like.algorithms.grpo.config import GRPOConfig
from nemo_like.algorithms.sft.config import SFTConfig
from nemo_like.cli import main
from nemo_like.config.optimizer import LoraConfig, OptimizerConfig
from nemo_like.config.policy import PolicyConfig
from nemo_like.planning.memory import predict_memory
from nemo_like.planning.model_shape import GIB, ModelShape, Role, read_model_shape
from nemo_like.policy.trainer import Trainer
from nemo_like.policy.trainer_setup import TrainerSetup
from tests.key_steps import TEMPERATURE, alone, sum_of_squares
from tests.small_runs import accept
from tests.three_steps import denominators, make_rows


@pytest.fixture(scope="module", autouse=True)
def process_group():
    with alone():
        yield


def num_bytes(tensors):
    return sum(one.numel() * one.element_size() for one in tensors if one is not None)


class Watched:
    """An engine's real bytes: what stays, and gradients just before they are used."""

    def __init__(self, folder, config, role):
        setup = TrainerSetup(
            config=config,
            model_path=folder,
            max_steps=4,
            output="values" if role.scalar_head else "logprobs",
            trains=role.trains,
            with_reference=role.with_reference,
        )
        self.trainer = Trainer(setup, torch.device("cpu"))
        models = [*self.trainer.stages, *self.trainer.reference]
        self.parameters = num_bytes(p for one in models for p in one.parameters())
        self.gradients = 0

    def step(self):
        rows = make_rows(preference=False)

        def check(_):
            self.gradients = num_bytes(
                p.grad for one in self.trainer.stages for p in one.parameters()
            )

        known = denominators(rows)
        self.trainer.train([rows], sum_of_squares, known, TEMPERATURE, check=check)

    @property
    def optimizer(self):
        states = [s for one in chain(*self.trainer.optimizers) for s in one.state.values()]
        return num_bytes(v for s in states for v in s.values() if v.dim() > 0)


ADAPTERS = LoraConfig(rank=4)
FEW = LoraConfig(rank=3, targets=["q_proj", "down_proj"])


@pytest.mark.parametrize(
    ("role", "lora", "tied"),
    [
        (Role(with_reference=True), LoraConfig(), True),
        (Role(scalar_head=True), LoraConfig(), False),
        (Role(scalar_head=True), LoraConfig(), True),
        (Role(trains=False), LoraConfig(), False),
        (Role(), ADAPTERS, True),
        (Role(with_reference=True), FEW, False),
        (Role(scalar_head=True), ADAPTERS, False),
    ],
    ids=["reference", "critic", "tied critic", "teacher", "adapters", "few", "scored adapters"],
)
def test_predicted_sizes_are_those_of_a_real_engine(tiny_model, role, lora, tied):
    folder = tiny_model("llama", tied)
    config = PolicyConfig(lora=lora, micro_batch_tokens=512)
    shape = read_model_shape(Path(folder))
    phases = predict_memory(shape, config, 1, role=role, num_micro_batches=1)
    found = {phase.name: {k: round(v * GIB) for k, v in phase.parts.items()} for phase in phases}
    real = Watched(folder, config, role)
    assert found["start"] == {"parameters": real.parameters}
    assert ("values" in found) == role.scalar_head
    if not role.trains:
        assert list(found) == ["start", "logprobs"]
        assert found["logprobs"]["optimizer"] == found["logprobs"]["gradients"] == 0
        return
    real.step()
    step = found["optimizer"]
    assert (step["gradients"], step["optimizer"]) == (real.gradients, real.optimizer)


def test_each_optimizer_of_adapters_has_their_state(tiny_model):
    folder = tiny_model()
    for kind in ("sgd", "adamw"):
        config = PolicyConfig(lora=ADAPTERS, optimizer=OptimizerConfig(kind=kind))
        phases = predict_memory(read_model_shape(Path(folder)), config, 1)
        real = Watched(folder, config, Role())
        real.step()
        assert round(phases[-1].parts["optimizer"] * GIB) == real.optimizer


def plan_lines(capsys, *words):
    main(["plan", *words])
    return capsys.readouterr().out


def total(text, title):
    """The peak of the table under ``title``."""
    return float(text.partition(title)[2].partition("peak: ")[2].split()[0])


def test_the_plan_has_every_model_and_their_sum_where_they_share_bundles(capsys):
    ppo = plan_lines(capsys, "ppo")
    assert total(ppo, "of a critic rank, embedded") < total(ppo, "of a policy rank")
    assert "together: 0.214 GiB in the policy's train, beside what lasts of the critic" in ppo
    taught = plan_lines(capsys, "distillation", "teacher.model=embedded")
    assert total(taught, "of a teacher rank, embedded") < 0.2 * total(taught, "of a policy rank")
    assert "beside what lasts of the teacher" in taught


def test_the_plan_of_an_evaluation_trains_nothing(capsys):
    text = plan_lines(capsys, "eval", "cluster.gpus_per_node=1")
    assert "64 prompts x 1 completions = 64 rows a step, which train nothing" in text
    phases = {line.split()[0] for line in text.splitlines() if line}
    assert "start" in phases
    assert not {"logprobs", "train", "optimizer"} & phases


def test_the_plan_of_adapters_of_unknown_layers_says_what_it_lacks(capsys):
    known = plan_lines(capsys, "sft", "policy.lora.rank=2", "policy.lora.targets=[q_proj]")
    assert "peak:" in known
    unknown = plan_lines(capsys, "sft", "policy.lora.rank=2", "policy.lora.targets=[qkv]")
    assert "Memory is not predicted: policy.lora.targets: the formulas know q_proj" in unknown


def test_a_student_has_shares_beside_logits_and_a_critic_has_neither():
    config = PolicyConfig(dtype="bfloat16", micro_batch_tokens=100, logprob_chunk_tokens=10)
    shape = ModelShape(
        layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, head_dim=2, vocab=1000, tied=False
    )

    def logits(config, **role):
        phases = predict_memory(shape, config, 1, role=Role(**role))
        return {phase.name: round(phase.parts["logits"] * GIB) for phase in phases[1:3]}

    # Backwards: logits and shares in float32, and shares in 16 bits, of a chunk of 10.
    assert logits(config, keeps_probabilities=True)["train"] == (4 + 4 + 2) * 10 * 1000
    assert logits(config)["train"] == 2 * 4 * 10 * 1000  # two chunks' logits forwards are more
    assert logits(config, scalar_head=True) == {"values": 0, "train": 0}


def test_students_and_entropies_that_train_keep_probabilities():
    assert accept(GRPOConfig, loss={"entropy_coef": 0.01}).keeps_probabilities
    assert not accept(GRPOConfig).keeps_probabilities
    assert accept(DistillationConfig, teacher={"model": "embedded"}).keeps_probabilities
    assert not accept(SFTConfig).keeps_probabilities
