"""Optimizers, schedules, loss scaling, the global gradient: by hand and against torch's own."""

import copy
import itertools
import math
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from nemo_like.config.optimizer import OptimizerConfig, SchedulerConfig
from nemo_like.errors import RunError, UserError
from nemo_like.policy.gradients import (
    LossScale,
    clip_gradients,
    explain_non_finite,
    gradient_norm,
    non_finite_gradients,
)
from nemo_like.policy.optim import lr_factor, make_optimizers, make_schedulers
from tests.process_pool import ProcessPool

TOLERANCE = 1e-5
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}
KINDS = ("adamw", "sgd", "muon", "adafactor")


class TinyModel(nn.Module):
    """Layers, an embedding and a head, with sizes that two ranks cannot share evenly."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 12)
        self.layers = nn.ModuleList([nn.Linear(12, 16), nn.Linear(16, 9), nn.Linear(9, 1)])
        self.norm = nn.LayerNorm(9)
        self.head = nn.Linear(1, 5, bias=False)

    def forward(self, ids):
        hidden = self.norm(self.layers[1](torch.tanh(self.layers[0](self.embed(ids)))))
        return self.head(self.layers[2](hidden))


def loss_of(model, step=0):
    ids = torch.randint(0, 7, (6,), generator=torch.Generator().manual_seed(step))
    return model(ids).square().sum()


def sharded(layout):
    model = TinyModel()
    if layout == "fsdp":
        return fully_shard(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if layout == "hybrid":
        return fully_shard(model, mesh=mesh)
    plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    parallelize_module(model, mesh["inner"], plan)
    return fully_shard(model, mesh=mesh["outer"])


def own_optimizers(model, kind):
    config = OptimizerConfig(kind=kind, **SETTINGS)
    return make_optimizers(model.named_parameters(), config)


def torch_optimizers(model, kind):
    """What ``own_optimizers`` must equal, written out with torch's classes."""
    lr, decay, momentum = SETTINGS["lr"], SETTINGS["weight_decay"], SETTINGS["momentum"]
    named = list(model.named_parameters())
    layers = [p for name, p in named if p.ndim == 2 and name.startswith("layers")]

    def groups(params):
        spared = [p for p in params if p.ndim == 1]
        decayed = [p for p in params if p.ndim == 2]
        return [{"params": spared, "weight_decay": 0.0}, {"params": decayed, "weight_decay": decay}]

    everything = [p for _, p in named]
    if kind == "adamw":
        return [torch.optim.AdamW(groups(everything), lr=lr)]
    if kind == "sgd":
        return [torch.optim.SGD(groups(everything), lr=lr, momentum=momentum)]
    if kind == "adafactor":
        return [torch.optim.Adafactor(groups(everything), lr=lr)]
    rest = [p for p in everything if not any(p is layer for layer in layers)]
    muon = torch.optim.Muon(
        layers, lr=lr, weight_decay=decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, torch.optim.AdamW(groups(rest), lr=lr)]


def three_steps(model, optimizers):
    for step in range(3):
        loss_of(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def largest_difference(actual, expected):
    pairs = zip(actual, expected, strict=True)
    return max((whole(a) - whole(b)).abs().max().item() for a, b in pairs)


def difference_after_three_steps(layout, kind):
    model, alone = sharded(layout), TinyModel()
    three_steps(model, own_optimizers(model, kind))
    three_steps(alone, torch_optimizers(alone, kind))
    return largest_difference(model.parameters(), alone.parameters())


def gaps_of_norm_and_clipped_gradients(layout):
    """From one process: the relative one of the norm, and that of gradients after clipping to 1."""
    model, alone = sharded(layout), TinyModel()
    loss_of(model).backward()
    loss_of(alone).backward()
    named = dict(model.named_parameters())
    norm = gradient_norm(named)
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    assert expected > 1
    clip_gradients(named, norm, 1.0)
    clipped = largest_difference(
        [p.grad for p in named.values()], [p.grad for p in alone.parameters()]
    )
    return abs(norm.item() / expected.item() - 1), clipped


def with_gradient(model, values):
    weight = model.weight
    weight.grad = distribute_tensor(torch.tensor(values), weight.device_mesh, weight.placements)
    return {"weight": weight}


def measure_on_two():
    rank = dist.get_rank()
    model = fully_shard(nn.Linear(1, 2, bias=False))
    clipped = {}
    for limit in (None, 1.0, 10.0):
        named = with_gradient(model, [[3.0], [4.0]])
        norm = gradient_norm(named)
        clip_gradients(named, norm, limit)
        clipped[limit] = (norm.item(), whole(model.weight.grad).norm().item())
    broken = with_gradient(model, [[3.0], [math.nan]])
    error = explain_non_finite(gradient_norm(broken), broken, rank, "critic.lr")
    # Two pipeline stages: one has a gradient of 3 and the embedding, the other 4 and its copy.
    stage = {name: nn.Parameter(torch.zeros(1)) for name in (f"layers.{rank}", "head")}
    stage[f"layers.{rank}"].grad = torch.tensor([3.0 + rank])
    stage["head"].grad = torch.tensor([12.0])
    pipeline = gradient_norm(
        stage, pipeline_group=dist.group.WORLD, counted_elsewhere={"head"} if rank else ()
    )
    return {
        "clipped": clipped,
        "non-finite": (non_finite_gradients(broken), str(error)),
        "pipeline": pipeline.item(),
        "gradient gaps": gaps_of_norm_and_clipped_gradients("fsdp"),
        "step gaps": {kind: difference_after_three_steps("fsdp", kind) for kind in KINDS},
        "libraries": "transformers" in sys.modules,
    }


def measure_on_four():
    layouts = ("hybrid", "tensor parallel")
    return {
        "gradient gaps": {name: gaps_of_norm_and_clipped_gradients(name) for name in layouts},
        "step gaps": {
            pair: difference_after_three_steps(*pair) for pair in itertools.product(layouts, KINDS)
        },
    }


@pytest.fixture(scope="module")
def small_pool():
    """Processes without transformers, unlike those of ``pool``."""
    # An optimizer's first step imports torch._dynamo, which takes seconds.
    pool = ProcessPool(4, preload=(__name__, "torch._dynamo"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def two_ranks(small_pool):
    return small_pool.run(2, f"{__name__}:measure_on_two")


@pytest.fixture(scope="module")
def four_ranks(small_pool):
    return small_pool.run(4, f"{__name__}:measure_on_four")


def test_every_rank_sees_the_norm_of_all_shards_and_clips_by_it(two_ranks):
    for result in two_ranks:
        assert result["clipped"][None] == pytest.approx((5.0, 5.0))
        assert result["clipped"][1.0] == pytest.approx((5.0, 1.0))
        assert result["clipped"][10.0] == pytest.approx((5.0, 5.0))


def test_uneven_and_empty_shards_count_as_in_a_single_process(two_ranks):
    for result in two_ranks:
        assert max(result["gradient gaps"]) < TOLERANCE


def test_copies_of_a_shard_count_once(four_ranks):
    for result in four_ranks:
        assert max(result["gradient gaps"]["hybrid"]) < TOLERANCE


def test_shards_of_tensor_parallel_shards_count_once(four_ranks):
    for result in four_ranks:
        assert max(result["gradient gaps"]["tensor parallel"]) < TOLERANCE


def test_pipeline_stages_add_up_and_a_tied_embedding_counts_once(two_ranks):
    assert [result["pipeline"] for result in two_ranks] == [13.0, 13.0]  # 3, 4 and 12


def test_a_nan_is_named_on_the_rank_that_has_it(two_ranks):
    (elsewhere, other), (here, own) = [result["non-finite"] for result in two_ranks]
    assert (elsewhere, here) == ([], ["weight"])
    assert own == (
        "The gradient norm is nan (rank 1: 1 parameters, first weight); stopped before the "
        "optimizer step. Begin a new run with a lower learning rate (critic.lr; a "
        "resumed run keeps its own), or "
        "look at the step's rows (where the run samples: trajectories.jsonl)."
    )
    assert "rank 0: all finite, so they are on another rank" in other


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_parameters_step_as_in_a_single_process(kind, two_ranks):
    assert two_ranks[0]["step gaps"][kind] < TOLERANCE


@pytest.mark.parametrize("layout", ["hybrid", "tensor parallel"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_on_two_axes_step_as_in_a_single_process(layout, kind, four_ranks):
    assert four_ranks[0]["step gaps"][layout, kind] < TOLERANCE


def test_ranks_of_these_tests_load_no_model_library(two_ranks):
    assert not any(result["libraries"] for result in two_ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_parameters_step_as_with_the_optimizers_of_torch(kind):
    model, expected = TinyModel(), TinyModel()
    three_steps(model, own_optimizers(model, kind))
    three_steps(expected, torch_optimizers(expected, kind))
    assert largest_difference(model.parameters(), expected.parameters()) < 1e-6


def plain(*gradients):
    named = {str(i): nn.Parameter(torch.zeros(len(g))) for i, g in enumerate(gradients)}
    for parameter, gradient in zip(named.values(), gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return named


def test_clipping_divides_by_the_loss_scale_in_the_same_pass():
    named = plain([24.0], [32.0])  # 3 and 4 under a loss scale of 8
    norm = gradient_norm(named) / 8
    clip_gradients(named, norm, max_norm=2.5, grad_scale=8.0)
    assert [p.grad.item() for p in named.values()] == pytest.approx([1.5, 2.0], abs=TOLERANCE)


def test_the_loss_scale_does_not_change_where_the_limit_is():
    scale = 65536.0  # the first one in float16
    named = plain([3 * scale], [4 * scale])
    clip_gradients(named, gradient_norm(named) / scale, max_norm=1.0, grad_scale=scale)
    assert [p.grad.item() for p in named.values()] == pytest.approx([0.6, 0.8], rel=1e-5)


def test_gradients_below_the_limit_are_left_as_they_are():
    named = plain([3.0], [4.0])
    versions = [p.grad._version for p in named.values()]
    clip_gradients(named, gradient_norm(named), max_norm=6.0)
    assert [p.grad._version for p in named.values()] == versions


def test_parameters_without_a_gradient_do_not_count():
    named = plain([3.0, 4.0]) | {"frozen": nn.Parameter(torch.ones(3))}
    assert gradient_norm(named).item() == 5.0
    assert non_finite_gradients(named) == []


def test_only_the_first_three_of_many_parameters_are_named():
    named = plain([math.nan], [1.0], [math.inf], [-math.inf], [math.nan])
    assert non_finite_gradients(named) == ["0", "2", "3", "4"]
    error = explain_non_finite(gradient_norm(named), named, 2, "policy.optimizer.lr")
    assert "Begin a new run with a lower learning rate" in str(error)
    assert "rank 2: 4 parameters, first 0, 2, 3)" in str(error)


def test_weight_decay_spares_norms_and_biases():
    named = dict(TinyModel().named_parameters())
    decayed = {"embed.weight", "head.weight", *(f"layers.{i}.weight" for i in range(3))}
    (optimizer,) = make_optimizers(named.items(), OptimizerConfig(weight_decay=0.1))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = next(name for name, p in named.items() if p is parameter)
            assert group["weight_decay"] == (0.1 if name in decayed else 0.0), name


def test_muon_takes_the_matrices_of_layers_only():
    named = dict(TinyModel().named_parameters())
    config = OptimizerConfig(kind="muon")
    muon, adamw = make_optimizers(named.items(), config)
    taken = [p for group in muon.param_groups for p in group["params"]]
    assert [id(p) for p in taken] == [id(named[f"layers.{i}.weight"]) for i in range(3)]
    assert sum(len(group["params"]) for group in adamw.param_groups) == len(named) - 3


def test_frozen_parameters_have_no_optimizer():
    model = TinyModel()
    model.embed.requires_grad_(False)
    (optimizer,) = make_optimizers(model.named_parameters(), OptimizerConfig())
    taken = [p for group in optimizer.param_groups for p in group["params"]]
    assert not any(p is model.embed.weight for p in taken)


def test_a_kind_that_cannot_work_says_what_to_do():
    outside = [("head.weight", nn.Parameter(torch.zeros(2, 2)))]
    with pytest.raises(UserError, match=r"kind=muon finds no matrix .*kind=adamw"):
        make_optimizers(outside, OptimizerConfig(kind="muon"))


def test_learning_rates_by_hand():
    def factors(max_steps, **keys):
        config = SchedulerConfig(**keys)
        return [lr_factor(step, config, max_steps) for step in range(max_steps)]

    assert factors(4, kind="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert factors(3, kind="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.6, 0.2])
    cosine = [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0]
    assert factors(5, kind="cosine") == pytest.approx(cosine)
    stable = factors(7, kind="wsd", warmup_steps=2, decay_steps=3, min_lr_ratio=0.1)
    assert stable == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.7, 0.4, 0.1])
    assert factors(3, kind="wsd", decay_steps=1) == [1.0, 1.0, 0.0]
    # A decay that is longer than what the warm-up leaves begins where that ends.
    assert factors(4, kind="wsd", warmup_steps=2, decay_steps=3) == [0.5, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_steps_after_the_end_of_a_schedule_keep_its_last_rate(kind):
    config = SchedulerConfig(kind=kind, warmup_steps=1, decay_steps=2, min_lr_ratio=0.25)
    assert [lr_factor(step, config, 5) for step in (4, 5, 9)] == pytest.approx([0.25] * 3)


def test_a_resumed_schedule_has_the_learning_rates_of_one_that_was_not_interrupted():
    """Both optimizers of muon, with decay; saved after step 3."""
    config = SchedulerConfig(kind="cosine", warmup_steps=2)

    def start():
        optimizers = own_optimizers(TinyModel(), "muon")
        return optimizers, make_schedulers(optimizers, config, 7)

    def rates(optimizers, schedulers, steps):
        seen = []
        for _ in range(steps):
            seen.append([group["lr"] for opt in optimizers for group in opt.param_groups])
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
        return seen

    straight = rates(*start(), 7)
    first, second = start(), start()
    assert rates(*first, 3) == straight[:3]
    for old, new in zip(itertools.chain(*first), itertools.chain(*second), strict=True):
        new.load_state_dict(old.state_dict())
    assert rates(*second, 4) == straight[3:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_optimizer_steps_as_one_that_was_not_interrupted(kind):
    model = TinyModel()
    straight = own_optimizers(model, kind)
    three_steps(model, straight)
    resumed_model = TinyModel()
    resumed_model.load_state_dict(model.state_dict())
    resumed = own_optimizers(resumed_model, kind)
    for old, new in zip(straight, resumed, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    three_steps(model, straight)
    three_steps(resumed_model, resumed)
    assert largest_difference(resumed_model.parameters(), model.parameters()) == 0.0


def test_loss_scale_halves_at_an_overflow_and_doubles_after_good_steps_in_a_row():
    scale = LossScale(16.0, growth_steps=3)
    seen = []
    for overflowed in (True, False, False, True, False, False, False, False):
        scale.update(overflowed)
        seen.append(scale.factor)
    assert seen == [8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]
    assert scale.skipped_steps == 2


def test_loss_scale_continues_from_its_state():
    first, second = (LossScale(4.0, growth_steps=2) for _ in range(2))
    for overflowed in (True, False):
        first.update(overflowed)
    second.load_state_dict(first.state_dict())
    second.update(False)
    assert (second.factor, second.skipped_steps) == (4.0, 1)


def test_an_overflow_at_the_least_loss_scale_ends_the_run():
    scale = LossScale(2.0)
    scale.update(True)
    with pytest.raises(RunError, match=r"without any loss scale, .* policy\.dtype=bfloat16"):
        scale.update(True)
