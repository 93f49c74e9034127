"""The policy on real Ray workers: one exact loss and gradient, however rows are laid out."""

import math
import os
import shutil
import signal
import stat
from contextlib import contextmanager

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from nemo_like.algorithms.processes import policy_group
from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import LossConfig
from nemo_like.config.optimizer import OptimizerConfig
from nemo_like.config.policy import ParallelConfig, PolicyConfig
from nemo_like.config.run import ClusterConfig
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.distributed.virtual_cluster import VirtualCluster
from nemo_like.distributed.waiting import wait_together
from nemo_like.errors import RunError, WaitTimeoutError
from nemo_like.losses.policy_gradient import ClippedPGLoss
from nemo_like.observe.metrics import values
from nemo_like.planning.model_shape import Role
from nemo_like.planning.resources import plan_resources
from nemo_like.policy.remote_model import RemoteModel
from nemo_like.policy.worker import PolicyWorker
from nemo_like.refit.ipc import IpcLink
from tests.three_steps import LENGTHS, TEMPERATURE, make_rows

pytestmark = pytest.mark.usefixtures("local_ray")

TOLERANCE = 1e-5


@contextmanager
def make_policy(
    model_path, tmp_path, *, ranks=1, with_reference=False, call_timeout_s=1800.0, **config
):
    cluster_config = ClusterConfig(cpu_workers_per_node=ranks, call_timeout_s=call_timeout_s)
    with VirtualCluster(plan_resources(cluster_config, 1), 60.0) as cluster:
        policy_config = PolicyConfig(
            optimizer=OptimizerConfig(lr=3e-4), max_grad_norm=0.5, **config
        )
        log_dir = str(tmp_path / "logs")
        policy = RemoteModel(
            policy_config,
            cluster_config,
            policy_group(policy_config, cluster_config, cluster, log_dir=log_dir),
            model_path=model_path,
            temperature=TEMPERATURE,
            max_steps=10,
            role=Role(with_reference=with_reference),
        )
        try:
            policy.start()
            yield policy
        finally:
            policy.group.shutdown()


def make_batch():
    """In two chunks of the object store, as replicas would leave them."""
    return RemoteBatch.put(make_rows(preference=False), rows_per_chunk=4)


def three_steps(policy, tmp_path, kl_coef=0.1, normalization="token"):
    """Losses, gradient norms and final parameters of three steps, and the first logprobs."""
    loss = ClippedPGLoss(LossConfig(kl_coef=kl_coef, normalization=normalization))
    numbers, first = [], None
    for _ in range(3):
        batch = make_batch()
        policy.logprobs(batch)
        if first is None:
            first = batch.fetch()
        metrics = values(policy.train(batch, loss))
        numbers += [metrics["train/loss"], metrics["train/grad_norm"], metrics.get("train/kl", 0.0)]
    folder = tmp_path / "exported"
    policy.export(str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return numbers, first, dict(model.named_parameters())


def assert_same(result, expected):
    numbers, batch, parameters = result
    expected_numbers, expected_batch, expected_parameters = expected
    assert numbers == pytest.approx(expected_numbers, abs=TOLERANCE)
    for name in (keys.POLICY_LOGPROBS, keys.REFERENCE_LOGPROBS):
        difference = (batch.tokens[name] - expected_batch.tokens[name]).abs().max()
        assert difference < TOLERANCE, name
    assert parameters.keys() == expected_parameters.keys()
    for name, tensor in parameters.items():
        assert (tensor - expected_parameters[name]).abs().max() < TOLERANCE, name


def test_rows_of_chunks_of_any_size_are_found_after_joining_and_selecting():
    def batch(first, *sizes):
        chunks = []
        for size in sizes:
            ids = torch.arange(first, first + size)
            columns = {keys.INPUT_IDS: ids.repeat_interleave(2)}
            chunks.append(TensorBatch(lengths=torch.full((size,), 2), tokens=columns))
            first += size
        return RemoteBatch.from_chunks(
            [ray.put(chunk) for chunk in chunks],
            [chunk.lengths for chunk in chunks],
            [{} for _ in chunks],
        )

    joined = RemoteBatch.concatenate([batch(0, 1, 3, 2), batch(6, 2, 1)])
    order = [8, 0, 5, 3, 7, 1]
    scores = [torch.tensor([30.0, 30, 80, 80]), torch.tensor([0.0, 0, 10, 10, 50, 50, 70, 70])]
    parts = [
        TensorBatch(lengths=torch.full((len(one) // 2,), 2), tokens={keys.VALUES: one})
        for one in scores
    ]
    chosen = joined.select(order)
    chosen.add_columns([ray.put(part) for part in parts], [[3, 0], [1, 5, 2, 4]])
    found = chosen.select([5, 0, 2, 1, 4, 3]).fetch()
    assert found.tokens[keys.INPUT_IDS][::2].tolist() == [1, 8, 5, 0, 7, 3]
    assert found.tokens[keys.VALUES][::2].tolist() == [10, 80, 50, 0, 70, 30]


@pytest.fixture(scope="module")
def baseline(four_layers, tmp_path_factory):
    """One rank, one row a forward, padded: nothing that could go wrong with layout."""
    tmp_path = tmp_path_factory.mktemp("baseline")
    with make_policy(
        four_layers(),
        tmp_path,
        with_reference=True,
        batching="padded",
        micro_batch_size=1,
    ) as policy:
        return three_steps(policy, tmp_path)


# The matrix of layouts is in test_invariance.py, without Ray; these go through driver and workers.
LAYOUTS = {
    "packed_small_budget": {"micro_batch_tokens": 40},
    "three_ranks_packed_small_budget": {"ranks": 3, "micro_batch_tokens": 32},
    "two_by_tensor": {
        "ranks": 2,
        "parallel": ParallelConfig(tensor_parallel_size=2),
        "micro_batch_tokens": 64,
    },
    "two_by_pipeline": {
        "ranks": 2,
        "parallel": ParallelConfig(pipeline_parallel_size=2),
        "micro_batch_tokens": 64,
    },
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("packed_small_budget", marks=pytest.mark.full),  # three ranks pack, too
        *list(LAYOUTS)[1:],
    ],
)
def test_loss_gradient_and_parameters_are_those_of_one_rank(
    layout, four_layers, baseline, tmp_path
):
    with make_policy(four_layers(), tmp_path, with_reference=True, **LAYOUTS[layout]) as policy:
        assert_same(three_steps(policy, tmp_path), baseline)
        few = make_batch().select([0, 1])  # fewer than three ranks
        policy.logprobs(few, kl="k1")
        found = few.fetch()
    difference = found.tokens[keys.POLICY_LOGPROBS] - found.tokens[keys.REFERENCE_LOGPROBS]
    by_row = [
        part[mask].sum().item() for part, mask in zip(*_by_row(found, difference), strict=True)
    ]
    assert few.rows[keys.REFERENCE_KL].tolist() == pytest.approx(by_row, abs=TOLERANCE)
    assert min(map(abs, by_row)) > 1e-3


def _by_row(batch, column):
    lengths = batch.lengths.tolist()
    return column.split(lengths), batch.tokens[keys.LOSS_MASK].split(lengths)


def test_logprobs_are_those_of_the_plain_model_at_the_sampling_temperature(four_layers, baseline):
    _, batch, _ = baseline
    model = AutoModelForCausalLM.from_pretrained(four_layers(), dtype=torch.float32).eval()
    for row in range(len(LENGTHS)):
        one = batch.select([row]).tokens
        ids, mask, actual = one[keys.INPUT_IDS], one[keys.LOSS_MASK], one[keys.POLICY_LOGPROBS]
        with torch.no_grad():
            logits = model(ids[None]).logits[0] / TEMPERATURE
        expected = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        assert torch.allclose(actual[mask], expected[mask[1:]], atol=TOLERANCE)
        assert (actual[~mask] == 0).all()


def test_completions_without_policy_logprobs_train_with_the_weights_that_sampled_them(
    tiny_model, tmp_path
):
    loss, batch = ClippedPGLoss(LossConfig()), make_batch()
    batch.rows[keys.WEIGHT_VERSIONS] = torch.zeros(len(LENGTHS), dtype=torch.int64)
    with make_policy(tiny_model(), tmp_path) as policy:
        metrics = values(policy.train(batch, loss))
        assert metrics["mismatch/mean_abs"] > 0  # measured by the step's own forward pass
        assert "train/max_log_ratio" not in metrics
        with pytest.raises(AssertionError, match="need policy logprobs"):
            policy.train(batch, loss)
        policy.logprobs(batch)
        assert values(policy.train(batch, loss))["train/max_log_ratio"] < 1e-5


def test_checkpoint_continues_bit_for_bit_and_on_other_rank_counts(tiny_model, tmp_path):
    loss = ClippedPGLoss(LossConfig())

    def step(policy):
        batch = make_batch()
        policy.logprobs(batch)
        metrics = values(policy.train(batch, loss))
        return {name: one for name, one in metrics.items() if not name.endswith("memory_gib")}

    config = {"micro_batch_tokens": 64}
    with make_policy(tiny_model(), tmp_path, ranks=2, **config) as policy:
        step(policy)
        policy.save(str(tmp_path / "saved"))
        straight = [step(policy), step(policy)]
    with make_policy(tiny_model(), tmp_path, ranks=2, **config) as policy:
        policy.load(str(tmp_path / "saved"), weight_version=1)
        assert [step(policy), step(policy)] == straight
    with make_policy(tiny_model(), tmp_path, ranks=1, **config) as policy:
        policy.load(str(tmp_path / "saved"), weight_version=1)
        for other, expected in zip([step(policy), step(policy)], straight, strict=True):
            assert other["train/loss"] == pytest.approx(expected["train/loss"], abs=TOLERANCE)
            assert other["train/lr"] == expected["train/lr"]


def test_export_is_a_complete_folder_with_ties_and_tokenizer_as_they_were(tiny_model, tmp_path):
    source = shutil.copytree(tiny_model("llama", True), tmp_path / "model")
    # As of a run with adapters, in a folder of models that nobody may change, with a run in it.
    left_out = ("adapter/adapter_config.json", ".git/HEAD", ".gitattributes", "model.onnx")
    for name in (*left_out, "runs/mine/log", templates := "additional_chat_templates/x.jinja"):
        (source / name).parent.mkdir(exist_ok=True, parents=True)
        (source / name).write_text("{}")
    (source / "config.json").chmod(0o444)
    source.chmod(0o555)
    with make_policy(str(source), tmp_path) as policy:
        policy.export(str(source / "runs" / "final"))
    source.chmod(0o755)
    (source / "runs" / "final").rename(tmp_path / "out")
    kept = {path.name for path in source.iterdir()} - {name.partition("/")[0] for name in left_out}
    assert {path.name for path in (tmp_path / "out").iterdir()} == kept - {"runs"}
    assert (tmp_path / "out" / templates).exists()
    for path in (tmp_path / "out", tmp_path / "out" / "config.json"):
        assert path.stat().st_mode & stat.S_IWUSR
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = file.keys()
    assert "lm_head.weight" not in names
    before = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_bfloat16_compute_stays_near_float32(four_layers, baseline, tmp_path):
    config = {"with_reference": True, "dtype": "bfloat16"}
    with make_policy(four_layers(), tmp_path, **config) as policy:
        (loss, grad_norm, *_), _, _ = three_steps(policy, tmp_path)
    (_, exact_norm, *_), _, _ = baseline
    assert grad_norm != exact_norm
    assert grad_norm == pytest.approx(exact_norm, rel=0.05)
    assert math.isfinite(loss)


def test_an_architecture_that_packing_would_get_wrong_is_refused_and_padding_is_exact(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    from nemo_like.errors import UserError
    from nemo_like.policy.state.checks import check_architecture

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    torch.manual_seed(0)
    gemma = Gemma2ForCausalLM(
        Gemma2Config(
            **sizes,
            num_hidden_layers=2,
            num_key_value_heads=1,
            head_dim=32,
            attn_logit_softcapping=0.5,
            sliding_window=4096,
            max_position_embeddings=64,
            initializer_range=0.5,
            attn_implementation="eager",
        )
    )
    gemma.save_pretrained(tmp_path / "gemma")
    model = str(tmp_path / "gemma")
    with pytest.raises(UserError, match=r"Gemma2ForCausalLM cannot be trained.*batching=padded"):
        check_architecture(model, PolicyConfig(model=model))
    with pytest.raises(UserError, match=r"^teacher\.model=.*ForCausalLM cannot be computed with"):
        check_architecture(model, PolicyConfig(model=model), "teacher")
    check_architecture(model, PolicyConfig(model=model, batching="padded", attention="eager"))


def test_a_rank_waits_for_a_silent_engine_as_long_as_for_a_call_not_as_for_a_save(
    tiny_model, tmp_path
):
    with make_policy(tiny_model(), tmp_path, call_timeout_s=1.0) as policy:
        group = policy.group.waiting(60.0)
        (sender,) = group.call(PolicyWorker.open_sender, 1, "ipc", 1 << 20)
        accepted = group.submit(PolicyWorker.accept_receivers)
        silent = IpcLink((sender.ipc,)).receiver(0, sender.buckets, torch.device("cpu"), 60.0)
        wait_together(accepted)
        with pytest.raises(RunError, match="was silent for 1 s"):
            group.call(PolicyWorker.send_weights, 0, False)
        del silent
        os.kill(group.call(PolicyWorker.ready)[0], signal.SIGSTOP)
        with pytest.raises(WaitTimeoutError, match=r"4 s.* in export: .*cluster\.call_timeout_s"):
            policy.export(str(tmp_path / "exported"))
