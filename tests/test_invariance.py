"""One exact loss: layouts, precision of layout, packing and micro-batches change nothing.

Each case trains three steps on gloo processes and must give the loss, gradient norm, logprobs and
parameters of a single process that takes one padded row at a time.
"""

from dataclasses import replace

import pytest
import torch

from nemo_like.config.choices import Batching, Checkpointing
from tests.layouts import LAYOUTS
from tests.three_steps import Outcome, merged

TOLERANCE = 1e-5
TARGET = "tests.three_steps:three_steps"


@pytest.fixture(scope="module")
def baseline(pool, four_layers):
    results: dict[tuple, Outcome] = {}

    def get(loss_kind, architecture="llama", tied=False):
        key = (loss_kind, architecture, tied)
        if key not in results:
            config = {"batching": Batching.padded, "micro_batch_size": 2}
            if loss_kind != "preference":
                config["micro_batch_size"] = 1
            path = four_layers(architecture, tied)
            results[key] = merged(pool.run(1, TARGET, path, config, loss_kind))
        return results[key]

    return get


def check(pool, baseline, four_layers, ranks, config, loss_kind, architecture="llama", tied=False):
    path = four_layers(architecture, tied)
    actual = merged(pool.run(ranks, TARGET, path, config, loss_kind))
    assert_same(actual, baseline(loss_kind, architecture, tied))


def assert_same(actual: Outcome, expected: Outcome, tolerance=TOLERANCE):
    for name, numbers in expected.numbers.items():
        assert actual.numbers[name] == pytest.approx(numbers, abs=tolerance), name
    assert actual.logprobs.keys() == expected.logprobs.keys()
    for row, logprobs in expected.logprobs.items():
        assert (actual.logprobs[row] - logprobs).abs().max() < tolerance, row
    assert actual.parameters.keys() == expected.parameters.keys()
    for name, tensor in expected.parameters.items():
        assert (actual.parameters[name] - tensor).abs().max() < tolerance, name


@pytest.mark.parametrize("loss_kind", ["policy_gradient", "sft", "preference"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_invariance_of_layouts_packed(name, loss_kind, pool, baseline, four_layers):
    ranks, parallel = LAYOUTS[name]
    config = {"parallel": parallel, "micro_batch_tokens": 64}
    check(pool, baseline, four_layers, ranks, config, loss_kind)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        (name, rows)
        for name, (ranks, _) in LAYOUTS.items()
        for rows in (1, 2, 4)
        if "cp" not in name and (ranks < 8 or rows == 1)  # eight processes on two cores are slow
    ],
)
def test_invariance_of_layouts_padded_in_micro_batches(name, rows, pool, baseline, four_layers):
    ranks, parallel = LAYOUTS[name]
    config = {"parallel": parallel, "batching": Batching.padded, "micro_batch_size": rows}
    check(pool, baseline, four_layers, ranks, config, "policy_gradient")


@pytest.mark.parametrize("checkpointing", [Checkpointing.full, Checkpointing.selective])
@pytest.mark.parametrize("name", ["one", "dp2", "ddp2", "tp2_sequence", "cp2", "dp2_pp2"])
def test_invariance_of_recomputed_activations(name, checkpointing, pool, baseline, four_layers):
    ranks, parallel = LAYOUTS[name]
    config = {
        "parallel": parallel,
        "micro_batch_tokens": 64,
        "activation_checkpointing": checkpointing,
        "logprob_chunk_tokens": 5,
    }
    check(pool, baseline, four_layers, ranks, config, "policy_gradient")


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("llama", True), ("qwen2", False), ("qwen2", True), ("qwen3", False), ("qwen3", True)],
)
@pytest.mark.parametrize(
    "name", ["dp2", "ddp2", "tp2_sequence", "cp2", "pp2_1f1b", "pp2_interleaved", "dp2_tp2_pp2"]
)
def test_invariance_of_architectures_and_ties(
    name, architecture, tied, pool, baseline, four_layers
):
    ranks, parallel = LAYOUTS[name]
    config = {"parallel": parallel, "micro_batch_tokens": 64}
    check(pool, baseline, four_layers, ranks, config, "policy_gradient", architecture, tied)


def test_invariance_of_the_tolerance_would_show_a_doubled_gradient(baseline):
    expected = baseline("policy_gradient")
    wrong = replace(expected, numbers={"loss": expected.numbers["loss"], "grad_norm": [1e-3] * 3})
    with pytest.raises(AssertionError, match="grad_norm"):
        assert_same(wrong, expected)
    moved = {name: tensor + 2e-5 for name, tensor in expected.parameters.items()}
    with pytest.raises(AssertionError):
        assert_same(replace(expected, parameters=moved), expected)
    assert torch.tensor(expected.numbers["grad_norm"]).min() > 0.5, "clipping must be at work"
