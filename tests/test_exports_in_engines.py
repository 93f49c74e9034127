"""vLLM after three refits computes what transformers reads from a folder with the same tensors."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from tests import exported_models
from tests.exported_models import MOE, ROUTED, SHAPE

TOLERANCE = 1e-5
PROMPTS = [list(range(10, 50)), list(range(100, 117)), [7, 8, 9]]
NUM_NEW = 8

SIZES = SHAPE | {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 128}
HEAD = {"head_dim": 64}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3MoeConfig", HEAD | MOE),
    "qwen3-moe-tied": ("Qwen3MoeConfig", HEAD | MOE | {"tie_word_embeddings": True}),
    # Its experts are no multiple of what the kernels want: packed ones have another shape.
    "qwen2-moe-odd": (
        "Qwen2MoeConfig",
        MOE | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 64},
    ),
    "mixtral": ("MixtralConfig", HEAD | LOCAL | {"sliding_window": None}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4-moe": ("Glm4MoeConfig", HEAD | ROUTED | {"n_group": 1, "topk_group": 1}),
    # vLLM copies its experts in without its own loaders.
    "gpt-oss": ("GptOssConfig", HEAD | LOCAL | {"sliding_window": 128}),
    # Its output head has a bias, which vLLM makes when it comes.
    "phi": ("PhiConfig", {"num_key_value_heads": 2}),
    # vLLM runs it by transformers' own code.
    "olmo2": ("Olmo2Config", {}),
    # Its files hold the tied head, too, so that vLLM makes one of its own.
    "qwen2-tied-head-in-files": ("Qwen2Config", {"tie_word_embeddings": True}),
}


def build(family: str, folder: Path) -> Path:
    """Save a random model."""
    kind, changes = FAMILIES[family]
    config = getattr(transformers, kind)(**(SIZES | changes))
    config.initializer_range = 0.08
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # norms and biases, which are all ones or zeros
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    return folder


def with_noise(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: each + 0.03 * torch.randn(each.shape, generator=generator)
        for name, each in tensors.items()
    }


def largest_gaps(family: str, root: Path) -> list[float]:
    """After each refit: of prompts' logprobs and of sampled tokens'."""
    from tests.exported_engines import RefittedEngine, tensors_on_disk

    transformers.utils.logging.set_verbosity_error()
    first = build(family, root / "first")
    sent = {seed: with_noise(tensors_on_disk(first), seed) for seed in range(3)}
    models = {}
    for seed, tensors in sent.items():
        folder = shutil.copytree(first, root / str(seed))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        models[seed] = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
    if family.endswith("head-in-files"):
        tensors = tensors_on_disk(first)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, first / "model.safetensors", {"format": "pt"})
    rows, logprobs = [], []
    with RefittedEngine(first) as engine:
        for tensors in sent.values():
            engine.refit(tensors)
            completions = engine.complete(PROMPTS, NUM_NEW)
            rows.append([p + ids for p, (ids, _) in zip(PROMPTS, completions, strict=True)])
            logprobs.append((engine.prompt_logprobs(PROMPTS), [each for _, each in completions]))
    gaps = []
    for model, texts, (of_prompts, sampled) in zip(models.values(), rows, logprobs, strict=True):
        expected = [plain_logprobs(model, row) for row in texts]
        pairs = list(zip(of_prompts, sampled, expected, strict=True))
        gaps += [
            max((own - plain[: len(own)]).abs().max().item() for own, _, plain in pairs),
            max((own - plain[-NUM_NEW:]).abs().max().item() for _, own, plain in pairs),
        ]
    return gaps


@torch.no_grad()
def plain_logprobs(model: Any, row: list[int]) -> Tensor:
    logprobs = model(torch.tensor([row]), use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(row[1:])[:, None])[:, 0]


def refusal_of_gap(root: Path) -> str:
    """What a refit that lacks a tensor ends with."""
    from tests.exported_engines import RefittedEngine, tensors_on_disk

    first = build("gpt-oss", root)
    tensors = tensors_on_disk(first)
    del tensors["model.layers.1.mlp.experts.down_proj_bias"]
    with RefittedEngine(first) as engine:
        try:
            engine.refit(tensors)
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.full if family in exported_models.FAMILIES else ())
        for family in FAMILIES
    ],
)
def test_exports_refitted_three_times_are_exact_in_vllm(family, vllm_process, tmp_path):
    gaps = vllm_process.submit(largest_gaps, family, tmp_path).result()
    assert len(gaps) == 6
    assert max(gaps) < TOLERANCE, gaps


def test_a_weight_that_a_refit_did_not_bring_is_named(vllm_process, tmp_path):
    refusal = vllm_process.submit(refusal_of_gap, tmp_path).result()
    assert "vLLM did not load model.layers.1.mlp.experts." in refusal
    assert "w2_bias" in refusal
    assert refusal.endswith("set generation.backend=hf.")
