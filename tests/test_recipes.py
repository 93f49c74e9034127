"""Every recipe passes all checks, has what makes its paper's method, trains, and some learn."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_like.config.load import compose_config
from nemo_like.config.rules import value_of
from nemo_like.models.resolve import resolve_model
from tests.small_runs import ROOT, run

METHODS = {
    "grpo": {
        "advantage.baseline": "mean",
        "advantage.scale": "std",
        "loss.objective": "clip",
        "loss.normalization": "sequence",
        "loss.kl_coef": 0.04,
        "loss.kl_estimator": "k3",
        "loss.kl_in": "loss",
        "grpo.num_updates": 1,
    },
    "dr_grpo": {
        "advantage.baseline": "mean",
        "advantage.scale": "none",
        "loss.normalization": "constant",
        "loss.constant_tokens": None,
        "loss.kl_coef": 0,
    },
    "dapo": {
        "advantage.scale": "std",
        "advantage.overlong_penalty": 1,
        "grpo.dynamic_sampling": True,
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.28,
        "loss.normalization": "token",
        "loss.kl_coef": 0,
    },
    "gspo": {
        "loss.ratio_level": "sequence",
        "loss.normalization": "sequence",
        "loss.clip_low": 3e-4,
        "loss.clip_high": 4e-4,
        "grpo.num_updates": 4,
    },
    "cispo": {
        "loss.objective": "cispo",
        "loss.clip_low": None,
        "loss.normalization": "token",
        "grpo.dynamic_sampling": True,
        "loss.kl_coef": 0,
    },
    "rloo": {
        "advantage.baseline": "leave_one_out",
        "advantage.scale": "none",
        "loss.objective": "reinforce",
        "loss.normalization": "constant",
        "loss.constant_tokens": 1,
        "loss.kl_estimator": "k1",
        "loss.kl_in": "reward",
    },
    "reinforce": {
        "advantage.baseline": "none",
        "advantage.scale": "none",
        "loss.objective": "reinforce",
        "loss.constant_tokens": 1,
    },
    "reinforce_plus_plus": {
        "advantage.baseline": "none",
        "advantage.scale": "batch",
        "loss.objective": "clip",
        "loss.kl_estimator": "k1",
        "loss.kl_in": "reward",
        "grpo.num_generations_per_prompt": 1,
    },
    "reinforce_plus_plus_baseline": {
        "advantage.baseline": "mean",
        "advantage.scale": "batch",
        "loss.objective": "clip",
        "loss.kl_estimator": "k2",
        "loss.kl_in": "loss",
    },
}
ON_A_GPU = {f"{name}_smollm2_1gpu": {"cluster.gpus_per_node": 1} for name in ("grpo", "sft", "dpo")}
# A batch of four prompts has at most four updates.
FEWER_UPDATES = {name: ["grpo.num_mini_batches=2"] for name in ("dapo", "cispo")}


def test_every_recipe_is_listed_here():
    names = {path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml")}
    assert names == {*METHODS, *ON_A_GPU} | {name for name in names if name.startswith("ppo")}


@pytest.mark.parametrize("recipe", [*METHODS, *ON_A_GPU])
def test_a_recipe_passes_all_checks_and_has_its_method(recipe):
    config = compose_config(ROOT / "configs", f"recipes/{recipe}")
    for key, expected in (METHODS | ON_A_GPU)[recipe].items():
        assert value_of(config, key) == expected, key


@pytest.mark.parametrize("recipe", ["dapo", "cispo"])
def test_the_overlong_buffer_is_a_fifth_of_a_completion(recipe):
    config = compose_config(ROOT / "configs", f"recipes/{recipe}")
    buffer, most = config.advantage.overlong_buffer_tokens, config.generation.max_new_tokens
    assert buffer == round(most / 5)


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


# One with mini-batches, groups that are replaced and a penalty; one with KL and whitening.
_ALWAYS = ("dapo", "reinforce_plus_plus_baseline")


@pytest.mark.parametrize(
    "recipe",
    [one if one in _ALWAYS else pytest.param(one, marks=pytest.mark.full) for one in METHODS],
)
def test_a_recipe_trains(tmp_path, local_ray, recipe):
    steps = run(
        tmp_path,
        "grpo.max_steps=2",
        "validation.every_steps=0",
        *FEWER_UPDATES.get(recipe, []),
        name=f"recipes/{recipe}",
    )
    for step in (1, 2):
        assert math.isfinite(steps[step]["train/loss"])
        assert steps[step]["train/grad_norm"] > 0
    before, after = weights(resolve_model("embedded")), weights(tmp_path / "final")
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert any(not torch.equal(after[name].float(), before[name].float()) for name in after)
