"""Moments in host memory and in fewer bits: the same steps, checkpoints, and what fits where."""

from typing import get_args

import psutil
import pytest
import torch
from torch import nn

from nemo_like.algorithms.engine_size import share_gpus
from nemo_like.cli import main
from nemo_like.compose.load import compose_config
from nemo_like.config.debug import DebugConfig
from nemo_like.config.optimizer import Moments, OptimizerConfig
from nemo_like.config.policy import ParallelConfig, PolicyConfig
from nemo_like.errors import UserError
from nemo_like.generation.protocol import EngineConfig
from nemo_like.planning.memory import predict_memory
from nemo_like.planning.model_shape import GIB, ModelShape, Role
from nemo_like.planning.offload import (
    CONTEXT_BYTES,
    SLACK,
    MemoryNeeds,
    Neighbours,
    auto_line,
    choose,
    memory_needs,
)
from nemo_like.planning.resources import plan_run
from nemo_like.policy.moments.flat_adamw import FlatAdamW, HostMemory
from nemo_like.policy.optim import ShardwiseAdamW, check_host_memory, make_optimizers
from tests.engine_cases import CASES, largest_difference
from tests.layouts import LAYOUTS
from tests.small_runs import ROOT
from tests.test_policy_shards import Ranks, model_of

SHAPES = ((37, 12), (300,), (5, 700), (3, 4, 50), (1,), (64, 64))
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
    ),
]


def parameters(device):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(device)) for shape in SHAPES]


def groups(ours):
    vectors, matrices = [p for p in ours if p.ndim < 2], [p for p in ours if p.ndim > 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def flat(ours, moments, *, on_host, bucket_numbers=500):
    fused = ours[0].device.type == "cuda"
    return FlatAdamW(
        groups(ours),
        moments=moments,
        on_host=on_host,
        bucket_numbers=bucket_numbers,
        fused=fused or None,
        **OPTIONS,
    )


def take_steps(optimizer, ours, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in ours:
            gradient = torch.randn(parameter.shape, generator=generator) * 0.01
            parameter.grad = gradient.to(parameter.device)
        optimizer.step()


def assert_equal(ours, others):
    for one, other in zip(ours, others, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bucket_numbers", [500, 1 << 20])
def test_steps_through_host_memory_are_those_of_torch_bit_by_bit(device, bucket_numbers):
    expected, ours = parameters(device), parameters(device)
    fused = True if device == "cuda" else None
    take_steps(ShardwiseAdamW(groups(expected), fused=fused, **OPTIONS), expected, range(5))
    optimizer = flat(ours, "float32", on_host=True, bucket_numbers=bucket_numbers)
    take_steps(optimizer, ours, range(5))
    assert_equal(ours, expected)
    assert all(int(state["step"]) == 5 for state in optimizer.state.values())
    optimizer.settle()
    for state in optimizer.state.values():
        assert state["exp_avg"].device.type == "cpu"
        assert state["exp_avg_sq"].abs().max() > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_rounded_moments_give_the_same_steps_wherever_they_lie(device, moments):
    here, there = parameters(device), parameters(device)
    take_steps(flat(here, moments, on_host=False), here, range(5))
    take_steps(flat(there, moments, on_host=True), there, range(5))
    assert_equal(here, there)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("moments", get_args(Moments))
def test_an_optimizer_goes_on_from_its_state_exactly(device, moments):
    straight, resumed = parameters(device), parameters(device)
    first = flat(straight, moments, on_host=True)
    take_steps(first, straight, range(3))
    second = flat(resumed, moments, on_host=True)
    for parameter, value in zip(resumed, straight, strict=True):
        parameter.data.copy_(value.data)
    second.load_state_dict(first.state_dict())
    take_steps(first, straight, range(3, 6))
    take_steps(second, resumed, range(3, 6))
    assert_equal(resumed, straight)


def test_parameters_without_a_gradient_stay_and_count_no_step():
    ours = parameters("cpu")
    optimizer = flat(ours, "float32", on_host=True)
    before = ours[0].detach().clone()
    ours[2].grad = torch.ones_like(ours[2])
    optimizer.step()
    assert torch.equal(ours[0], before)
    assert [int(optimizer.state[p]["step"]) for p in (ours[0], ours[2])] == [0, 1]


@pytest.mark.parametrize(("moments", "tolerance"), [("bfloat16", 0.01), ("int8", 0.05)])
def test_the_second_moment_falls_with_its_gradients(moments, tolerance):
    # From 1 to 0.01 at beta2 = 0.999 it takes ten times less after 2,300 steps; rounded to the
    # nearest bfloat16, it would stay at 1 for ever.
    def last_moment(kind):
        parameter = nn.Parameter(torch.zeros(64, 64))
        optimizer = FlatAdamW(
            [{"params": [parameter], "weight_decay": 0.0}], moments=kind, on_host=False, **OPTIONS
        )
        for size in [1.0] * 200 + [0.01] * 2300:
            parameter.grad = torch.full_like(parameter, size)
            parameter.grad[:, 0] = 1.0  # keeps the scale of each row where it is
            optimizer.step()
        bucket = optimizer._buckets[0]
        (piece, stored), *_ = bucket.split(bucket.kept)
        return piece.shard.format.unpack(stored)[1][:, 1:].mean().item()

    expected = last_moment("float32")
    assert expected == pytest.approx(0.0182, rel=0.02)
    assert last_moment(moments) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_equal_rows_in_two_buckets_are_rounded_by_noise_of_their_own(moments):
    parameter = nn.Parameter(torch.zeros(2, 500))
    optimizer = flat([parameter], moments, on_host=False)
    parameter.grad = torch.rand(500, generator=torch.manual_seed(0)).expand(2, -1).clone()
    optimizer.step()
    assert len(optimizer._buckets) == 2
    one, other = optimizer.state[parameter]["exp_avg_sq"].float()
    assert 0 < (one != other).sum() < 500


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_a_small_model_learns_as_well_with_rounded_moments(moments):
    def last_loss(kind):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        target = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        optimizer = make_optimizers(
            model.named_parameters(), OptimizerConfig(lr=3e-3, moments=kind), on_host=True
        )[0]
        losses = []
        for _ in range(600):
            rows = torch.randn(64, 16)
            loss = (model(rows) - target(rows)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses[0], sum(losses[-50:]) / 50

    first, expected = last_loss("float32")
    assert expected < first / 20
    assert last_loss(moments)[1] < 1.3 * expected


def test_int8_stores_a_byte_a_number_and_a_scale_for_256_in_a_row():
    parameter = nn.Parameter(torch.zeros(3, 600))
    optimizer = FlatAdamW([{"params": [parameter]}], moments="int8", on_host=True, **OPTIONS)
    state = optimizer.state[parameter]
    assert state["exp_avg"].dtype == torch.int8
    assert state["exp_avg_sq"].dtype == torch.uint8
    assert state["exp_avg_scale"].shape == state["exp_avg_sq_scale"].shape == (3, 3)
    parameter.grad = torch.linspace(0, 1, 1800).view(3, 600)
    parameter.grad[0, 1:9] = 1e-6
    optimizer.step()
    assert state["exp_avg_sq"][0, :9].tolist() == [0] + [1] * 8  # a root of 0 would divide
    scales = state["exp_avg_scale"].repeat_interleave(256, 1)[:, :600]
    error = (state["exp_avg"].float() * scales - 0.1 * parameter.grad).abs()
    assert (error <= scales).all()


# Sharded, through the engine and checkpoints


@pytest.mark.parametrize("name", ["one", "dp2", "hybrid2x2", "dp2_tp2", "pp2_interleaved"])
def test_offloading_changes_no_number_of_a_run_and_its_checkpoints(
    name, pool, four_layers, tmp_path
):
    ranks, parallel = LAYOUTS[name]
    config = {"parallel": parallel}
    plain, away = str(tmp_path / "plain"), str(tmp_path / "away")
    path, offloaded = four_layers(), config | {"offload": "optimizer"}
    expected = pool.run(ranks, f"{CASES}:save_then_go_on", path, config, plain)[-1]
    actual = pool.run(ranks, f"{CASES}:save_then_go_on", path, offloaded, away)[-1]
    assert actual[0] == expected[0]
    assert largest_difference(actual[1], expected[1]) == 0
    # Where moments lie is no part of a checkpoint.
    for folder, going_on in ((plain, offloaded), (away, config)):
        resumed = pool.run(ranks, f"{CASES}:load_and_go_on", path, going_on, folder)[-1]
        assert resumed[0] == expected[0]
        assert largest_difference(resumed[1], expected[1]) == 0


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_rounded_moments_go_on_in_their_layout_and_in_others(moments, pool, four_layers, tmp_path):
    optimizer = OptimizerConfig(lr=3e-4, eps=1e-6, moments=moments)
    config, folder = {"optimizer": optimizer}, str(tmp_path / "step_1")
    straight = pool.run(2, f"{CASES}:save_then_go_on", four_layers(), config, folder)[-1]
    resumed = pool.run(2, f"{CASES}:load_and_go_on", four_layers(), config, folder)[-1]
    assert resumed[0] == straight[0]
    assert largest_difference(resumed[1], straight[1]) == 0
    alone = pool.run(1, f"{CASES}:load_and_go_on", four_layers(), config, folder)[0]
    # Noise depends on the place in a shard, so that a step differs by rounding of the moments.
    assert largest_difference(alone[1], straight[1]) < 1e-4
    assert alone[0]["loss"] == pytest.approx(straight[0]["loss"], abs=1e-5)


def test_a_checkpoint_goes_on_with_fewer_bits_where_it_has_what_they_need(
    pool, four_layers, tmp_path
):
    folder, path = str(tmp_path / "step_1"), four_layers()
    straight = pool.run(1, f"{CASES}:save_then_go_on", path, {}, folder)[0]
    rounded = OptimizerConfig(lr=3e-4, eps=1e-6, moments="bfloat16")
    resumed = pool.run(1, f"{CASES}:load_and_go_on", path, {"optimizer": rounded}, folder)[0]
    assert 0 < largest_difference(resumed[1], straight[1]) < 1e-4
    scaled = {"optimizer": OptimizerConfig(moments="int8")}
    (said,) = pool.run(1, f"{CASES}:refusal", path, scaled, folder)
    assert said.startswith(f"{folder} does not fit this run's model, adapters or optimizer")


def test_copies_of_a_parameter_stay_equal_with_rounded_moments(pool, four_layers):
    config = {"optimizer": OptimizerConfig(lr=3e-4, eps=1e-6, moments="bfloat16")}
    for name in ("hybrid2x2", "dp2_tp2"):
        ranks, parallel = LAYOUTS[name]
        checked = config | {"parallel": parallel, "debug": DebugConfig(checks=True)}
        pool.run(ranks, f"{CASES}:train", four_layers(), checked, 3)
    stages = config | {"parallel": LAYOUTS["pp2_1f1b"][1]}
    first, last = pool.run(2, f"{CASES}:tied_matrix", four_layers("llama", True), stages)
    assert torch.equal(first, last)


# What fits where

SEVEN_B = ModelShape(
    layers=28,
    hidden=3584,
    intermediate=18944,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocab=152064,
    tied=False,
)


def policy(**changes):
    defaults = {"micro_batch_tokens": 16384, "logprob_chunk_tokens": 4096}
    return PolicyConfig(**defaults | changes)


def test_auto_keeps_everything_on_a_gpu_that_holds_it_besides_a_sleeping_engine():
    of_model = MemoryNeeds(resident=100 * GIB, offloaded=40 * GIB, on_host=60 * GIB)
    large = choose(policy(), of_model, 100 * GIB)
    assert (large.offload, large.too_small) == ("none", False)
    assert "at most 100.0 of the GPU's 100.0 GiB" in large.reason
    small = choose(policy(), of_model, 99 * GIB)
    assert (small.offload, small.too_small) == ("optimizer", False)
    assert "would take 100.0 of the GPU's 99.0 GiB, with it 40.0" in small.reason
    assert choose(policy(), of_model, 39 * GIB).too_small
    copies = policy(parallel=ParallelConfig(data_parallel="ddp"))
    assert choose(copies, of_model, 50 * GIB).offload == "none"
    assert choose(policy(), None, 50 * GIB).offload == "none"


@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe", "interleaved"])
def test_auto_counts_the_micro_batches_that_a_pipeline_holds_at_once(schedule):
    parallel = ParallelConfig(pipeline_parallel_size=4, pipeline_schedule=schedule)
    config = policy(parallel=parallel, offload="none")
    peaks = [
        phase.total * GIB
        for rank in range(4)
        for phase in predict_memory(SEVEN_B, config, 4, pipeline_rank=rank, num_micro_batches=8)
    ]
    found = memory_needs(SEVEN_B, config, 4, Role(), Neighbours())
    assert found.resident == pytest.approx(max(peaks) * (1 + SLACK) + CONTEXT_BYTES)


def test_auto_moves_nothing_where_that_saves_nothing():
    of_model = MemoryNeeds(resident=100 * GIB, offloaded=99.5 * GIB, on_host=1 * GIB)
    small = choose(policy(), of_model, 80 * GIB)
    assert (small.offload, small.too_small) == ("none", True)
    assert "would take 99.5 of the GPU's 80.0 GiB with offloading, too" in small.reason
    assert auto_line(policy(), of_model, 1).startswith("none, as it would save nothing")


def test_models_that_share_a_node_share_its_memory():
    alone = memory_needs(SEVEN_B, policy(), 1, Role(), Neighbours())
    others = Neighbours().and_shape(SEVEN_B, policy(), 1, Role())
    both = memory_needs(SEVEN_B, policy(), 1, Role(), others)
    assert both.others_on_host == both.on_host == alone.on_host > 50 * GIB
    teacher = Neighbours().and_shape(SEVEN_B, policy(), 1, Role(trains=False))
    assert teacher.on_host == 0
    total = psutil.virtual_memory().total
    check_host_memory(2**20, 2, "policy.offload=auto", others=total / 4)
    with pytest.raises(UserError, match=r"policy.offload=auto keeps .* and 0\.\d GiB may be used"):
        check_host_memory(2**30, 2, "policy.offload=auto", others=total / 2 - 2**20)


def test_a_plan_says_what_auto_comes_to_for_each_model_that_trains(capsys):
    for name, lines in (("eval", 0), ("grpo", 1), ("ppo", 2)):
        main(["plan", name, "cluster.gpus_per_node=1"])
        printed = capsys.readouterr().out
        assert printed.count("policy.offload=auto, ") == lines


def test_needs_are_the_larger_of_training_and_sampling():
    parameters = SEVEN_B.num_parameters
    state = policy(micro_batch_tokens=64, logprob_chunk_tokens=64)
    others = Neighbours().and_engines(1, 40 * GIB, 60 * GIB, sleeps=True)
    assert others.sampling == 102 * GIB
    found = memory_needs(SEVEN_B, state, 1, Role(), others)
    # While it samples: parameters and moments of float32, and the engine.
    assert found.resident == pytest.approx(1.05 * (12 * parameters + 102 * GIB) + 1.2 * GIB)
    assert found.on_host == pytest.approx(8 * parameters)
    transit = 3 * 2**26 * 8
    assert found.offloaded == pytest.approx(
        1.05 * (4 * parameters + transit + 102 * GIB) + 1.2 * GIB
    )
    awake = Neighbours().and_engines(2, 1 * GIB, 1 * GIB, sleeps=False)
    assert awake.training == awake.sampling == 8 * GIB
    more = Neighbours().and_shape(SEVEN_B, state, 1, Role(trains=False))
    assert more.training == more.sampling == pytest.approx(4 * parameters)
    assert not awake.and_engines(1, 1, None, sleeps=False).is_known


def test_policy_and_critic_count_each_other_and_the_engines_that_share_their_gpus():
    for sampling, engines in ("null", Neighbours().and_engines(1, 3, 4, sleeps=True)), ("1", None):
        overrides = ["cluster.gpus_per_node=2", f"cluster.num_generation_workers={sampling}"]
        config = compose_config(ROOT / "configs", "ppo", overrides)
        policy, critic = model_of(Ranks(2)), model_of(Ranks(2), output="values_before")
        engine = EngineConfig(
            model_path="", dtype="float32", seed=0, max_model_len=8, engine_kwargs={},
            weight_bytes=3, kv_cache_bytes=4, sleep=True,
        )  # fmt: skip
        share_gpus(config, engine, plan_run(config), Neighbours(), policy, critic)
        assert policy.gpu_neighbours == critic.with_this_model(engines or Neighbours())
        assert critic.gpu_neighbours == policy.with_this_model(engines or Neighbours())
        assert policy.gpu_neighbours != critic.gpu_neighbours


@pytest.mark.parametrize(("moments", "size"), [("float32", 8), ("bfloat16", 4), ("int8", 2.03125)])
def test_predicted_host_memory_is_what_the_optimizer_takes(moments, size):
    model = nn.Linear(512, 2048, bias=False)
    config = OptimizerConfig(moments=moments)
    (optimizer,) = make_optimizers(model.named_parameters(), config, on_host=True)
    assert len(optimizer._memory.bytes) == size * 512 * 2048
    found = memory_needs(SEVEN_B, policy(optimizer=config), 1, Role(), Neighbours())
    norms = 57 * SEVEN_B.hidden + 28 * (SEVEN_B.query_width + 2 * SEVEN_B.key_width)
    assert found.on_host == pytest.approx(size * SEVEN_B.num_parameters, abs=8 * norms)


def test_the_line_of_the_plan_says_from_where_on_nothing_moves():
    of_model = MemoryNeeds(resident=100 * GIB, offloaded=40 * GIB, on_host=60 * GIB)
    assert auto_line(policy(), of_model, 2) == (
        "none on GPUs of 100.0 GiB and more; on smaller ones, which should have 40.0 GiB, "
        "optimizer: 120.0 GiB of each node's memory"
    )


def test_state_that_the_host_has_no_room_for_is_refused():
    free = psutil.virtual_memory().available
    check_host_memory(free / 4, 2, "policy.offload=optimizer")
    with pytest.raises(UserError, match=r"policy\.offload=auto keeps .* of each node \(2 rank"):
        check_host_memory(free / 2, 2, "policy.offload=auto")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_host_memory_is_zeroed_and_locked():
    memory = HostMemory(1 << 20, locked=True)
    memory.wait()
    assert memory.bytes.is_pinned()
    assert not memory.bytes.any()


def test_moments_are_for_adamw_alone():
    named = [("layers.0.w", nn.Parameter(torch.ones(4, 4))), ("norm", nn.Parameter(torch.ones(4)))]
    muon = OptimizerConfig(kind="muon", moments="bfloat16")
    matrices, rest = make_optimizers(named, muon, on_host=True)
    assert isinstance(rest, FlatAdamW)
    assert not isinstance(matrices, FlatAdamW)
