"""More of the training engine's options on gloo: resuming, synchronising, rounding, loading.

test_training_engine.py has the first of them; the matrix of layouts is test_invariance.py.
"""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.config.choices import (
    Checkpointing,
    Compression,
    Dtype,
    OptimizerKind,
    Schedule,
)
from nemo_like.config.policy_schema import (
    DebugConfig,
    LossScaleConfig,
    OptimizerConfig,
)
from tests.engine_cases import CASES, TOLERANCE, ddp, largest_gap, schedule
from tests.layouts import LAYOUTS, layout

LR = 3e-4
BOTH = (False, True)
LARGER = 1 + 2.0**-10  # an eighth of the distance between two numbers of bfloat16, or a quarter
# Plain gradient descent: what is added to parameters is proportional to the gradient.
DESCENT = {
    "optimizer": OptimizerConfig(kind=OptimizerKind.sgd, lr=0.1, momentum=0.0),
    "max_grad_norm": None,
}


def flat(parameters):
    return torch.cat([parameters[name].flatten() for name in sorted(parameters)])


def assert_same(actual, expected, tolerance=TOLERANCE):
    (metrics, parameters), (expected_metrics, expected_parameters) = actual, expected
    for key in ("loss", "train/grad_norm", "train/lr"):
        assert metrics[key] == pytest.approx(expected_metrics[key], abs=tolerance), key
    assert largest_gap(parameters, expected_parameters) < tolerance


# Resuming


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        *[(name, False) for name in ("ddp2", "cp2", "hybrid2x2", "dp2_tp2")],
        *[
            (name, tied)
            for name in ("tp2_sequence", "pp2_1f1b", "pp2_interleaved")
            for tied in BOTH
        ],
    ],
)
def test_a_checkpoint_of_any_layout_goes_on_in_one_process(name, tied, pool, four_layers, tmp_path):
    ranks, parallel = LAYOUTS[name]
    config = schedule(Schedule.linear)
    path, folder = four_layers("llama", tied), str(tmp_path / "step_1")
    expected = pool.run(
        ranks, f"{CASES}:save_then_go_on", path, config | {"parallel": parallel}, folder
    )
    other = {"optimizer": OptimizerConfig(lr=1.0, beta2=0.5, weight_decay=0.5)}  # not the run's
    actual = pool.run(1, f"{CASES}:load_and_go_on", path, config | other, folder)
    assert_same(actual[0], expected[-1])
    # Ten steps, the first of which warms up: the second is the first of nine that fall to 0.
    assert actual[0][0]["train/lr"] == pytest.approx(LR * (1 - 1 / 9))


@pytest.mark.parametrize("name", ["one", "pp2_1f1b"])
@pytest.mark.parametrize("kind", [OptimizerKind.sgd, OptimizerKind.muon, OptimizerKind.adafactor])
def test_other_optimizers_go_on_in_other_layouts(kind, name, pool, four_layers, tmp_path):
    ranks, parallel = LAYOUTS[name]
    optimizer = OptimizerConfig(kind=kind, lr=1e-2 if kind == "adafactor" else 1e-3)
    config = {"optimizer": optimizer} | schedule(Schedule.cosine)
    folder = str(tmp_path / "step_1")
    expected = pool.run(2, f"{CASES}:save_then_go_on", four_layers(), config, folder)
    config["parallel"] = parallel
    actual = pool.run(ranks, f"{CASES}:load_and_go_on", four_layers(), config, folder)
    # Muon's bfloat16 products amplify the rounding of gradients (see WholeMatrixMuon).
    assert_same(actual[-1], expected[-1], 4e-5 if kind == "muon" else TOLERANCE)


def test_a_checkpoint_does_not_depend_on_what_is_recomputed(pool, four_layers, tmp_path):
    folder = str(tmp_path / "step_1")
    recomputed = {"activation_checkpointing": Checkpointing.full}
    expected = pool.run(2, f"{CASES}:save_then_go_on", four_layers(), recomputed, folder)
    for parallel in (LAYOUTS["dp2"][1], LAYOUTS["pp2_1f1b"][1]):
        config = {"parallel": parallel}
        actual = pool.run(2, f"{CASES}:load_and_go_on", four_layers(), config, folder)
        assert_same(actual[-1], expected[-1])


def test_a_loss_scale_and_its_count_go_on(pool, four_layers, tmp_path):
    config = {"dtype": Dtype.float16, "loss_scale": LossScaleConfig(initial=2.0**40)}
    folder = str(tmp_path / "step_2")
    straight, resumed = pool.run(1, f"{CASES}:resumed_loss_scale", four_layers(), config, folder)[0]
    assert straight == resumed == [2.0**38, 3, LR]


# Synchronising


def test_float16_compression_rounds_gradients_by_no_more_than_it_must(pool, four_layers):
    path = four_layers()
    start = flat(pool.run(2, f"{CASES}:train", path, ddp() | DESCENT, 0)[0][1])
    exact = flat(pool.run(2, f"{CASES}:train", path, ddp() | DESCENT, 1)[0][1]) - start
    config = ddp(compression=Compression.fp16) | DESCENT
    rounded = flat(pool.run(2, f"{CASES}:train", path, config, 1)[0][1]) - start
    # Two shares and their sum are each rounded to 11 bits, by 2^-11 at most; the shares together
    # are about as large as their sum, twice that if they cancel to half.
    error = ((rounded - exact).norm() / exact.norm()).item()
    assert 0 < error < 3 * 2.0**-11


def test_powersgd_is_exact_until_its_start_and_trains_after_it(pool, four_layers):
    path, start = four_layers(), 3
    exact, _ = pool.run(2, f"{CASES}:train", path, ddp(), 15)[0]
    config = ddp(compression=Compression.powersgd, powersgd_start_step=start)
    low_rank, _ = pool.run(2, f"{CASES}:train", path, config, 15)[0]
    gaps = [
        abs(a["train/grad_norm"] - b["train/grad_norm"]) / b["train/grad_norm"]
        for a, b in zip(low_rank, exact, strict=True)
    ]
    assert max(gaps[:start]) < 1e-6
    assert gaps[start] > 1e-3
    fall = exact[0]["loss"] - exact[-1]["loss"]
    assert low_rank[0]["loss"] - low_rank[-1]["loss"] > 0.5 * fall > 0


def test_an_average_after_each_step_of_descent_is_a_step_of_ddp(pool, four_layers):
    path = four_layers()
    expected = pool.run(2, f"{CASES}:train", path, ddp() | DESCENT, 1)[0]
    config = ddp(average_every_steps=2) | DESCENT | {"debug": DebugConfig(collectives=True)}
    metrics, parameters = pool.run(2, f"{CASES}:averaged_after_one_step", path, config)[0]
    assert largest_gap(parameters, expected[1]) < 1e-6
    assert metrics["loss"] == pytest.approx(expected[0][0]["loss"], abs=1e-6)
    assert not [name for name in metrics if name.startswith("collective/")], "ranks met"


def test_sharded_ranks_reduce_gradients_once_a_step_if_they_keep_parameters(pool, four_layers):
    counts = []
    for tokens in (512, 40):
        config = {
            "parallel": layout(reshard_after_forward=False),
            "micro_batch_tokens": tokens,
            "debug": DebugConfig(collectives=True),
        }
        metrics, _ = pool.run(2, f"{CASES}:train", four_layers(), config, 2)[0]
        counts.append(metrics[1]["collective/reduce_scatter_count"])
    assert counts == [5, 5], "four layers, and the rest"


@pytest.mark.parametrize("parallel", [layout(tp=2, sequence_parallel=True), layout(replicate=2)])
def test_the_checks_find_one_copy_of_a_layers_norm_on_four_ranks(parallel, pool, four_layers):
    config = {
        "parallel": parallel,
        "debug": DebugConfig(check_replicas=True, check_gradients=True, check_data=True),
    }
    metrics, _ = pool.run(4, f"{CASES}:train", four_layers(), config, 1)[0]
    assert metrics[0]["train/grad_norm"] > 0
    name = "model.layers.2.input_layernorm.weight"
    messages = pool.run(4, f"{CASES}:perturbed", four_layers(), config, name)
    axis = "tp" if parallel.tensor_parallel_size > 1 else "replicate"
    assert all(f"along axis {axis}: '{name}'" in message for message in messages), messages


# Rounding


@pytest.fixture(scope="module")
def heads(four_layers, tmp_path_factory):
    """Two models: a head whose numbers bfloat16 has, and the same larger by less than it shows."""
    model = AutoModelForCausalLM.from_pretrained(four_layers(), dtype=torch.float32)
    head = model.lm_head.weight
    folders = []
    for factor in (1.0, LARGER):
        with torch.no_grad():
            head.copy_(head.bfloat16().float() * factor)
        folders.append(str(tmp_path_factory.mktemp("head")))
        model.save_pretrained(folders[-1])
    return folders


@pytest.mark.parametrize("name", ["dp2", "ddp2", "tp2_sequence", "pp2_1f1b"])
def test_a_float32_head_keeps_what_bfloat16_rounds_away(name, pool, heads):
    ranks, parallel = LAYOUTS[name]

    def run(folder, temperature, **changes):
        config = {"parallel": parallel, "micro_batch_tokens": 512, "dtype": Dtype.bfloat16}
        answers = pool.run(ranks, f"{CASES}:logprobs", folder, config | changes, temperature)
        return torch.cat(answers)

    exact, larger = heads
    assert torch.equal(run(exact, 0.7), run(larger, 0.7))
    expected = run(exact, 0.7 / LARGER, float32_head=True)
    assert (run(larger, 0.7, float32_head=True) - expected).abs().max() < TOLERANCE
    assert (run(exact, 0.7, float32_head=True) - expected).abs().max() > 10 * TOLERANCE


# Loading


@pytest.mark.parametrize("name", ["dp4", "dp2_tp2", "hybrid2x2", "dp2_pp2"])
def test_a_rank_reads_no_more_than_its_shard(name, pool, four_layers):
    ranks, parallel = LAYOUTS[name]
    answers = pool.run(ranks, f"{CASES}:copied_numbers", four_layers(), {"parallel": parallel})
    for copied, held in answers:
        # Rotary frequencies are copied, too.
        assert held <= copied <= held + 64


def loaded(pool, folder, name):
    ranks, parallel = LAYOUTS[name]
    return pool.run(ranks, f"{CASES}:train", str(folder), {"parallel": parallel}, 0)[0][1]


@pytest.mark.parametrize("name", ["dp2", "ddp2", "tp2", "pp2_interleaved"])
@pytest.mark.parametrize("tied", BOTH)
def test_other_folders_load_equally(tied, name, pool, four_layers, tmp_path):
    source = Path(four_layers("llama", tied))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    expected = {key: each.float() for key, each in model.state_dict().items()}
    if tied:
        del expected["lm_head.weight"]
    model.save_pretrained(tmp_path / "in_files", max_shard_size="50KB")
    assert len(list((tmp_path / "in_files").glob("*.safetensors"))) > 3
    assert largest_gap(loaded(pool, tmp_path / "in_files", name), expected) == 0
    shutil.copytree(source, tmp_path / "bin")
    (tmp_path / "bin" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    assert largest_gap(loaded(pool, tmp_path / "bin", name), expected) == 0
