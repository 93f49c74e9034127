"""Every recipe passes all checks, has what makes its paper's method, and learns."""

import itertools

import pytest

from nemo_like.compose.load import compose_config
from nemo_like.config.section import value_of
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
SCRIPTS = ("grpo", "ppo", "sft", "dpo", "rm", "distillation", "eval")
ON_A_GPU = {
    f"{name}_smollm2_1gpu": {"cluster.gpus_per_node": 1} for name in (*SCRIPTS, "grpo_tools")
}


def test_every_recipe_is_listed_here():
    names = {path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml")}
    assert names == {*METHODS, *ON_A_GPU}


@pytest.mark.parametrize("recipe", [*METHODS, *ON_A_GPU])
def test_a_recipe_passes_all_checks_and_has_its_method(recipe):
    has_to_be_given = ["teacher.model=embedded"] if recipe.startswith("distillation") else []
    config = compose_config(ROOT / "configs", f"recipes/{recipe}", has_to_be_given)
    for key, expected in (METHODS | ON_A_GPU)[recipe].items():
        assert value_of(config, key) == expected, key


@pytest.mark.parametrize("recipe", METHODS)
def test_a_recipe_takes_another_model_with_what_reads_its_completions(recipe):
    config = compose_config(ROOT / "configs", f"recipes/{recipe}", ["model=smollm2"])
    assert (config.policy.model, config.environment.reward) == ("smollm2", "math")


@pytest.mark.parametrize("recipe", ["dapo", "cispo"])
def test_the_overlong_buffer_is_a_fifth_of_a_completion(recipe):
    config = compose_config(ROOT / "configs", f"recipes/{recipe}")
    buffer, most = config.advantage.overlong_buffer_tokens, config.generation.max_new_tokens
    assert buffer == round(most / 5)


_LEARNS = [
    pytest.param(*case, marks=[] if case == ("grpo", 0) else pytest.mark.full)
    for case in itertools.product(METHODS, range(3))
]


@pytest.mark.parametrize(("recipe", "seed"), _LEARNS)
def test_a_recipe_learns(tmp_path, local_ray, recipe, seed):
    """With the recipe's own numbers: 4 steps from 0.25 of the held-out prompts to over 0.6."""
    steps = run(
        tmp_path,
        f"run.seed={seed}",
        "grpo.max_steps=4",
        "validation.every_steps=4",
        "checkpoint.export=false",
        "logging.sinks=[]",
        small=(),
        name=f"recipes/{recipe}",
    )
    before, after = (steps[step]["validation/accuracy"] for step in (0, 4))
    assert before < 0.35
    assert after > 0.6, f"{before} -> {after}"
