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

from dataclasses import dataclass

from nemo_like.algorithms.distillation.config import DistillationConfig, OffPolicyDistillationConfig
from nemo_like.algorithms.policy_gradient import training_metrics
from nemo_like.algorithms.sampling import Sampling, start_sampling
from nemo_like.algorithms.session import Session
from nemo_like.algorithms.texts import Texts, in_parts, restore, start_texts
from nemo_like.config.optimizer import LoraConfig
from nemo_like.data import conversations
from nemo_like.data.chat import ChatTokenizer
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.errors import UserError
from nemo_like.losses.distillation import DistillationLoss
from nemo_like.models.resolve import resolve_model
from nemo_like.planning.layout import parallel_sizes
from nemo_like.planning.model_shape import Role, number, read_settings
from nemo_like.planning.offload import Neighbours
from nemo_like.planning.placement import check_model_fits
from nemo_like.planning.resources import plan_run
from nemo_like.policy.remote_model import RemoteModel

AnyConfig = DistillationConfig | OffPolicyDistillationConfig


@dataclass(frozen=True, kw_only=True)
class Compared:
    """How much of two distributions is compared."""

    top_k: int
    vocabulary: int | None = None
    """Ids from here on are padding that only the teacher has. None: there is none."""
    student_vocabulary: int | None = None
    """Ids from here on are padding that only the student has. None: there is none."""


def run(config: DistillationConfig, session: Session) -> None:
    """From a run's processes to a trained model in ``run.dir``, on the student's own samples."""
    teacher_path, compared = find_teacher(config, session.model_path)
    neighbours = teacher_memory(config, session, teacher_path)
    live = start_sampling(config, session, neighbours=neighbours)
    teacher = start_teacher(config, session, live.policy, teacher_path)
    train(config, live, teacher, compared)
    session.finish({"final": live.policy}, teacher=config.teacher.model)


def train(
    config: DistillationConfig, live: Sampling, teacher: RemoteModel, compared: Compared
) -> None:
    """The loop on the student's own samples."""
    loss = DistillationLoss(config.loss, compared.student_vocabulary)
    span = live.session.run.span
    for _, batch, metrics in live.batches():
        with span("teacher"):
            batch = with_teacher(batch, teacher, compared)
        with span("train"):
            check = live.mismatch_check()
            metrics |= live.policy.train(batch, loss, check=check)
        live.log(metrics | training_metrics(batch))


def run_off_policy(config: OffPolicyDistillationConfig, session: Session) -> None:
    """From a run's processes to a trained model in ``run.dir``, on given texts."""
    teacher_path, compared = find_teacher(config, session.model_path)
    temperature = config.distillation.temperature
    neighbours = teacher_memory(config, session, teacher_path)
    live = start_texts(
        config, session, conversations.load, temperature=temperature, neighbours=neighbours
    )
    teacher = start_teacher(config, session, live.policy, teacher_path)
    restore(config, live)
    train_on_texts(config, live, teacher, compared)
    session.finish({"final": live.policy}, teacher=config.teacher.model)


def train_on_texts(
    config: OffPolicyDistillationConfig, live: Texts, teacher: RemoteModel, compared: Compared
) -> None:
    """The loop on given texts."""
    if live.held_out is not None:
        with live.session.run.start_phase("teacher"):
            live.held_out = with_teacher(live.held_out, teacher, compared)
    loss = DistillationLoss(config.loss, compared.student_vocabulary)
    live.steps(loss, lambda batch: with_teacher(batch, teacher, compared))


def with_teacher(batch: RemoteBatch, teacher: RemoteModel, compared: Compared) -> RemoteBatch:
    """``batch`` with token columns ``teacher_ids`` and ``teacher_logprobs``."""
    scored = in_parts(
        batch, lambda part: teacher.top_logprobs(part, compared.top_k, compared.vocabulary)
    )
    teacher.release_memory()  # the policy trains next, on the same devices
    return scored


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


def teacher_memory(config: AnyConfig, session: Session, model_path: str) -> Neighbours:
    """What the teacher will take of the policy's GPUs."""
    plan, teacher = session.cluster.plan, config.policy.replace(lora=LoraConfig())
    if not plan.uses_gpus:
        return Neighbours()
    return Neighbours().and_model(model_path, teacher, len(plan.policy), Role(trains=False))


def start_teacher(
    config: AnyConfig, session: Session, student: RemoteModel, model_path: str
) -> RemoteModel:
    """Bring the teacher up on the policy's bundles, laid out like it; the session ends it."""
    assert config.teacher.model is not None
    # Nothing of it trains.
    teacher = config.policy.replace(model=config.teacher.model, lora=LoraConfig())
    group = session.new_group(teacher, model_path, "teacher")
    model = RemoteModel(
        teacher,
        config.cluster,
        group,
        model_path=model_path,
        temperature=student.temperature,
        max_steps=1,
        role=Role(trains=False),
    )
    with session.run.start_phase("teacher"):
        session.check_folders()
        model.start()
    return model
