"""Options of the training engine that change what is computed, saved or checked, on gloo."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.config.choices import Compression, Dtype, OptimizerKind, Schedule
from nemo_like.config.policy_schema import (
    DebugConfig,
    LossScaleConfig,
    OptimizerConfig,
    ParallelConfig,
)
from tests.engine_cases import CASES, TOLERANCE, ddp, largest_gap, schedule
from tests.layouts import LAYOUTS


@pytest.fixture(scope="module")
def saved(pool, four_layers, tmp_path_factory):
    """Two sharding ranks: a checkpoint after the first step, and what the second step gives."""
    results = {}

    def get(tied):
        if tied not in results:
            folder = str(tmp_path_factory.mktemp("saved") / "step_1")
            config = {"parallel": ParallelConfig()} | schedule(Schedule.linear)
            path = four_layers("llama", tied)
            results[tied] = folder, pool.run(2, f"{CASES}:save_then_go_on", path, config, folder)
        return results[tied]

    return get


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "name", ["one", "dp2", "ddp2", "tp2", "cp2", "pp2_1f1b", "pp2_interleaved", "hybrid2x2"]
)
def test_a_checkpoint_goes_on_in_any_layout(name, tied, pool, saved, four_layers):
    ranks, parallel = LAYOUTS[name]
    config = {"parallel": parallel} | schedule(Schedule.linear)
    folder, expected = saved(tied)
    path = four_layers("llama", tied)
    actual = pool.run(ranks, f"{CASES}:load_and_go_on", path, config, folder)
    metrics, parameters = actual[-1]
    expected_metrics, expected_parameters = expected[-1]
    for key in ("loss", "train/grad_norm", "train/lr"):
        assert metrics[key] == pytest.approx(expected_metrics[key], abs=TOLERANCE), key
    assert largest_gap(parameters, expected_parameters) < TOLERANCE
    if name == "dp2":
        assert metrics == expected_metrics
        assert largest_gap(parameters, expected_parameters) == 0


def test_a_float32_checkpoint_goes_on_in_float16(pool, saved, four_layers):
    config = {"dtype": Dtype.float16} | schedule(Schedule.linear)
    folder, expected = saved(False)
    actual = pool.run(2, f"{CASES}:load_and_go_on", four_layers(), config, folder)
    assert actual[0][0]["loss"] == pytest.approx(expected[0][0]["loss"], abs=1e-2)
    assert actual[0][0]["train/skipped_steps"] == 0


@pytest.mark.parametrize("kind", [OptimizerKind.sgd, OptimizerKind.muon, OptimizerKind.adafactor])
def test_every_optimizer_resumes_where_it_was(kind, pool, four_layers, tmp_path):
    optimizer = OptimizerConfig(kind=kind, lr=1e-2 if kind == "adafactor" else 1e-3)
    config = {"optimizer": optimizer, "parallel": ParallelConfig()} | schedule(Schedule.cosine)
    folder = str(tmp_path / "step_1")
    straight = pool.run(2, f"{CASES}:save_then_go_on", four_layers(), config, folder)
    resumed = pool.run(2, f"{CASES}:load_and_go_on", four_layers(), config, folder)
    assert resumed[0][0] == straight[0][0]
    assert largest_gap(resumed[0][1], straight[0][1]) == 0


@pytest.mark.parametrize(
    "mesh_shape",
    [[[2], ["fsdp"]], [[2], ["ddp"]], [[2], ["cp"]]],
    ids=lambda mesh: mesh[1][0],
)
def test_a_warm_up_leaves_no_trace(mesh_shape, pool, four_layers):
    arguments = (four_layers(), {"mesh_shape": mesh_shape}, 2)
    cold = pool.run(2, f"{CASES}:train", *arguments)[-1]
    warm = pool.run(2, f"{CASES}:train_warmed_up", *arguments)[-1]
    assert warm[0] == cold[0]
    assert largest_gap(warm[1], cold[1]) == 0


def test_ddp_options_that_only_change_how_gradients_travel_change_no_number(pool, four_layers):
    path = four_layers()
    expected = pool.run(2, f"{CASES}:train", path, ddp(), 2)[0]
    for options in (
        {"bucket_mib": 0.01},
        {"gradient_as_bucket_view": False},
        {"find_unused_parameters": True},
    ):
        metrics, parameters = pool.run(2, f"{CASES}:train", path, ddp(**options), 2)[0]
        assert metrics[-1]["loss"] == pytest.approx(expected[0][-1]["loss"], abs=1e-6), options
        assert largest_gap(parameters, expected[1]) < 1e-6, options


@pytest.mark.parametrize("compression", [Compression.fp16, Compression.powersgd])
def test_compressed_gradients_differ_a_little_and_still_train(compression, pool, four_layers):
    """(bf16 needs NCCL.)"""
    path = four_layers()
    options = {"compression": compression}
    if compression is Compression.powersgd:
        options |= {"powersgd_start_step": 2, "powersgd_rank": 1}
    exact, _ = pool.run(2, f"{CASES}:train", path, ddp(), 5)[0]
    metrics, _ = pool.run(2, f"{CASES}:train", path, ddp(**options), 5)[0]
    norms = [each["train/grad_norm"] for each in metrics]
    exact_norms = [each["train/grad_norm"] for each in exact]
    assert norms != exact_norms
    assert norms[0] == pytest.approx(exact_norms[0], rel=1e-2)
    assert metrics[-1]["loss"] < metrics[0]["loss"]


def test_ranks_meet_once_a_step_however_many_micro_batches_there_are(pool, four_layers):
    counts = []
    for tokens in (512, 40):
        config = ddp() | {
            "micro_batch_tokens": tokens,
            "debug": DebugConfig(collectives=True),
        }
        metrics, _ = pool.run(2, f"{CASES}:train", four_layers(), config, 2)[0]
        counts.append(metrics[1]["collective/all_reduce_count"])
    assert counts[0] == counts[1] > 0


def test_local_sgd_averages_every_so_many_steps_and_before_weights_leave(pool, four_layers):
    config = ddp(average_every_steps=2)
    by_rank = pool.run(2, f"{CASES}:replicas_by_step", four_layers(), config)
    assert by_rank == [[True] * 4, [False, True, False, True]]
    (own0, out0), (own1, out1) = pool.run(2, f"{CASES}:exported_by_rank", four_layers(), config)
    assert largest_gap(out0, out1) == 0
    mean = {name: (own0[name] + own1[name]) / 2 for name in own0}
    assert largest_gap(mean, out0) < 1e-7
    assert largest_gap(own0, out0) > 1e-6


def test_bfloat16_is_the_same_whether_or_not_parameters_stay_gathered(pool, four_layers):
    """Also over logprob passes between steps, which leave units gathered."""
    results = []
    for reshard in (True, False):
        config = {
            "dtype": Dtype.bfloat16,
            "parallel": ParallelConfig(reshard_after_forward=reshard),
            "micro_batch_tokens": 40,
        }
        results.append(pool.run(2, f"{CASES}:train", four_layers(), config, 3)[0])
    (resharded, _), (gathered, _) = results
    for a, b in zip(resharded, gathered, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-3)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-2)


def test_a_float16_overflow_skips_the_step_is_counted_and_training_goes_on(pool, four_layers):
    config = {
        "dtype": Dtype.float16,
        "loss_scale": LossScaleConfig(initial=2.0**24),
        "scheduler": schedule(Schedule.linear)["scheduler"],
    }
    metrics, unchanged, num_steps = pool.run(2, f"{CASES}:float16_overflow", four_layers(), config)[
        0
    ]
    skipped = [each["train/skipped_steps"] for each in metrics]
    assert unchanged
    assert skipped[0] == 1
    assert metrics[1]["train/loss_scale"] == 2.0**23
    assert metrics[1]["train/lr"] == metrics[0]["train/lr"], "the schedule waits"
    assert num_steps == len(metrics) - skipped[-1] > 10
    assert metrics[-1]["loss"] < metrics[0]["loss"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("one", Dtype.float32),
        ("dp2", Dtype.float16),  # no loss scale could be at fault
        ("tp2", Dtype.float32),
        ("pp2_1f1b", Dtype.float32),
    ],
)
def test_a_loss_that_is_not_finite_stops_before_the_step(name, dtype, pool, four_layers):
    ranks, parallel = LAYOUTS[name]
    config = {"parallel": parallel, "dtype": dtype}
    answers = pool.run(ranks, f"{CASES}:not_finite", four_layers(), config)
    assert all("stopped before the optimizer step" in message for message, _ in answers)
    assert all(unchanged for _, unchanged in answers)


@pytest.mark.parametrize("name", ["dp2_tp2", "hybrid2x2", "ddp2", "dp2_pp2", "dp2_cp2"])
def test_all_checks_pass_where_nothing_is_wrong_and_measure(name, pool, four_layers):
    ranks, parallel = LAYOUTS[name]
    debug = DebugConfig(
        check_replicas=True, check_gradients=True, check_data=True, memory=True, collectives=True
    )
    config = {"parallel": parallel, "debug": debug}
    metrics, _ = pool.run(ranks, f"{CASES}:train", four_layers(), config, 1)[-1]
    assert metrics[0]["memory/backward_resident_gib"] > 0
    assert sum(metrics[0][name] for name in metrics[0] if name.endswith("_count")) > 0


@pytest.mark.parametrize("name", ["tp2", "hybrid2x2", "ddp2"])
def test_a_copy_that_is_one_rounding_off_is_named(name, pool, four_layers):
    ranks, parallel = LAYOUTS[name]
    config = {"parallel": parallel, "debug": DebugConfig(check_replicas=True)}
    target = f"{CASES}:perturbed"
    messages = pool.run(ranks, target, four_layers(), config, "model.norm.weight")
    assert all("model.norm.weight" in message for message in messages), messages


def test_each_rank_starts_with_its_shard_and_other_weight_formats_load_whole(
    pool, four_layers, tmp_path
):
    import shutil

    sizes = pool.run(4, f"{CASES}:local_sizes", four_layers(), {"parallel": ParallelConfig()})
    assert sum(mine for mine, _ in sizes) == sizes[0][1]
    assert all(mine < whole / 3 for mine, whole in sizes)
    shutil.copytree(four_layers(), tmp_path / "bin")
    weights = AutoModelForCausalLM.from_pretrained(four_layers()).state_dict()
    (tmp_path / "bin" / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "bin" / "pytorch_model.bin")
    _, from_bin = pool.run(2, f"{CASES}:train", str(tmp_path / "bin"), {}, 0)[0]
    assert largest_gap(from_bin, weights) == 0
