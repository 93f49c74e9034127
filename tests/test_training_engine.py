"""What options of the training engine do to a step, on gloo: synchronising, rounding, checks.

The matrix of layouts is test_invariance.py; checkpoints and loading are test_training_state.py.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.config.debug import DebugConfig
from nemo_like.config.optimizer import OptimizerConfig
from nemo_like.config.policy import ParallelConfig
from tests.engine_cases import CASES, TOLERANCE, ddp, largest_difference, schedule
from tests.layouts import LAYOUTS, layout

LARGER = 1 + 2.0**-10  # an eighth of the distance between two numbers of bfloat16, or a quarter
# Plain gradient descent: what is added to parameters is proportional to the gradient.
DESCENT = {
    "optimizer": OptimizerConfig(kind="sgd", lr=0.1, momentum=0.0),
    "max_grad_norm": None,
}


def flat(parameters):
    return torch.cat([parameters[name].flatten() for name in sorted(parameters)])


@pytest.mark.parametrize(
    "parallel",
    [{}, {"data_parallel": "ddp"}, {"context_parallel_size": 2}],
    ids=["fsdp", "ddp", "cp"],
)
def test_a_warm_up_leaves_no_trace(parallel, pool, four_layers):
    arguments = (four_layers(), {"parallel": ParallelConfig(**parallel)}, 2)
    cold = pool.run(2, f"{CASES}:train", *arguments)[-1]
    warm = pool.run(2, f"{CASES}:train_warmed_up", *arguments)[-1]
    assert warm[0] == cold[0]
    assert largest_difference(warm[1], cold[1]) == 0


def test_no_step_compiles_what_a_warm_up_could_have(pool, four_layers):
    """Rows of different lengths, of one, and alone; more tokens than a chunk; with an entropy."""
    config = {"compile": True, "micro_batch_tokens": 4096, "logprob_chunk_tokens": 100}
    ((traced, later),) = pool.run(1, f"{CASES}:graphs_compiled", four_layers(), config)
    assert traced == 3, "a layer and both parts of the head, for one size"
    assert later == [0, 0, 0]


# Synchronising


def test_compressed_gradients_differ_a_little_and_still_train(pool, four_layers):
    """(bf16 needs NCCL.)"""
    path = four_layers()
    exact, _ = pool.run(2, f"{CASES}:train", path, ddp(), 5)[0]
    metrics, _ = pool.run(2, f"{CASES}:train", path, ddp(compression="fp16"), 5)[0]
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
            "debug": DebugConfig(metrics=True),
        }
        metrics, _ = pool.run(2, f"{CASES}:train", four_layers(), config, 2)[0]
        counts.append(metrics[1]["collective/all_reduce_count"])
    assert counts[0] == counts[1] > 0


def test_local_sgd_averages_every_so_many_steps_and_before_weights_leave(pool, four_layers):
    config = ddp(average_every_steps=2)
    by_rank = pool.run(2, f"{CASES}:replicas_by_step", four_layers(), config)
    assert by_rank == [[True] * 4, [False, True, False, True]]
    (own0, out0), (own1, out1) = pool.run(2, f"{CASES}:exported_by_rank", four_layers(), config)
    assert largest_difference(out0, out1) == 0
    mean = {name: (own0[name] + own1[name]) / 2 for name in own0}
    assert largest_difference(mean, out0) < 1e-7
    assert largest_difference(own0, out0) > 1e-6


def test_what_local_sgd_validates_is_what_it_would_save(pool, four_layers):
    (before, after), other = pool.run(
        2, f"{CASES}:validated", four_layers(), ddp(average_every_steps=2)
    )
    assert before == after
    assert other == (before, after)


@pytest.mark.parametrize("name", [name for name, (ranks, _) in LAYOUTS.items() if ranks == 2])
def test_a_step_whose_rows_come_in_two_calls_is_the_plain_one(name, pool, four_layers):
    """With rollout.overlap: no call may forget the gradients of the one before."""
    path = four_layers()
    norm, expected = pool.run(1, f"{CASES}:in_two_parts", path, {})[0]
    for found, after in pool.run(2, f"{CASES}:in_two_parts", path, {"parallel": LAYOUTS[name][1]}):
        assert found == pytest.approx(norm, rel=1e-5)
        assert largest_difference(after, expected) < TOLERANCE


def test_float16_compression_rounds_gradients_by_no_more_than_it_must(pool, four_layers):
    path = four_layers()
    start = flat(pool.run(2, f"{CASES}:train", path, ddp() | DESCENT, 0)[0][1])
    exact = flat(pool.run(2, f"{CASES}:train", path, ddp() | DESCENT, 1)[0][1]) - start
    config = ddp(compression="fp16") | DESCENT
    rounded = flat(pool.run(2, f"{CASES}:train", path, config, 1)[0][1]) - start
    # Two shares and their sum are each rounded to 11 bits, by 2^-11 at most; the shares together
    # are about as large as their sum, twice that if they cancel to half.
    error = ((rounded - exact).norm() / exact.norm()).item()
    assert 0 < error < 3 * 2.0**-11


def test_powersgd_is_exact_until_its_start_and_trains_after_it(pool, four_layers):
    path, start = four_layers(), 10
    exact, _ = pool.run(2, f"{CASES}:train", path, ddp(), 15)[0]
    config = ddp(compression="powersgd")
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
    config = ddp(average_every_steps=2) | DESCENT | {"debug": DebugConfig(metrics=True)}
    metrics, parameters = pool.run(2, f"{CASES}:averaged_after_one_step", path, config)[0]
    assert largest_difference(parameters, expected[1]) < 1e-6
    assert metrics["loss"] == pytest.approx(expected[0][0]["loss"], abs=1e-6)
    assert not [name for name in metrics if name.startswith("collective/")], "ranks met"


def test_sharded_ranks_reduce_gradients_once_a_step_if_they_keep_parameters(pool, four_layers):
    counts = []
    for tokens in (512, 40):
        config = {
            "parallel": layout(reshard_after_forward=False),
            "micro_batch_tokens": tokens,
            "debug": DebugConfig(metrics=True),
        }
        metrics, _ = pool.run(2, f"{CASES}:train", four_layers(), config, 2)[0]
        counts.append(metrics[1]["collective/reduce_scatter_count"])
    assert counts == [5, 5], "four layers, and the rest"


# Rounding


def test_bfloat16_is_the_same_whether_or_not_parameters_stay_gathered(pool, four_layers):
    """Also over logprob passes between steps, which leave units gathered."""
    results = []
    for reshard in (True, False):
        config = {
            "dtype": "bfloat16",
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
        "dtype": "float16",
        "loss_scale": 2.0**24,
        "scheduler": schedule("linear")["scheduler"],
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


def test_a_float16_step_has_the_norm_and_the_clipping_of_float32_whatever_the_loss_scale(
    pool, four_layers
):
    # Plain descent: with AdamW a gradient that is a thousand times too small moves as far.
    config = DESCENT | {"max_grad_norm": 0.5}
    found = [
        pool.run(2, f"{CASES}:train", four_layers(), config | one, 1)[0]
        for one in (
            {},
            {"dtype": "float16", "loss_scale": 2.0**8},
            {"dtype": "float16", "loss_scale": 2.0**12},
        )
    ]
    (exact, moved), *scaled = found
    assert exact[0]["train/grad_norm"] > 0.5, "clipping must be at work"
    for metrics, parameters in scaled:
        assert metrics[0]["train/skipped_steps"] == 0
        assert metrics[0]["train/grad_norm"] == pytest.approx(exact[0]["train/grad_norm"], rel=1e-2)
        assert largest_difference(parameters, moved) < 0.02 * 0.1 * 0.5  # of lr * max_grad_norm


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
        config = {"parallel": parallel, "micro_batch_tokens": 512, "dtype": "bfloat16"}
        answers = pool.run(ranks, f"{CASES}:logprobs", folder, config | changes, temperature)
        return torch.cat(answers)

    exact, larger = heads
    assert torch.equal(run(exact, 0.7), run(larger, 0.7))
    expected = run(exact, 0.7 / LARGER, float32_head=True)
    assert (run(larger, 0.7, float32_head=True) - expected).abs().max() < TOLERANCE
    assert (run(exact, 0.7, float32_head=True) - expected).abs().max() > 10 * TOLERANCE


# Checks


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("one", "float32"),
        ("dp2", "float16"),  # no loss scale could be at fault
        ("tp2", "float32"),
        ("pp2_1f1b", "float32"),
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
    debug = DebugConfig(checks=True, metrics=True)
    config = {"parallel": parallel, "debug": debug}
    metrics, _ = pool.run(ranks, f"{CASES}:train", four_layers(), config, 1)[-1]
    assert metrics[0]["memory/backward_resident_gib"] > 0
    assert sum(metrics[0][name] for name in metrics[0] if name.endswith("_count")) > 0


@pytest.mark.parametrize("name", ["tp2", "hybrid2x2", "ddp2"])
def test_a_copy_that_is_one_rounding_off_is_named(name, pool, four_layers):
    ranks, parallel = LAYOUTS[name]
    config = {"parallel": parallel, "debug": DebugConfig(checks=True)}
    target = f"{CASES}:perturbed"
    messages = pool.run(ranks, target, four_layers(), config, "model.norm.weight")
    assert all("model.norm.weight" in message for message in messages), messages


@pytest.mark.parametrize("parallel", [layout(tp=2, sequence_parallel=True), layout(replicate=2)])
def test_the_checks_find_one_copy_of_a_layers_norm_on_four_ranks(parallel, pool, four_layers):
    config = {
        "parallel": parallel,
        "debug": DebugConfig(checks=True),
    }
    metrics, _ = pool.run(4, f"{CASES}:train", four_layers(), config, 1)[0]
    assert metrics[0]["train/grad_norm"] > 0
    name = "model.layers.2.input_layernorm.weight"
    messages = pool.run(4, f"{CASES}:perturbed", four_layers(), config, name)
    axis = "tp" if parallel.tensor_parallel_size > 1 else "replicate"
    assert all(f"along axis {axis}: '{name}'" in message for message in messages), messages
