"""What a process does in test_exports.py: train, export, and compare with plain transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_loader as dcp_load
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.optimizer import LoraConfig
from nemo_like.config.policy import PolicyConfig
from nemo_like.errors import UserError
from nemo_like.models.build import architecture
from nemo_like.models.naming import plain_name
from nemo_like.policy import scoring
from nemo_like.policy.parallel.full_tensors import local_part
from nemo_like.policy.state.files import AsStored, read_tensors, stored_files
from nemo_like.policy.state.state import export_folder, refit_tensors
from nemo_like.policy.trainer import Trainer
from nemo_like.policy.trainer_setup import TrainerSetup
from tests.engine_cases import make_trainer, step
from tests.exported_models import EAGER
from tests.three_steps import LENGTHS, PROMPTS, make_rows

CASES = __name__
FAST = {"optimizer": PolicyConfig().optimizer.replace(lr=1e-2)}
NUM_STEPS = 3


def settings(family: str, rank: int) -> dict[str, Any]:
    """Of an engine that trains ``family``, whose weights move far enough to show."""
    attention = "eager" if family in EAGER else "sdpa"
    return FAST | {
        "attention": attention,
        "batching": "padded",
        "lora": LoraConfig(rank=rank),
    }


def rows() -> list[TensorBatch]:
    every = make_rows(preference=False)
    return [every.select([i]) for i in range(len(LENGTHS))]


def train_and_export(path: str, config: dict[str, Any], folder: str) -> Any:
    """Largest difference between the trainer's logprobs and those of its export in transformers.

    With adapters, also that of ``final/adapter`` in peft.

    Leaves the export in ``folder``, the tensors of a refit after each step next to it, and the
    trainer's logprobs of all tokens but each first one.
    """
    trainer = make_trainer(path, config)
    target = Path(folder)
    for i in range(NUM_STEPS):
        step(trainer)
        tensors = {
            name: each.clone()
            for name, each in refit_tensors(trainer, torch.float32, adapters_only=False)
        }
        save_file(tensors, target.with_name(f"refit-{i}.safetensors"))
    export_folder(trainer, target, write=True)
    ours = policy_logprobs(trainer)
    torch.save(ours, target.with_name("logprobs.pt"))
    plain = load(target)
    found = [largest_difference(ours, logprobs_in(plain))]
    if trainer.config.lora.rank:
        found.append(largest_difference(ours, logprobs_in(with_adapter(path, target / "adapter"))))
    return found


@torch.no_grad()
def values_of_the_adapter(path: str, config: dict[str, Any], folder: str) -> Any:
    """The value of a row by an export and by its ``adapter`` in peft; head and adapters trained."""
    policy = PolicyConfig().replace(**config)
    setup = TrainerSetup(config=policy, model_path=path, max_steps=1, output="values")
    trainer = Trainer(setup, torch.device("cpu"))
    for parameter in trainer.parameters.values():
        nn.init.normal_(local_part(parameter), std=0.1)
    export_folder(trainer, Path(folder), write=True)
    import peft

    kind: Any = AutoModelForSequenceClassification
    base = kind.from_pretrained(path, num_labels=1, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, Path(folder) / "adapter")
    merged, ids = kind.from_pretrained(folder, dtype=torch.float32), torch.arange(3, 13)[None]
    return [one.eval()(input_ids=ids).logits.item() for one in (merged, adapted)]


def policy_logprobs(trainer: Trainer) -> list[Tensor]:
    """Of every token but each row's first."""
    shares = rows()
    for share in shares:
        share.tokens[keys.LOSS_MASK] = torch.arange(share.num_tokens) > 0
    return [each[1:].float() for each in scoring.logprobs(trainer, shares, 1.0)["policy"]]


@torch.no_grad()
def logprobs_in(model: Any) -> list[Tensor]:
    found = []
    for row in rows():
        ids = row.tokens[keys.INPUT_IDS]
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        found.append(logprobs.gather(-1, ids[1:, None])[:, 0])
    return found


def load(folder: str | Path) -> Any:
    kind: Any = AutoModelForCausalLM
    model, found = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def with_adapter(base: str, folder: Path) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(load(base), folder).eval()


def largest_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def experts_learn(path: str, config: dict[str, Any]) -> Any:
    """Losses before each of six steps; the gradients of both factors at the first two; number of
    trainable parameters; what moved."""
    trainer = make_trainer(path, config)
    names = list(trainer.parameters)
    before = {n: t.clone() for n, t in refit_tensors(trainer, torch.float32, adapters_only=False)}
    losses, moved = [], []
    for _ in range(6):
        old = {name: p.detach().clone() for name, p in trainer.parameters.items()}
        losses.append(step(trainer)["loss"])
        moved.append({n for n, p in trainer.parameters.items() if not torch.equal(p, old[n])})
    after = refit_tensors(trainer, torch.float32, adapters_only=False)
    changed = {name for name, each in after if not torch.equal(each, before[name])}
    return losses, names, moved, changed, trainer.num_parameters()


def refused(path: str, config: dict[str, Any]) -> str:
    try:
        make_trainer(path, config)
    except UserError as error:
        return str(error)
    return ""


def reads_own_experts(path: str) -> list[str]:
    """Names of experts that this rank reads again, where the others' files are gone."""
    trainer = make_trainer(path, {})
    (stage,) = trainer.stages
    wanted = {plain_name(name): tensor for name, tensor in stage.state_dict().items()}
    stacked = {name: tensor for name, tensor in wanted.items() if "experts" in name}
    expected = {name: local_part(tensor).clone() for name, tensor in stacked.items()}
    naming = architecture(path, torch.float32).naming
    stored = stored_files(Path(path))
    sources = naming.from_disk(stored)
    read = []
    for name, tensor in stacked.items():
        first, count = torch.distributed.get_rank() * 2, len(local_part(tensor))
        assert count == 2
        local_part(tensor).zero_()
        own = sources[name].rows(first, first + count).names
        gone = {key: Path(f"/gone/{key}") for key in stored} | {key: stored[key] for key in own}
        read_tensors(path, gone, {name: tensor}, sources, naming)
        assert torch.equal(local_part(tensor), expected[name])
        read += own
    return read


def sharded_as_stored(folder: str) -> tuple[torch.Tensor, set[torch.dtype]]:
    """A float32 matrix of two ranks, read from another one as on GPUs; types that were read."""
    read = set()

    class Noted(AsStored):
        def resolve_tensor(self, read_item: Any) -> Tensor:
            tensor = super().resolve_tensor(read_item)
            read.add(tensor.dtype)
            return tensor

    mesh = init_device_mesh("cpu", (2,))
    matrix = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)])
    reader = HuggingFaceStorageReader(folder)
    dcp_load.load({"matrix": matrix}, storage_reader=reader, planner=Noted())
    return matrix.full_tensor(), read


def vllm_gaps(folder: str) -> tuple[float, float]:
    """After three refits: how far prompts' logprobs are from the trainer's, completions' from
    transformers', at most."""
    from safetensors.torch import load_file

    from tests.exported_engines import RefittedEngine

    target = Path(folder)
    plain = load(target)
    ids = [row.tokens[keys.INPUT_IDS].tolist() for row in rows()]
    prompts = [row[:end] for row, end in zip(ids, PROMPTS, strict=True)][:3]
    with RefittedEngine(target) as engine:
        for i in range(NUM_STEPS):
            engine.refit(load_file(target.with_name(f"refit-{i}.safetensors")))
        prefilled = engine.prompt_logprobs(ids)
        completed = engine.complete(prompts, 8)
    ours = torch.load(target.with_name("logprobs.pt"))
    difference = largest_difference(ours, [each.float() for each in prefilled])
    return difference, max(
        _completion_difference(plain, prompt, *one)
        for prompt, one in zip(prompts, completed, strict=True)
    )


@torch.no_grad()
def _completion_difference(
    model: Any, prompt: list[int], ids: list[int], logprobs: Tensor
) -> float:
    every = torch.tensor([prompt + ids])
    expected = model(input_ids=every, use_cache=False).logits[0, len(prompt) - 1 : -1]
    expected = expected.log_softmax(-1).gather(-1, every[0, len(prompt) :, None])[:, 0]
    return (expected - logprobs.float()).abs().max().item()
