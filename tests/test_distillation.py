"""Distillation: logprobs of several ids, the teacher's columns, and whole runs that learn."""

import json
import math
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_like.algorithms.distillation.loop import Compared, find_teacher, with_teacher
from nemo_like.batch import keys
from nemo_like.compose.load import compose_config
from nemo_like.config.losses import DistillationLossConfig
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.errors import RunError, UserError
from nemo_like.losses.distillation import divergence
from nemo_like.models.resolve import resolve_model
from nemo_like.policy.distributions import logprobs_at, several, top_logprobs
from nemo_like.policy.head import Head
from tests.distillation_cases import CASES, answer, make_trainer
from tests.key_steps import alone
from tests.layouts import LAYOUTS
from tests.small_runs import ROOT, SEEDS, records, run_config
from tests.three_steps import VOCAB, make_rows

TOKENS, WIDTH, VOCABULARY, K = 7, 8, 17, 5
TEMPERATURE = 0.7


# Logprobs of several ids


def leaves(with_bias):
    """Hidden states, weight, bias (or None), and ids, of which one comes twice for a token."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape):
        return torch.randn(shape, generator=generator).requires_grad_()

    hidden, weight = leaf(TOKENS, WIDTH), leaf(VOCABULARY, WIDTH)
    ids = torch.randint(VOCABULARY, (TOKENS, K), generator=generator)
    ids[0, 1] = ids[0, 0]
    return hidden, weight, leaf(VOCABULARY) if with_bias else None, ids


def plain(hidden, weight, bias, scale=1.0, softcap=None):
    """All logprobs as the formulas have them, in float64."""
    logits = hidden.double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return (logits / TEMPERATURE).log_softmax(-1)


def near(actual, expected, bound=1e-6):
    size = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual.double(), expected.double(), atol=bound * size, rtol=0)


@pytest.mark.parametrize("chunk_tokens", [1, 3, TOKENS])
@pytest.mark.parametrize(
    "options", [{}, {"with_bias": True, "scale": 1.75, "softcap": 2.0}], ids=["plain", "all"]
)
def test_logprobs_at_ids_and_gradients_are_those_of_log_softmax(options, chunk_tokens):
    options = dict(options)
    hidden, weight, bias, ids = leaves(options.pop("with_bias", False))
    inputs = [each for each in (hidden, weight, bias) if each is not None]
    weights = torch.arange(TOKENS * K).view(TOKENS, K) - 9.0
    logs = plain(hidden, weight, bias, **options)
    expected = logs.gather(1, ids)
    head = Head(weight=weight, bias=bias, **options)
    chunks = {"temperature": TEMPERATURE, "chunk_tokens": chunk_tokens}
    actual, entropy = logprobs_at(hidden, ids, head, with_entropy=True, **chunks)
    near(actual, expected)
    near(entropy, -(logs.exp() * logs).sum(-1))
    gradients = torch.autograd.grad((actual * weights).sum(), inputs)
    for ours, theirs in zip(
        gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True
    ):
        near(ours, theirs)
    best, best_ids = top_logprobs(hidden, head, K, **chunks)
    wanted = logs.topk(K)
    assert torch.equal(best_ids, wanted.indices)
    near(best, wanted.values)
    whole, every = top_logprobs(hidden, head, VOCABULARY, **chunks)
    assert torch.equal(every, torch.arange(VOCABULARY).expand(TOKENS, -1))
    near(whole, logs)
    for none in top_logprobs(hidden[:0], head, K, **chunks):  # of a row that trains no token
        assert none.shape == (0, K)


def test_padding_is_left_out_as_worked_by_hand():
    # Logits of four ids, of which the last is padding with nearly all of the mass.
    theirs, ours = (
        Head(weight=torch.tensor(p).log()[:, None]) for p in ([2.0, 1, 1, 96], [1.0, 1, 2, 1e6])
    )
    hidden, chunks = torch.ones(1, 1), {"temperature": 1.0, "chunk_tokens": 1}
    logprobs, ids = top_logprobs(hidden, theirs.below(3), 3, **chunks)
    near(logprobs.exp(), torch.tensor([[0.5, 0.25, 0.25]]))
    assert ids.tolist() == [[0, 1, 2]]
    ours.weight.requires_grad_()
    student, entropy = logprobs_at(hidden, ids, ours.below(3), with_entropy=True, **chunks)
    near(student.exp(), torch.tensor([[0.25, 0.25, 0.5]]))
    near(entropy, torch.tensor([1.5 * math.log(2)]))
    loss = divergence(logprobs, student, DistillationLossConfig(kind="forward_kl"))
    near(loss, torch.tensor([0.25 * math.log(2)]))  # 1/2 log 2 + 0 + 1/4 log 1/2
    loss.sum().backward()
    near(ours.weight.grad[:, 0], torch.tensor([-0.25, 0, 0.25, 0]))  # student - teacher; none


@pytest.mark.parametrize("end", [None, 12])
def test_a_students_own_tokens_come_before_the_teachers_which_alone_are_of_common_ids(end):
    hidden, weight, _, ids = leaves(False)
    own, others = ids[:, :1].roll(1), ids % 12
    request = SimpleNamespace(
        ids=others,
        inputs=SimpleNamespace(target_ids=own[:, 0]),
        vocabulary=end,
        temperature=TEMPERATURE,
        top_k=0,
        with_entropy=True,
    )
    found = several(hidden, Head(weight=weight), request, 3)  # pyright: ignore
    logs = plain(hidden, weight, None)
    near(found[:1].t(), logs.gather(1, own))
    near(found[1], -(logs.exp() * logs).sum(-1))
    near(found[2:].t(), plain(hidden, weight[:end], None).gather(1, others))
    if end is not None:
        (gradient,) = torch.autograd.grad(found[:2].sum(), hidden)
        assert not gradient.any()


# Layouts


LOSS = DistillationLossConfig(kind="jsd", alpha=0.3)


@pytest.fixture(scope="module")
def pair(four_layers):
    """A student and a teacher of one vocabulary and other weights."""
    return four_layers("llama", True), four_layers("llama", False)


@pytest.fixture(scope="module")
def one_rank(pool, pair):
    ((steps, _),) = pool.run(1, f"{CASES}:two_steps", *pair, {}, LOSS, 9)
    return steps


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("one", {"micro_batch_size": 1}),
        ("one", {"micro_batch_size": 2, "batching": "padded"}),
        ("one", {"micro_batch_size": 4, "logprob_chunk_tokens": 5}),
        ("dp2", {"micro_batch_size": 2}),
        ("ddp2", {"batching": "padded"}),
        ("tp2", {}),
        ("cp2", {}),
    ],
    ids=str,
)
def test_loss_and_gradient_are_those_of_one_rank(name, config, pool, pair, one_rank):
    ranks, parallel = LAYOUTS[name]
    config = {"parallel": parallel} | config
    for steps, frozen in pool.run(ranks, f"{CASES}:two_steps", *pair, config, LOSS, 9):
        assert frozen
        for step, expected in zip(steps, one_rank, strict=True):
            for number in ("loss", "grad_norm"):
                assert step[number] == pytest.approx(expected[number], abs=1e-5), number
            assert step["evaluated"] == pytest.approx(expected["loss"], abs=1e-5)


def test_with_the_whole_vocabulary_forward_kl_is_that_of_full_logits(pool, pair):
    ((steps, _),) = pool.run(1, f"{CASES}:two_steps", *pair, {}, DistillationLossConfig(), 256)
    (expected,) = pool.run(1, f"{CASES}:loss_of_full_logits", *pair)
    assert steps[0]["loss"] == pytest.approx(expected, abs=1e-6)
    assert steps[1]["loss"] < steps[0]["loss"]


def padded(folder, target, extra):
    """The model with more rows in embedding and head, without tokens and far from silent."""
    shutil.copytree(folder, target)
    settings = json.loads((target / "config.json").read_text())
    settings["vocab_size"] += extra
    (target / "config.json").write_text(json.dumps(settings))
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & weights.keys():
        rows = 0.2 * torch.randn((extra, weights[name].shape[1]), generator=generator)
        weights[name] = torch.cat([weights[name], rows])
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


@pytest.fixture(scope="module")
def padded_pair(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("padded")
    return tuple(padded(path, folder / str(i), extra=64) for i, path in enumerate(pair))


@pytest.mark.parametrize(
    ("layout", "more_rows", "k"),
    [
        ("one", "teacher", 9),
        ("tp2", "teacher", 9),
        ("tp2", "teacher", VOCAB),
        ("one", "student", 9),
        ("dp2", "student", 9),
        ("tp2", "student", 9),
    ],
)
def test_padding_of_one_embedding_changes_nothing(layout, more_rows, k, pool, pair, padded_pair):
    ranks, parallel = LAYOUTS[layout]
    if more_rows == "teacher":
        models, ends = (pair[0], padded_pair[1]), (None, VOCAB)
    else:
        models, ends = (padded_pair[0], pair[1]), (VOCAB, None)
    ((expected, _),) = pool.run(1, f"{CASES}:two_steps", *pair, {}, LOSS, k)
    config = {"parallel": parallel}
    for steps, _ in pool.run(ranks, f"{CASES}:two_steps", *models, config, LOSS, k, ends):
        for step, wanted in zip(steps, expected, strict=True):
            assert step == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("k", [9, 256])
def test_a_student_that_is_its_teacher_has_no_loss_and_no_gradient(k, pool, pair):
    student, _ = pair
    ((steps, _),) = pool.run(1, f"{CASES}:two_steps", student, student, {}, LOSS, k)
    assert steps[0]["loss"] == pytest.approx(0.0, abs=1e-6)
    assert steps[0]["grad_norm"] == pytest.approx(0.0, abs=1e-6)


def test_a_teacher_leaves_the_devices_to_the_policy_that_trains_next():
    called, rows = [], {"seeds": torch.arange(3)}
    teacher: Any = SimpleNamespace(
        top_logprobs=lambda part, k, vocabulary: called.append(len(part)),
        release_memory=lambda: called.append("released"),
    )
    batch = RemoteBatch(lengths=torch.ones(3, dtype=torch.int64), rows=rows)
    assert len(with_teacher(batch, teacher, Compared(top_k=2))) == 3
    assert called == [3, "released"]


# Runs


ALWAYS = (
    "teacher.model=embedded",
    "cluster.call_timeout_s=120",
    "logging.sinks=[]",
    "data.num_train_rows=400",
    "data.num_validation_rows=32",
)


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """The embedded model with noise in its weights: it has forgotten how to answer."""
    folder = tmp_path_factory.mktemp("student") / "model"
    shutil.copytree(resolve_model("embedded"), folder)
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: each + 0.8 * each.std(correction=0) * torch.randn(each.shape, generator=generator)
        for name, each in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def on_policy(folder, *overrides):
    config = compose_config(
        ROOT / "configs",
        "distillation",
        [
            *ALWAYS,
            "generation.backend=hf",
            "generation.max_new_tokens=32",
            "distillation.num_prompts_per_step=8",
            f"run.dir={folder}",
            *overrides,
        ],
    )
    run_config(config)
    return records(folder)


def off_policy(folder, *overrides):
    config = compose_config(
        ROOT / "configs",
        "off_policy_distillation",
        [*ALWAYS, f"run.dir={folder}", *overrides],
    )
    run_config(config)
    return records(folder)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_student_learns_from_its_teacher_on_its_own_samples(seed, tmp_path, local_ray, student):
    """Every step's completions are new, so their divergence is held out."""
    steps = on_policy(
        tmp_path,
        f"policy.model={student}",
        f"run.seed={seed}",
        "distillation.max_steps=12",
        "validation.every_steps=12",
        "policy.optimizer.lr=1e-3",
    )
    last = sum(steps[step]["train/divergence"] for step in (10, 11, 12)) / 3
    assert last < 0.3 * steps[1]["train/divergence"]
    assert steps[1]["mismatch/max_abs"] < 1e-4
    assert 0 < steps[1]["train/teacher_mass"] <= 1 + 1e-5


@pytest.mark.parametrize("seed", SEEDS)
def test_a_student_learns_from_its_teacher_on_given_texts(seed, tmp_path, local_ray, student):
    larger = padded(resolve_model("embedded"), tmp_path / "teacher", extra=64)
    steps = off_policy(
        tmp_path / "run",
        f"teacher.model={larger}",
        f"policy.model={student}",
        f"run.seed={seed}",
        "distillation.max_steps=12",
        "validation.every_steps=12",
        "policy.optimizer.lr=1e-3",
    )
    assert steps[12]["validation/loss"] < 0.5 * steps[0]["validation/loss"]


def test_a_stopped_run_goes_on_as_if_it_had_not_been_and_no_teacher_is_saved(
    tmp_path, local_ray, student
):
    small = (
        f"policy.model={student}",
        "distillation.num_prompts_per_step=2",
        "validation.every_steps=0",
        "teacher.top_k=null",
        "distillation.max_steps=3",
        "checkpoint.every_steps=2",
    )
    folder, step_3 = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_3"
    straight = on_policy(folder, *small)
    saved = {path.name for path in step_3.iterdir()}
    shutil.rmtree(step_3)  # as if it had ended before this was written
    resumed = on_policy(folder, *small, "run.resume=true")
    for name in ("train/loss", "train/grad_norm", "train/teacher_mass"):
        assert resumed[3][name] == straight[3][name]
    assert step_3.is_dir()
    assert "policy" in saved
    assert "teacher" not in saved


# Wrong inputs


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher.model=null"], "teacher.model is not set.*give a folder"),
        (["teacher.model=/nowhere"], "teacher.model=/nowhere: no such folder; give"),
        (["teacher.top_k=0"], "teacher.top_k=0 must be at least 1"),
        (["teacher.top_k=null", "loss.tail=ignore"], "loss.tail=ignore would have no effect"),
        (["teacher.top_k=1", "loss.tail=renormalize"], "raise teacher.top_k, or set"),
        (["loss.alpha=0.2"], "loss.alpha=0.2 would have no effect"),
        (["mismatch.action=mask"], "mismatch.action=mask would have no effect.*use warn or stop"),
        (
            ["cluster.cpu_workers_per_node=2", "policy.parallel.pipeline_parallel_size=2"],
            "pipeline_parallel_size=2 does not go with distillation.*set it to 1",
        ),
    ],
    ids=str,
)
def test_a_wrong_input_is_refused_with_key_and_remedy(overrides, message, tmp_path):
    with pytest.raises(UserError, match=message):
        on_policy(tmp_path, *overrides)


def test_given_texts_have_their_own_rules(tmp_path):
    for override, message in (
        ("distillation.temperature=0", "distillation.temperature=0 must be above 0"),
        ("distillation.num_rows_per_step=0", "distillation.num_rows_per_step=0 must be at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            off_policy(tmp_path, override)


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path, tiny_model):
    with pytest.raises(UserError, match=r"another vocabulary than policy.model: 259 .*512"):
        on_policy(tmp_path, f"teacher.model={tiny_model()}")
    folder = shutil.copytree(resolve_model("embedded"), tmp_path / "other")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[20:22]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"the token .* has the id .* use a teacher of the student"):
        on_policy(tmp_path / "run", f"teacher.model={folder}")


def test_an_embedding_with_more_rows_is_padding_if_the_tokens_are_the_same(tmp_path):
    embedded = str(resolve_model("embedded"))
    larger = padded(embedded, tmp_path / "larger", extra=64)

    def compared(student, teacher, *overrides):
        folders = (f"policy.model={student}", f"teacher.model={teacher}", "teacher.top_k=null")
        config = compose_config(ROOT / "configs", "distillation", [*folders, *overrides])
        return find_teacher(config, student)[1]

    assert compared(embedded, embedded) == Compared(top_k=512)
    assert compared(embedded, larger) == Compared(top_k=512, vocabulary=512)
    assert compared(larger, embedded) == Compared(top_k=512, student_vocabulary=512)
    much = padded(embedded, tmp_path / "much", extra=512)
    tp = ("cluster.cpu_workers_per_node=2", "policy.parallel.tensor_parallel_size=2")
    with pytest.raises(UserError, match="gives a rank nothing but padding of the 1024 rows"):
        compared(embedded, much, *tp)
    settings = json.loads((tmp_path / "larger" / "config.json").read_text())
    cut = tmp_path / "larger" / "config.json"
    cut.write_text(json.dumps(settings | {"vocab_size": 100}))  # fewer rows than tokens
    with pytest.raises(UserError, match=r"another vocabulary than policy.model: 100 .*512"):
        compared(embedded, larger)


def test_a_completion_with_padding_in_it_stops_a_teacher_without_that_row(pair):
    with alone():
        frozen = make_trainer(pair[1], {}, False)
        rows = make_rows(preference=False)
        rows.tokens[keys.INPUT_IDS][3] = VOCAB
        with pytest.raises(RunError, match=f"token id {VOCAB}, which no token .* ends at {VOCAB}"):
            answer(frozen, [rows], 9)
