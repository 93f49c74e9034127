"""Kernels of ``generation.backend=graph`` beside the same in torch; see test_graph_engine.py.

TRITON_INTERPRET=1 python -m pytest tests/graph_kernels.py  # on a GPU without the variable
"""

import importlib

import pytest
import torch

from nemo_like.generation.graph import fp8, torch_ops
from nemo_like.generation.graph.state import State
from nemo_like.planning.model_shape import ModelShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def state_of(num_rows: int, dtype: torch.dtype = torch.float32) -> State:
    """With caches of up to 512 positions, filled with noise."""
    shape = ModelShape(
        layers=2, hidden=8, intermediate=8, heads=6, kv_heads=2, head_dim=64, vocab=8, tied=True
    )
    angles = torch.randn(512, 32, device=DEVICE).cos(), torch.randn(512, 32, device=DEVICE).sin()
    pages = 1 + 8 * min(num_rows, 7)
    state = State(shape, angles, num_rows, pages, dtype)
    state.keys.normal_()
    state.values.normal_()
    return state


def triton_ops():
    return importlib.import_module("nemo_like.generation.graph.triton_ops")


def both(state: State, call) -> tuple[object, object]:
    """What ``call`` returns and leaves in the state, by kernels and by torch."""
    found = []
    before = {name: each.clone() for name, each in vars(state).items() if torch.is_tensor(each)}
    for ops in (triton_ops(), torch_ops):
        for name, each in before.items():
            getattr(state, name).copy_(each)
        result = call(ops)
        after = {name: getattr(state, name).clone() for name in before}
        found.append(after | {"result": result})
    return found[0], found[1]


@pytest.mark.parametrize("most_positions", [128, 512], ids=["whole", "split"])
def test_kernels_attend_as_torch_does(most_positions):
    torch.manual_seed(3)
    state = state_of(7)
    state.cos, state.sin = state.cos[:most_positions], state.sin[:most_positions]
    last = most_positions - 1
    state.position.copy_(torch.tensor([0, 1, 63, 64, 65, 100, last]))
    state.slot.copy_(torch.tensor([2, 0, 1, 5, 4, 3, 6]))
    order = 1 + torch.randperm(7 * 8).view(7, 8)
    state.table[:7] = order
    qkv = torch.randn(7, (6 + 2 * 2) * 64, device=DEVICE)
    ours, right = both(state, lambda ops: ops.attend(qkv, 1, state))
    for name in ("result", "keys", "values"):
        torch.testing.assert_close(ours[name], right[name], atol=1e-5, rtol=1e-5)
    assert not torch.equal(right["keys"][1], state_of(7).keys[1])


def test_kernels_draw_what_torch_does():
    torch.manual_seed(4)
    state = state_of(5)
    state.temperature.copy_(torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0]))
    state.seed.copy_(torch.tensor([0, 1, -(2**31), 2**31 - 1, 5]))
    state.position.copy_(torch.arange(5))
    state.last.fill_(3)
    state.step.fill_(2)
    logits = 3 * torch.randn(5, 9000, device=DEVICE)
    logits[4, 100:] = -torch.inf  # filtered; the later parts of its vocabulary are empty
    ours, right = both(state, lambda ops: ops.sample(logits.clone(), state))
    for name in ("token", "tokens", "position"):
        assert torch.equal(ours[name], right[name]), name
    torch.testing.assert_close(ours["logprobs"], right["logprobs"], atol=1e-5, rtol=1e-5)
    assert right["tokens"][2].unique().numel() == 5
    assert right["position"].tolist() == [1, 2, 3, 3, 3]


@pytest.mark.parametrize("width", [64, 100])
def test_kernels_norm_and_gate_as_torch_does(width):
    torch.manual_seed(5)
    x, residual, weight = (
        torch.randn(each, device=DEVICE) for each in ((6, width),) * 2 + (width,)
    )
    added = [residual.clone(), residual.clone()]
    for source in (x, None):
        ours, right = (
            ops.add_norm(source, each, weight, 1e-5)
            for ops, each in zip((triton_ops(), torch_ops), added, strict=True)
        )
        torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(*added)
    torch.testing.assert_close(
        triton_ops().silu_mul(x.contiguous()), torch_ops.silu_mul(x), atol=1e-5, rtol=1e-5
    )


def assert_rounded_alike(ours: fp8.Rounded, right: fp8.Rounded, share: float) -> None:
    """At most a ``share`` of all numbers is the next larger or smaller one."""
    torch.testing.assert_close(ours.scale, right.scale, rtol=1e-6, atol=0)
    numbers, exact = ours.numbers.float(), right.numbers.float()
    differ = numbers != exact
    if DEVICE == "cpu":  # Triton's interpreter does not carry into the exponent.
        differ &= exact.abs().log2() % 1 != 0
    assert differ.float().mean() < share
    torch.testing.assert_close(numbers[differ], exact[differ], rtol=0.13, atol=2**-9)


def product_of(rows: int, width: int) -> fp8.Product:
    """With small and large scales."""
    torch.manual_seed(5)
    scales = (torch.rand(each, 1, device=DEVICE) * 1e-3 for each in (rows, width))
    numbers = 100 * torch.randn(rows, width, device=DEVICE)
    return fp8.Product(numbers.bfloat16(), *scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_add_and_round_as_torch_does(dtype):
    x, weight = product_of(5, 576), torch.rand(576, device=DEVICE).to(dtype)
    residual = torch.randn(5, 576, device=DEVICE).to(dtype)
    residual[3] = 0
    x.numbers[3] = 0
    mine = residual.clone()
    found = triton_ops().add_norm(x, mine, weight, 1e-6, rounds=True)
    right = torch_ops.add_norm(x, residual, weight, 1e-6, rounds=True)
    torch.testing.assert_close(mine, residual)
    assert_rounded_alike(found, right, share=5e-3)
    largest = right.numbers.float().abs().amax(1).tolist()
    assert largest == [448, 448, 448, 0, 448]


def test_kernels_gate_and_round_as_torch_does():
    x = product_of(5, 2 * 5000)
    found, right = triton_ops().silu_mul(x), torch_ops.silu_mul(x)
    assert_rounded_alike(found, right, share=5e-3)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 17, 128])
def test_a_gpu_multiplies_in_8_bits_as_torch_does(rows):
    torch.manual_seed(6)
    x = fp8.rounded(torch.randn(rows, 576, device=DEVICE))
    weight = fp8.rounded(torch.randn(1536, 576, device=DEVICE))
    found, right = (each.multiply(x, weight).whole() for each in (triton_ops(), torch_ops))
    assert (found - right).abs().max() < 2**-7 * right.abs().max()
    assert right.std().item() == pytest.approx(24, rel=0.1)
