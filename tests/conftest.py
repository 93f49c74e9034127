"""Shared parts: tiny models made from a config, and one local Ray for all tests that need it."""

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: two busy cores make threads slower, not faster
os.environ["HF_HUB_OFFLINE"] = "1"
# Tests start more than a hundred processes, which would each compile the package for a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nemo_like.distributed.worker import keep_compiler_cache
from tests.forked_workers import ForkServer
from tests.layouts import FOUR_LAYERS
from tests.not_here import say_loudly

if TYPE_CHECKING:
    from tests.process_pool import ProcessPool

keep_compiler_cache()  # as a command does, and before torch is imported
# A shell starts commands in the background with these ignored, and tests of Ctrl-C would wait.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ARCHITECTURES = ("llama", "qwen2", "qwen3")
WORKER_IMPORTS = (
    "nemo_like.policy.worker",
    "nemo_like.rollout.worker",
    # What these import when they need it, and Ray when it connects.
    "nemo_like.algorithms.checks",
    "nemo_like.generation.hf_engine",
    "ray._common.usage.usage_lib",
    "ray._private.arrow_serialization",
    "starlette.datastructures",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "transformers.models.llama.modeling_llama",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also more seeds, recipes and invariances")


LONGEST_FIRST = (
    "command_line", "slurm", "multi_node", "every_key", "ray_jobs", "invariance", "cluster", "api",
    "grpo", "engines", "exports", "ports", "distillation", "reward_processes", "episodes",
    "code_reward", "text_algorithms", "ppo", "ends", "policy", "evaluation", "lora", "wheel",
    "doors", "adapter_refits", "recipes", "vllm_scheduler", "remote_code", "training_engine",
    "reward_model_environment", "grpo_options", "exports_in_engines", "agreement_with_trl",
    "agreement_with_trl_pairs", "weights",
)  # fmt: skip
"""Files that begin, so that two workers end at the same time."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {f"test_{name}": number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    say_loudly(terminalreporter)


@pytest.fixture(autouse=True)
def signals_of_their_own() -> Iterator[None]:
    """A command that ends ignores signals for good; what later tests start would inherit that."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def algorithms_of_their_own() -> Iterator[None]:
    """A script's algorithm stays registered in its process, and would be in later tests."""
    from nemo_like.compose import registry

    before = dict(registry._of_scripts)
    yield
    registry._of_scripts.clear()
    registry._of_scripts.update(before)


def build_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with a ChatML template: every text can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(folder)


def build_model(
    folder: Path, architecture: str = "llama", tied: bool = False, **changes: int
) -> Path:
    """A two-layer model of a stock architecture with head size 64 and random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    build_tokenizer(folder)
    settings = {
        "vocab_size": 259,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(architecture, **settings | changes)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """``tiny_model(architecture="llama", tied=False)`` -> folder; each is built once."""
    built: dict[tuple[str, bool], str] = {}

    def get(architecture: str = "llama", tied: bool = False) -> str:
        key = (architecture, tied)
        if key not in built:
            name = f"{architecture}-{'tied' if tied else 'untied'}"
            built[key] = str(build_model(tmp_path_factory.mktemp(name), architecture, tied))
        return built[key]

    return get


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """For Ray workers, and drivers, that need not import."""
    server = ForkServer(*WORKER_IMPORTS)
    yield server
    server.close()


@pytest.fixture(scope="session")
def local_ray(fork_server: ForkServer) -> Iterator[None]:
    """A Ray of its own with eight CPUs on paper; its workers need not import."""
    import ray

    os.environ.pop("RAY_ADDRESS", None)
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"py_executable": fork_server.command},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Like ``tiny_model``, with layers, heads and a vocabulary that two-way splits divide."""
    built: dict[tuple[str, bool], str] = {}

    def get(architecture: str = "llama", tied: bool = False) -> str:
        key = (architecture, tied)
        if key not in built:
            folder = tmp_path_factory.mktemp(f"four-{architecture}-{tied}")
            built[key] = str(build_model(folder, architecture, tied, **FOUR_LAYERS))
        return built[key]

    return get


@pytest.fixture(scope="session")
def straight(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six small steps without interruption; read only.

    Every step warns of its mismatch, which must change no number: other runs have the usual limit.
    """
    from tests import small_runs

    folder = tmp_path_factory.mktemp("straight")
    small_runs.run(
        folder,
        "grpo.max_steps=6",
        "validation.every_steps=2",
        "logging.sinks=[tensorboard]",
        "mismatch.max_mean_abs=1e-12",
    )
    return folder


@pytest.fixture(scope="session")
def pool() -> "Iterator[ProcessPool]":
    """Eight processes that stay, for tests of the training engine."""
    from tests.process_pool import ProcessPool

    models = [f"transformers.models.{name}.modeling_{name}" for name in ARCHITECTURES]
    pool = ProcessPool(8, preload=("tests.engine_cases", "tests.three_steps", *models))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def vllm_process() -> Iterator[ProcessPoolExecutor]:
    """Imports vLLM, which changes what it finds, once and away from other tests."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        yield process
