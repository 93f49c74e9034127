"""Flat batches and the plan that deals their rows: every row once, whatever the sizes."""

import ast
import json
import pickle
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.batch import keys
from nemo_like.batch.micro_batches import plan_micro_batches
from nemo_like.batch.tensor_batch import TensorBatch, prompt_columns, shared_layout
from nemo_like.config.policy import PolicyConfig
from nemo_like.config.run import ClusterConfig
from nemo_like.distributed.remote_batch import RemoteBatch
from nemo_like.errors import UserError
from nemo_like.planning.model_shape import attention_tokens
from nemo_like.policy import attention
from nemo_like.policy.attention import packed_attention, row_index
from nemo_like.policy.inputs import InputLayout, InputShape
from nemo_like.policy.remote_model import RemoteModel


def make(lengths):
    n = sum(lengths)
    return TensorBatch(
        lengths=torch.tensor(lengths),
        tokens={"x": torch.arange(n)},
        rows={"id": torch.arange(len(lengths))},
    )


def test_a_batch_travels_as_arrays_and_arrives_as_tensors_that_can_be_written():
    batch = make([2, 3])
    batch.rows["good"] = torch.tensor([True, False])
    batch.tokens["x"] = torch.randn(5, 2, dtype=torch.float64)
    buffers = []
    message = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1 + len(batch.tokens) + len(batch.rows), "some column was copied"
    again = pickle.loads(message, buffers=[bytes(one.raw()) for one in buffers])
    assert torch.equal(again.lengths, batch.lengths)
    for mine, theirs in ((again.tokens, batch.tokens), (again.rows, batch.rows)):
        assert mine.keys() == theirs.keys()
        for name, column in mine.items():
            assert column.dtype == theirs[name].dtype
            assert torch.equal(column, theirs[name])
            column.zero_()


def test_select_and_concatenate_keep_rows_whole():
    batch = make([2, 0, 3])
    picked = batch.select([2, 1, 2])
    assert picked.lengths.tolist() == [3, 0, 3]
    assert picked.tokens["x"].tolist() == [2, 3, 4, 2, 3, 4]
    both = TensorBatch.concatenate([batch, picked])
    assert both.row_of_token.tolist() == [0, 0, 2, 2, 2, 3, 3, 3, 5, 5, 5]
    assert both.rows["id"].tolist() == [0, 1, 2, 2, 1, 2]


@st.composite
def plans(draw):
    """Arguments of any plan that its bounds allow, and the plan."""
    unit = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 50), max_size=40))
    arguments = {
        "lengths": lengths[: len(lengths) // unit * unit],
        "num_ranks": draw(st.integers(1, 5)),
        "max_tokens": draw(st.integers(50 * unit, 120 * unit)),
        "max_rows": draw(st.one_of(st.none(), st.integers(unit, 7))),
        "padded": draw(st.booleans()),
        "rows_per_unit": unit,
        "attention_tokens": draw(st.integers(1, 1000)),
        "min_bins": draw(st.integers(1, 9)),
        "bins_multiple": draw(st.integers(1, 4)),
    }
    return arguments, plan_micro_batches(**arguments)


@settings(deadline=None, max_examples=300)
@given(plans())
def test_every_row_is_planned_once_within_the_budget(case):
    arguments, plan = case
    lengths, max_rows = arguments["lengths"], arguments["max_rows"]
    rows = [row for rank in range(arguments["num_ranks"]) for row in plan.rows(rank)]
    assert sorted(rows) == list(range(len(lengths)))
    for one in (one for bins in plan.bins for one in bins):
        sizes = [lengths[row] for row in one]
        used = max(sizes, default=0) * len(one) if arguments["padded"] else sum(sizes)
        assert used <= arguments["max_tokens"]
        assert max_rows is None or len(one) <= max_rows


@settings(deadline=None, max_examples=300)
@given(plans())
def test_rows_of_a_unit_stay_together_and_in_order(case):
    arguments, plan = case
    unit = arguments["rows_per_unit"]
    for one in (one for bins in plan.bins for one in bins):
        firsts = one[::unit]
        assert all(first % unit == 0 for first in firsts)
        assert list(one) == [first + i for first in firsts for i in range(unit)]


@settings(deadline=None, max_examples=300)
@given(plans())
def test_ranks_have_the_asked_number_of_bins_and_none_is_empty_that_could_be_filled(case):
    arguments, plan = case
    (num_bins,) = {len(bins) for bins in plan.bins}
    assert num_bins >= arguments["min_bins"]
    assert num_bins % arguments["bins_multiple"] == 0
    for bins in plan.bins:
        num_units = sum(map(len, bins)) // arguments["rows_per_unit"]
        assert sum(1 for one in bins if one) == min(num_bins, num_units)
        assert all(bins[: min(num_bins, num_units)])  # empty ones stand at the end


@settings(deadline=None, max_examples=100)
@given(plans())
def test_ranks_differ_by_at_most_the_cost_of_one_unit(case):
    arguments, plan = case
    lengths, unit, at = (
        arguments[name] for name in ("lengths", "rows_per_unit", "attention_tokens")
    )
    cost = [length + length**2 / at for length in lengths]
    loads = [sum(cost[row] for row in plan.rows(r)) for r in range(arguments["num_ranks"])]
    dearest = max((sum(cost[i : i + unit]) for i in range(0, len(cost), unit)), default=0)
    assert max(loads) - min(loads) <= dearest + 1e-6


def test_long_rows_weigh_more_than_their_tokens():
    # The row of 100 costs 100 + 100^2 / 50 = 300; those of 10 cost 10 + 10^2 / 50 = 12 each, 168.
    lengths = [100] + [10] * 14
    by_cost = plan_micro_batches(lengths, num_ranks=2, max_tokens=999, attention_tokens=50)
    by_tokens = plan_micro_batches(lengths, num_ranks=2, max_tokens=999, attention_tokens=10**9)
    assert [len(by_cost.rows(rank)) for rank in range(2)] == [1, 14]
    assert [len(by_tokens.rows(rank)) for rank in range(2)] == [3, 12]  # 120 tokens each


@pytest.mark.parametrize(("width", "cut"), [(64, [1, 16]), (8192, [5, 12])])
def test_a_policy_cuts_rows_by_the_shape_of_its_own_model(tmp_path, width, cut):
    """A row of 4,096 costs as much as 26.7 rows of 512 at width 64, and as 8.2 at width 8,192."""
    write_config(tmp_path, hidden_size=width, num_attention_heads=1)
    policy = RemoteModel(
        PolicyConfig(micro_batch_tokens=9999),
        ClusterConfig(),
        SimpleNamespace(  # pyright: ignore
            world_size=2,
            role="policy",
            contexts=[SimpleNamespace(log_dir="")],
            layout=SimpleNamespace(sizes={"dp": 2}),
        ),
        model_path=str(tmp_path),
        max_steps=1,
    )
    plan = policy._plan(RemoteBatch(lengths=torch.tensor([4096] + [512] * 16), rows={}))
    assert [len(plan.rows(rank)) for rank in range(2)] == cut


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 2 x 8 x (8 + 8) + 3 x 8 x 32 multiply-adds with weights, 8 numbers in all queries.
        ({"hidden_size": 8, "num_attention_heads": 2}, 128),
        ({"n_embd": 8, "n_head": 2, "n_inner": 64}, 224),
        ({"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}, 120),
        ({"hidden_size": 8, "num_attention_heads": 2, "head_dim": 8}, 80),
        (
            {"hidden_size": 8, "num_attention_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 16},
            128,
        ),
        (
            {"hidden_size": 8, "num_attention_heads": 2, "n_routed_experts": 4}
            | {"num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16},
            176,
        ),
        ({"model_type": "other"}, 12 * 2048),
    ],
)
def test_attention_costs_as_much_as_weights_at_a_length_of_the_models_own(
    tmp_path, settings, expected
):
    write_config(tmp_path, **settings)
    assert attention_tokens(tmp_path) == expected


def write_config(folder, **settings):
    (folder / "config.json").write_text(json.dumps(settings))


def test_bins_are_split_where_a_pipeline_needs_more_of_them():
    split = plan_micro_batches([8, 8, 8, 8], num_ranks=1, max_tokens=99, min_bins=4)
    assert split.bins == (((0,), (1,), (2,), (3,)),)
    rounded = plan_micro_batches([8] * 3, num_ranks=1, max_tokens=8, bins_multiple=2)
    assert rounded.bins == (((0,), (1,), (2,), ()),)
    pairs = plan_micro_batches([8] * 4, num_ranks=1, max_tokens=99, rows_per_unit=2, min_bins=4)
    assert pairs.bins == (((0, 1), (2, 3), (), ()),)


def test_any_number_of_bins_works_with_any_micro_batch_size():
    for max_rows in (1, 2, 3, 7):
        plan = plan_micro_batches([5] * 249, num_ranks=1, max_tokens=35, max_rows=max_rows)
        assert len(plan.bins[0]) == -(-249 // max_rows)
        assert sorted(plan.rows(0)) == list(range(249))


@pytest.mark.parametrize("padded", [False, True])
def test_a_bound_on_rows_counts_rows_and_not_pairs(padded):
    plan = plan_micro_batches(
        [5] * 16, num_ranks=1, max_tokens=999, max_rows=4, rows_per_unit=2, padded=padded
    )
    assert [len(one) for one in plan.bins[0]] == [4] * 4


def test_bins_are_those_of_plain_first_fit_decreasing():
    lengths = [((i * 7919) % 97) + 1 for i in range(256)]
    bins = []
    for row in sorted(range(256), key=lambda row: (-lengths[row], row)):
        fits = (one for one in bins if sum(lengths[r] for r in one) + lengths[row] <= 200)
        one = next(fits, None)
        if one is None:
            bins.append(one := [])
        one.append(row)
    plan = plan_micro_batches(lengths, num_ranks=1, max_tokens=200)
    assert sorted(plan.bins[0]) == sorted(map(tuple, bins))


def test_a_plan_of_100_000_rows_takes_less_than_two_seconds_and_is_the_same_again():
    lengths = [((i * 7919) % 8191) + 1 for i in range(100_000)]
    start = time.process_time()
    plan = plan_micro_batches(lengths, num_ranks=8, max_tokens=8192)
    assert time.process_time() - start < 2
    assert plan == plan_micro_batches(lengths, num_ranks=8, max_tokens=8192)


def test_more_ranks_than_rows_leaves_empty_micro_batches_not_a_hang():
    plan = plan_micro_batches([5], num_ranks=3, max_tokens=10)
    assert plan.bins == (((0,),), ((),), ((),))


def test_a_row_longer_than_the_budget_is_refused_with_a_valid_value():
    with pytest.raises(UserError, match=r"micro_batch_tokens=4 .* use at least 9"):
        plan_micro_batches([3, 9], num_ranks=1, max_tokens=4)


def test_a_pair_that_does_not_fit_is_refused_with_a_valid_value():
    def plan(**bounds):
        plan_micro_batches([3, 9], num_ranks=1, rows_per_unit=2, **bounds)

    with pytest.raises(UserError, match=r"the 2 .* that must stay together, 12 .* at least 12"):
        plan(max_tokens=11)
    with pytest.raises(UserError, match=r"micro_batch_tokens=17 .* use at least 18"):
        plan(max_tokens=17, padded=True)
    with pytest.raises(UserError, match=r"micro_batch_size=1 .* use at least 2"):
        plan(max_tokens=99, max_rows=1)


def test_an_odd_row_is_no_pair():
    with pytest.raises(AssertionError, match="3 rows, 2 to a unit"):
        plan_micro_batches([1, 1, 1], num_ranks=1, max_tokens=9, rows_per_unit=2)


def test_no_column_of_the_table_is_written_over_by_another():
    names = [
        target.id
        for node in ast.parse(Path(keys.__file__).read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
    ]
    values = [getattr(keys, name) for name in names]
    assert len(set(names)) == len(set(values)) == len(names)


def rows_with_prompts(*rows: tuple[list[int], list[int]]) -> TensorBatch:
    """Each row: ids that do not train, then ids that do."""
    batch = TensorBatch(
        lengths=torch.tensor([len(prompt) + len(rest) for prompt, rest in rows]),
        tokens={
            keys.INPUT_IDS: torch.tensor([i for prompt, rest in rows for i in prompt + rest]),
            keys.LOSS_MASK: torch.tensor(
                [i >= len(prompt) for prompt, rest in rows for i in range(len(prompt + rest))]
            ),
        },
    )
    batch.rows |= prompt_columns(batch)
    return batch


def test_a_prompt_that_neighbours_share_has_positions_once():
    batch = rows_with_prompts(
        ([7, 8], [1]), ([7, 8], [2, 3]), ([7, 8], [6]), ([7, 9], [4]), ([7, 8], [5])
    )
    assert batch.rows[keys.PROMPT_TOKENS].tolist() == [2] * 5
    layout = shared_layout(batch)
    kept = batch.tokens[keys.INPUT_IDS][layout.kept]
    assert kept.tolist() == [7, 8, 1, 2, 3, 6, 7, 9, 4, 7, 8, 5]
    assert layout.lengths.tolist() == [3, 2, 1, 3, 3]
    # The prompt of the second and third row is the first one's, at positions 0 and 1.
    assert layout.place.tolist() == [0, 1, 2, 0, 1, 3, 4, 0, 1, 5, 6, 7, 8, 9, 10, 11]
    shape = InputLayout(batching="shared", multiple=5).shape_of(batch)
    assert shape == InputShape(rows=1, positions=15)
    assert InputLayout(batching="packed").shape_of(batch).positions == 16


def test_rows_of_one_prompt_share_a_bin_as_far_as_it_holds_them():
    lengths, prompts = [14] * 4 + [12] * 4, [(1, 10)] * 4 + [(2, 10)] * 4
    plan = plan_micro_batches(lengths, num_ranks=1, max_tokens=24, prompts=prompts)
    # 10 + 3 * 4 = 22 tokens and copies of keys that count as 2, then one row alone; 10 + 4 * 2 + 3.
    assert sorted(plan.bins[0]) == [(0, 1, 2), (3,), (4, 5, 6, 7)]
    pairs = [(1, 5), (2, 5)] * 2  # the rows of a unit have prompts of their own: none is spared
    plan = plan_micro_batches([10] * 4, num_ranks=1, max_tokens=30, rows_per_unit=2, prompts=pairs)
    assert plan.bins == (((0, 1), (2, 3)),)
    plan = plan_micro_batches([90, 90], num_ranks=2, max_tokens=200, prompts=[(1, 10)] * 2)
    assert sorted(plan.rows(0) + plan.rows(1)) == [0, 1]
    assert len(plan.rows(0)) == 1, "sparing 10 tokens is not worth an idle rank"


def test_copies_of_a_long_prompt_count_in_a_pass():
    """Rows of 3 tokens after 1,600: each after the first holds keys that count as 100 tokens."""
    lengths, prompts = [1603] * 20, [(1, 1600)] * 20
    plan = plan_micro_batches(lengths, num_ranks=1, max_tokens=2118, prompts=prompts)
    assert [len(one) for one in plan.bins[0]] == [6, 6, 6, 2]  # 1600 + 6 * 3 + 5 * 100 = 2118
    assert plan_micro_batches(lengths, num_ranks=1, max_tokens=2117, prompts=prompts) != plan


@pytest.mark.parametrize(
    ("groups", "ranks", "busiest"),
    [(1, 2, 3000), (4, 8, 3000), (9, 8, 9000), (8, 8, 5000)],
)
def test_groups_are_cut_where_there_are_too_few_for_the_ranks(groups, ranks, busiest):
    """Rows of 500 tokens after a prompt of 1,000, eight to a group; attention costs nothing."""
    lengths, prompts = [1500] * 8 * groups, [(i // 8, 1000) for i in range(8 * groups)]
    bounds = {"max_tokens": 8192, "attention_tokens": 10**9}
    plan = plan_micro_batches(lengths, num_ranks=ranks, prompts=prompts, **bounds)

    def tokens(one: tuple[int, ...]) -> int:
        spared = sum(1000 for a, b in pairwise(one) if prompts[a] == prompts[b])
        return 1500 * len(one) - spared

    assert max(sum(map(tokens, bins)) for bins in plan.bins) == busiest


@settings(deadline=None, max_examples=300)
@given(plans(), st.data())
def test_a_plan_with_prompts_keeps_each_bound(case, data):
    arguments, _ = case
    lengths, unit = arguments["lengths"], arguments["rows_per_unit"]
    arguments |= {"padded": False, "max_rows": None}
    which = data.draw(st.lists(st.integers(1, 3), min_size=len(lengths), max_size=len(lengths)))
    tokens = {one: data.draw(st.integers(0, 9)) for one in (1, 2, 3)}
    prompts = [(one, min(tokens[one], min(lengths) - 1)) for one in which]
    plan = plan_micro_batches(**arguments, prompts=prompts)
    rows = [row for rank in range(arguments["num_ranks"]) for row in plan.rows(rank)]
    assert sorted(rows) == list(range(len(lengths)))
    for one in (one for bins in plan.bins for one in bins):
        spared = sum(prompts[b][1] for a, b in pairwise(one) if prompts[a] == prompts[b])
        assert sum(lengths[row] for row in one) - spared <= arguments["max_tokens"]
        firsts = one[::unit]
        assert list(one) == [first + i for first in firsts for i in range(unit)]


@pytest.mark.parametrize(
    ("lengths", "dense"),
    [
        ([2048, 2048], True),
        ([4096] * 3, True),
        ([2048, 2047], False),
        ([2047, 2047], False),
        ([4096], False),
    ],
)
def test_the_dense_kernel_is_for_long_rows_whose_sizes_recur(lengths, dense):
    """It is planned for every new number and length of rows; the lengths of most rows are new."""
    assert row_index(torch.tensor(lengths))["equal_rows"] is dense


def test_rows_that_share_prompts_have_no_dense_kernel():
    lengths = torch.tensor([2048, 2048])
    assert row_index(lengths, lengths, torch.arange(4096))["equal_rows"] is False


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def check_kernel_of_gpu(index, num_tokens):
    """Attention in bfloat16 on the GPU against float32 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, num_tokens, 64, generator=generator) for heads in (4, 2, 2))
    expected, _ = packed_attention(torch.nn.Identity(), q, k, v, None, **index)
    on_gpu = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in index.items()}
    inputs = (x.cuda().bfloat16() for x in (q, k, v))
    actual, _ = packed_attention(torch.nn.Identity(), *inputs, None, **on_gpu)
    torch.testing.assert_close(actual.float().cpu(), expected, atol=2e-2, rtol=2e-2)


@NEEDS_GPU
@pytest.mark.parametrize("lengths", [[2048, 2048], [2048, 2047], [70] * 3, [300]])
def test_each_kernel_sees_no_other_row(lengths):
    check_kernel_of_gpu(row_index(torch.tensor(lengths)), sum(lengths))


@NEEDS_GPU
def test_the_variable_length_kernel_sees_prompts_in_common():
    """Flash attention's last query sees the last key of its row; a mask says the same."""
    batch = rows_with_prompts(([1] * 40, [2] * 30), ([1] * 40, [3] * 9), ([4] * 5, [5] * 70))
    layout = shared_layout(batch)
    index = row_index(layout.lengths, batch.lengths, layout.place)
    check_kernel_of_gpu(index, int(layout.kept.sum()))


def test_under_autocast_kernels_get_16_bits(monkeypatch):
    """Queries and keys come in float32 then, for which GPUs have no variable-length kernel."""
    kernel, seen = attention.scaled_dot_product_attention, []

    def spy(*tensors, **options):
        seen.extend(x.dtype for x in tensors)
        return kernel(*tensors, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    q, k = torch.randn(1, 4, 17, 8), torch.randn(1, 2, 17, 8)
    inputs = (q, k, k.bfloat16())
    index = row_index(torch.tensor([5, 9, 3]))
    with torch.autocast("cpu", torch.bfloat16):
        actual, _ = packed_attention(torch.nn.Identity(), *inputs, None, **index)
    assert seen == [torch.bfloat16] * 3
    rounded = (x.bfloat16() for x in inputs)
    expected, _ = packed_attention(torch.nn.Identity(), *rounded, None, **index)
    assert torch.equal(actual, expected)


def test_compiled_attention_pads_equal_rows_and_single_ones_without_another_compilation():
    torch.compiler.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    compiled = torch.compile(packed_attention, backend="aot_eager")
    generator, counts = torch.Generator().manual_seed(0), []
    for lengths in ([5, 9, 3], [3, 6, 2, 6, 7], [13] * 4, [2, 10], [8], [11]):
        index = row_index(torch.tensor(lengths))
        q, k, v = (
            torch.randn(1, heads, sum(lengths), 8, generator=generator, requires_grad=True)
            for heads in (4, 2, 2)
        )
        expected, _ = packed_attention(torch.nn.Identity(), q, k, v, None, **index)
        actual, _ = compiled(torch.nn.Identity(), q, k, v, None, **index)
        torch.testing.assert_close(actual, expected)
        pull = torch.randn(expected.shape, generator=generator)
        gradients = (torch.autograd.grad(out, (q, k, v), pull) for out in (actual, expected))
        torch.testing.assert_close(*gradients)
        counts.append(graphs["unique_graphs"])
    assert [one - counts[0] for one in counts] == [0, 1, 1, 1, 2, 2], "sizes that change; one row"
