"""Distillation: a student imitates a teacher's next-token distributions.

On-policy (arXiv:2306.13649 with lambda = 1): the student samples completions, the teacher says what
it would have given in place of each token, and the loss is the divergence of the two distributions
there; no gradient goes through the sampling. Rewards are only logged. Off-policy
(arXiv:1503.02531): the same on given conversations. Both models' distributions are at the
temperature of sampling (off-policy: ``distillation.temperature``), and of each the teacher's
``teacher.top_k`` most likely tokens are compared (``losses/distillation.py``). Left out here:
mixtures of given and sampled texts, completions that the teacher samples, and teachers with another
vocabulary. One embedding may have more rows than the other if they are padding, without tokens: the
ids that only one model has are left out of its distributions, as if their logits were -infinity.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace

from nemo_like.algorithms import setup as on_policy
from nemo_like.algorithms import text_rows
from nemo_like.algorithms.distillation.config import DistillationConfig, OffPolicyDistillationConfig
from nemo_like.algorithms.grpo.loop import batch_metrics
from nemo_like.algorithms.processes import Processes, find_model
from nemo_like.algorithms.run import Run
from nemo_like.algorithms.self_check import check_sampled, gap_check, warn_of_gap
from nemo_like.config.policy import LoraConfig
from nemo_like.data import conversations
from nemo_like.data.chat import ChatTokenizer
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.errors import UserError
from nemo_like.losses.distillation import DistillationLoss
from nemo_like.models.resolve import resolve_model
from nemo_like.planning.layout import parallel_sizes
from nemo_like.planning.model_fit import check_model_fits
from nemo_like.planning.model_shape import number, read_settings
from nemo_like.planning.resources import plan_run
from nemo_like.policy.policy import Policy
from nemo_like.policy.process import policy_group

AnyConfig = DistillationConfig | OffPolicyDistillationConfig


@dataclass(frozen=True, kw_only=True)
class Compared:
    """How much of two distributions is compared."""

    top_k: int
    vocabulary: int | None = None
    """Ids from here on are padding that only the teacher has. None: there is none."""
    student_vocabulary: int | None = None
    """Ids from here on are padding that only the student has. None: there is none."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """The frozen model, and how much of its distributions is compared."""

    model: Policy
    compared: Compared

    def answer(self, batch: RemoteBatch) -> RemoteBatch:
        """``batch`` with token columns ``teacher_ids`` and ``teacher_logprobs``."""
        k, vocabulary = self.compared.top_k, self.compared.vocabulary
        return text_rows.in_parts(batch, lambda part: self.model.top_logprobs(part, k, vocabulary))


def run_distillation(config: DistillationConfig, processes: Processes) -> None:
    """Everything from a run's processes to a trained model in ``run.dir``: on-policy."""
    run = processes.run
    with run.start_phase("prompts"):
        teacher_path, compared = find_teacher(config, processes.model_path)
        prepared = on_policy.prepare(config, processes.rows, processes.model_path)
    setup = on_policy.start(config, processes, prepared)
    model = start_teacher(config, run, processes.stack, setup, teacher_path)
    train_on_samples(config, setup, Teacher(model=model, compared=compared), run)
    _finish(config, setup.policy, run)


def run_off_policy_distillation(config: OffPolicyDistillationConfig) -> None:
    """Everything from a configuration to a trained model in ``run.dir``: on given texts."""
    model_path = find_model(config)
    teacher_path, compared = find_teacher(config, model_path)
    with Run(config, "distillation") as run, ExitStack() as stack:
        with run.start_phase("data"):
            rows = text_rows.prepare(config, conversations.load, model_path)
        temperature = config.distillation.temperature
        setup = text_rows.start(
            config, run, rows, stack, model_path=model_path, temperature=temperature
        )
        model = start_teacher(config, run, stack, setup, teacher_path)
        text_rows.restore(config, run, setup)
        train_on_texts(config, setup, Teacher(model=model, compared=compared), run)
        _finish(config, setup.policy, run)


def train_on_samples(
    config: DistillationConfig, setup: on_policy.Setup, teacher: Teacher, run: Run
) -> None:
    """The loop of on-policy distillation."""
    policy, rollouts = setup.policy, setup.rollouts
    loss = DistillationLoss(config.loss, teacher.compared.student_vocabulary)
    for step in run.steps(
        config.max_steps,
        {"policy": policy},
        setup.loader,
        rollouts if config.validates else None,
        config.validation.every_steps,
    ):
        setup.meter.pop()  # what a validation before this step came to
        batch, metrics = rollouts.next_batch(step)  # refits first if its weights are stale
        num_made = step - run.first_step
        check_sampled(config, batch, policy.weight_version, num_made)
        with run.span("teacher"):
            batch = teacher.answer(batch)
        with run.span("train"):
            check = gap_check(config, num_made)
            metrics |= policy.train(batch, loss, on_policy=True, check=check)
        warn_of_gap(config, metrics)
        run.log(metrics | batch_metrics(batch) | setup.meter.pop())


def train_on_texts(
    config: OffPolicyDistillationConfig, setup: text_rows.TextSetup, teacher: Teacher, run: Run
) -> None:
    """The loop of off-policy distillation."""
    loss = DistillationLoss(config.loss, teacher.compared.student_vocabulary)
    if setup.held_out is not None:
        with run.start_phase("teacher"):
            setup = replace(setup, held_out=teacher.answer(setup.held_out))
    for _ in run.steps(
        setup.rows.max_steps,
        {"policy": setup.policy},
        setup.rows.loader,
        text_rows.HeldOutLoss(setup, loss, run) if setup.held_out is not None else None,
        config.validation.every_steps,
    ):
        with run.span("teacher"):
            batch = teacher.answer(setup.next_batch())
        with run.span("train"):
            metrics = setup.policy.train(batch, loss)
        run.log(metrics | setup.metrics(batch))


def find_teacher(config: AnyConfig, student_path: str) -> tuple[str, Compared]:
    """The teacher's folder, and how much of its distributions is compared.

    Raises UserError if there is no such model, if it can't be laid out as the policy is, or if its
    vocabulary is not the student's but for padding.
    """
    assert config.teacher.model is not None
    folder = resolve_model(config.teacher.model, "teacher.model")
    check_model_fits(config.policy, len(plan_run(config).policy), folder)
    student = resolve_model(student_path)
    sizes = [number(read_settings(path), "vocab_size") for path in (folder, student)]
    said = f"teacher.model={config.teacher.model} has another vocabulary than policy.model"
    remedy = "their distributions cannot be compared; use a teacher of the student's family"
    theirs, ours = (ChatTokenizer(str(path)).token_ids() for path in (folder, student))
    of_teacher, of_student = (size or max(ours.values()) + 1 for size in sizes)
    common = min(of_teacher, of_student)
    if of_teacher != of_student and (theirs != ours or max(ours.values()) >= common):
        raise UserError(f"{said}: {of_teacher} tokens, and not {of_student}; {remedy}.")
    if different := sorted(token for token, _ in theirs.items() ^ ours.items()):
        token = different[0]
        raise UserError(
            f"{said}: the token {token!r} has the id {theirs.get(token)} there, and "
            f"{ours.get(token)} in the student's tokenizer; {remedy}."
        )
    _check_slices(config, max(of_teacher, of_student), common)
    return str(folder), Compared(
        top_k=min(config.teacher.top_k or common, common),
        vocabulary=common if of_teacher > common else None,
        student_vocabulary=common if of_student > common else None,
    )


def _check_slices(config: AnyConfig, vocabulary: int, common: int) -> None:
    """Every tensor-parallel rank must have a row of the head that both models have."""
    tp = parallel_sizes(config.policy, len(plan_run(config).policy)).tp
    if vocabulary % tp == 0 and vocabulary // tp * (tp - 1) >= common:
        raise UserError(
            f"policy.parallel.tensor_parallel_size={tp} gives a rank nothing but padding of the "
            f"{vocabulary} rows of the larger vocabulary, of which {common} are compared; use a "
            "smaller size."
        )


def start_teacher(
    config: AnyConfig,
    run: Run,
    stack: ExitStack,
    setup: on_policy.Setup | text_rows.TextSetup,
    model_path: str,
) -> Policy:
    """Bring the teacher up on the policy's bundles, laid out like it; ``stack`` ends it."""
    teacher = config.policy.replace(lora=LoraConfig())  # nothing of it trains
    group = policy_group(
        teacher,
        config.cluster,
        setup.cluster,
        log_dir=run.log_dir,
        role="teacher",
        meter=setup.meter,
    )
    model = Policy(
        teacher,
        config.cluster,
        group,
        model_path=model_path,
        temperature=setup.policy.temperature,
        max_steps=1,
        trains=False,
    )
    stack.callback(model.shutdown)
    with run.start_phase("teacher"):
        model.start()
    return model


def _finish(config: AnyConfig, policy: Policy, run: Run) -> None:
    if config.checkpoint.export:
        policy.export(str(run.dir / "final"))
    run.finish(teacher=config.teacher.model)
