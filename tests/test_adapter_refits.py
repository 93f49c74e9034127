"""Adapters that travel apart: engines compute with model and adapters as peft does.

The reference is a peft model made here, which knows nothing of the policy's code.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_like.config.optimizer import LoraConfig
from nemo_like.distributed.worker import listening_store
from nemo_like.errors import RunError, UserError
from nemo_like.generation.hf_engine import HFEngine
from nemo_like.generation.vllm.engine import VLLMEngine
from nemo_like.generation.vllm.lora import replace_adapters
from nemo_like.generation.vllm.settings import engine_args
from nemo_like.models.adapter_places import expected_adapters
from nemo_like.models.build import expected_tensors
from nemo_like.refit.broadcast import BroadcastLink, BroadcastSender
from nemo_like.refit.buckets import (
    announced_tensors,
    check_refit,
    is_adapter,
    plan_buckets,
    plan_refit,
)
from nemo_like.refit.ipc import IpcLink, IpcSender
from tests.test_engines import (
    BUCKET_BYTES,
    CPU,
    NOWHERE,
    SMALL_CACHE,
    TIMEOUT_S,
    Case,
    make_config,
    make_model_folder,
    run,  # noqa: F401  # a fixture
)

ALL = LoraConfig(rank=5, alpha=20, refit="adapters")
SOME = LoraConfig(rank=8, alpha=4, refit="adapters", targets=["v_proj", "o_proj", "up_proj"])


@dataclass
class AdapterCase(Case):
    """A case whose model has adapters."""

    base: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def lora(self) -> LoraConfig:
        assert self.config.lora is not None
        return self.config.lora

    def connect(self) -> None:
        dtype, num_ranks = getattr(torch, self.config.dtype), self.config.tensor_parallel_size
        buckets = plan_refit(self.config.model_path, dtype, self.lora, BUCKET_BYTES)
        if num_ranks == 1 and self.config.dtype == "float32":
            sender = BroadcastSender(listening_store("127.0.0.1", None), buckets, CPU, 1, TIMEOUT_S)
            self.senders, link = [sender], BroadcastLink("127.0.0.1", sender.port, 1, 2)
        else:
            self.senders = [IpcSender(buckets, CPU, 1, TIMEOUT_S) for _ in range(num_ranks)]
            link = IpcLink(tuple(sender.address for sender in self.senders))
        accepts = [sender.accept for sender in self.senders]
        self.all(accepts, self.engine.connect(link, buckets, TIMEOUT_S))

    def refit(self, seed: int, *, whole: bool = False) -> None:
        """Load new adapters as the next version; ``whole``: and the model, a new one."""
        torch.manual_seed(seed)
        config = LlamaConfig.from_pretrained(self.config.model_path)
        model = LlamaForCausalLM(config).to(getattr(torch, self.config.dtype)).eval()
        if whole:
            self.base = {name: each.clone() for name, each in model.state_dict().items()}
            if config.tie_word_embeddings:
                del self.base["lm_head.weight"]
        model.load_state_dict(self.base, strict=False)
        settings = peft.LoraConfig(
            r=self.lora.rank,
            lora_alpha=self.lora.alpha,
            target_modules=self.lora.targets or "all-linear",
            init_lora_weights=False,  # A and B are random, and large enough to matter
        )
        adapted = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
        adapters = {
            name.removeprefix("base_model.model."): tensor
            for name, tensor in peft.get_peft_model_state_dict(adapted).items()
        }
        self.model = adapted
        version = self.version + 1
        tensors = (self.base if whole else {}) | adapters
        sends = [
            partial(each.send, iter(tensors.items()), version, adapters_only=not whole)
            for each in self.senders
        ]
        self.all(sends, self.engine.load_weights(version, adapters_only=not whole))
        self.version = version


CASES = {
    "hf-float32": (HFEngine, ALL, False, {}),
    "hf-bfloat16-tied": (HFEngine, SOME, True, {"dtype": "bfloat16"}),
    "vllm-float32-tied": (VLLMEngine, ALL, True, SMALL_CACHE),
    "vllm-bfloat16": (VLLMEngine, SOME, False, SMALL_CACHE | {"dtype": "bfloat16"}),
    "vllm-float32-two-ranks": (VLLMEngine, SOME, True, SMALL_CACHE | {"tensor_parallel_size": 2}),
}
"""Engine, adapters, tied embeddings, changes to the engine's configuration."""
SLOW = {"vllm-bfloat16", "vllm-float32-two-ranks"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=name, marks=[pytest.mark.full] if name in SLOW else [])
        for name, case in CASES.items()
    ],
)
def case(request, tmp_path_factory, run) -> Iterator[AdapterCase]:  # noqa: F811
    engine_class, lora, tied, changes = request.param
    config = make_config(tmp_path_factory.mktemp("engine"), tied, lora=lora, **changes)
    engine = engine_class(config)
    run(engine.start())
    case = AdapterCase(engine, config, run, tolerance=1e-5 if config.dtype == "float32" else 3e-2)
    case.connect()
    yield case
    run(engine.shutdown())


def test_adapters_alone_are_refused_by_an_engine_that_holds_no_model(case):
    with pytest.raises(RunError, match="Refit 1 has adapters alone, and the engine holds no model"):
        case.run(case.engine.load_weights(1, adapters_only=True))


def test_logprobs_are_those_of_a_peft_model_after_refits_of_adapters_alone(case):
    for seed in range(5):
        case.refit(seed, whole=seed in (0, 3))
        assert case.mismatch(case.requests(4)) < case.tolerance


def test_a_refit_of_adapters_leaves_no_trace_of_the_old_ones_in_caches(case):
    requests = case.requests(2, max_new_tokens=60)
    before = case.generate(requests)
    case.refit(9)
    assert [one.token_ids for one in case.generate(requests)] != [one.token_ids for one in before]
    assert case.mismatch(case.requests(2, max_new_tokens=60)) < case.tolerance


def forget(specs):
    del specs["model.layers.1.mlp.up_proj.lora_B.weight"]


def forget_all(specs):
    for name in filter(is_adapter, list(specs)):
        del specs[name]


def widen(specs):
    shape, dtype = specs["model.layers.0.mlp.up_proj.lora_A.weight"]
    specs["model.layers.0.mlp.up_proj.lora_A.weight"] = ((shape[0] + 1, shape[1]), dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (forget, "missing: model.layers.1.mlp.up_proj.lora_B.weight"),
        (forget_all, "missing: model.layers.0.self_attn.*_proj.lora_A.weight, .* more"),
        (widen, r"up_proj.lora_A.weight is \w+\[(6|9), 128\], not \w+\[(5|8), 128\]"),
    ],
)
def test_a_sender_of_other_adapters_is_refused_and_the_weights_stay(case, change, message):
    dtype = getattr(torch, case.config.dtype)
    path = case.config.model_path
    specs = expected_tensors(path, dtype) | expected_adapters(path, dtype, case.lora)
    change(specs)
    with pytest.raises(RunError, match=message):
        case.run(case.engine.connect(NOWHERE, plan_buckets(specs, BUCKET_BYTES), TIMEOUT_S))
    assert case.mismatch(case.requests(2)) < case.tolerance


def test_an_engine_that_was_started_without_adapters_refuses_them(tmp_path, run):  # noqa: F811
    config = make_config(tmp_path)
    engine = HFEngine(config)
    run(engine.start())
    buckets = plan_refit(config.model_path, torch.float32, ALL, BUCKET_BYTES)
    with pytest.raises(RunError, match=r"unexpected: model.layers.0.self_attn.q_proj.lora_A"):
        run(engine.connect(NOWHERE, buckets, TIMEOUT_S))
    run(engine.shutdown())
    with pytest.raises(RunError, match="Refit 2 matches no adapter"):
        check_refit(2, 1, None, adapters_only=True, running=0)


def test_a_model_smaller_than_a_bucket_is_sent_in_several(tmp_path):
    """450 MB in nine and 44 MB in three, as 16 MiB are small enough."""
    shape = {"intermediate_size": 2048, "vocab_size": 5000}
    large, small = str(tmp_path / "large"), str(tmp_path / "small")
    LlamaConfig(hidden_size=1024, num_hidden_layers=21, **shape).save_pretrained(large)
    buckets = plan_refit(large, torch.bfloat16, None, 1 << 30)
    assert len(buckets) == 9, "an eighth of the total, and what does not fit"
    LlamaConfig(hidden_size=512, num_hidden_layers=4, **shape).save_pretrained(small)
    buckets = plan_refit(small, torch.bfloat16, None, 1 << 30)
    assert [one.num_bytes >> 20 for one in buckets] == [14, 15, 11]
    assert list(announced_tensors(buckets)) == list(expected_tensors(small, torch.bfloat16))


def test_targets_that_name_no_layer_are_an_error(tmp_path):
    path = make_model_folder(tmp_path, tied=False)
    with pytest.raises(UserError, match=r"q_prj names no linear layer.*did you mean q_proj"):
        expected_adapters(path, torch.float32, ALL.replace(targets=["q_prj"]))


def test_vllm_has_places_for_the_adapters_of_the_targets_and_no_others(tmp_path):
    args = engine_args(make_config(tmp_path, lora=SOME), (), 0)
    assert args["lora_target_modules"] == ["o_proj", "up_proj", "v_proj"]
    assert args["max_lora_rank"] == 8
    args = engine_args(make_config(tmp_path, lora=ALL.replace(rank=33)), (), 0)
    assert args["max_lora_rank"] == 64
    assert "lm_head" not in args["lora_target_modules"]


def test_an_adapter_without_a_place_in_vllm_is_an_error():
    manager = SimpleNamespace(modules={"qkv_proj": 1}, packed_modules={"qkv_proj": ["q_proj"]})
    runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    tensors = {"gate.lora_A.weight": torch.zeros(8, 4), "gate.lora_B.weight": torch.zeros(4, 8)}
    with pytest.raises(RuntimeError, match=r"no place for the adapter of gate; set policy.lora"):
        replace_adapters(runner, tensors, SOME)
