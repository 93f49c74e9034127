"""One exact loss: layouts, precision of layout, packing and micro-batches change nothing.

Each case trains three steps on gloo processes and must give the loss, gradient norm, logprobs and
parameters of a single process that takes one padded row at a time. ``--full`` adds each layout with
each single change of everything else.
"""

import itertools
from dataclasses import astuple, dataclass, replace

import pytest
import torch

from tests.layouts import LAYOUTS
from tests.three_steps import Outcome, merged

TOLERANCE = 1e-5
TARGET = "tests.three_steps:three_steps"
LOSSES = ("policy_gradient", "sft", "preference")
SHARED = -1
ROWS = (0, 4, 2, SHARED, 1)
"""Of a padded micro-batch, the slowest last; 0: packed; ``SHARED``: with prompts in common, too."""
RECOMPUTED = ("none", "full", "selective")
MODELS = tuple(itertools.product(("llama", "qwen2", "qwen3"), (False, True)))
"""Architecture, tied embeddings."""


@dataclass(frozen=True)
class Case:
    layout: str
    loss_kind: str = LOSSES[0]
    rows: int = ROWS[0]
    recomputed: str = RECOMPUTED[0]
    model: tuple[str, bool] = MODELS[0]

    def __str__(self):
        architecture, tied = self.model
        rows = {0: "packed", SHARED: "shared"}.get(self.rows, f"padded{self.rows}")
        words = (self.layout, self.loss_kind, rows, self.recomputed, architecture, "tied" * tied)
        return "-".join(filter(None, words))

    def choices(self):
        return [*enumerate(astuple(self)[1:])]

    def is_possible(self):
        """A pair of preferences has two rows."""
        return self.rows in rows_of(self.layout) and (self.loss_kind, self.rows) != (
            "preference",
            1,
        )


def rows_of(layout):
    """Padded rows are not split over a context; stages of a pipeline exchange one shape."""
    rows = (0, SHARED) if "cp" in layout else ROWS
    return tuple(one for one in rows if one != SHARED or "pp" not in layout)


def number_of_cases(name, ranks):
    return 4 if ranks <= 2 and "tp" not in name else 2


def covering_cases():
    """Few cases with all pairs of choices: a layout's next one has most that is new to it, then
    most pairs that are new.

    Many processes on two cores are slow, and so are the many operations of tensor parallelism:
    such layouts get fewer.
    """
    met = set()
    for name, (ranks, _) in LAYOUTS.items():
        choices = itertools.product(LOSSES, rows_of(name), RECOMPUTED, MODELS)
        every = [Case(name, *one) for one in choices]
        possible, here = [case for case in every if case.is_possible()], set()

        def news(case, here=here):
            choices = case.choices()
            return len({*choices} - here), len({*itertools.combinations(choices, 2)} - met)

        for _ in range(number_of_cases(name, ranks)):
            case = max(possible, key=news)
            here.update(case.choices())
            met.update(itertools.combinations(case.choices(), 2))
            yield case


def full_cases():
    """Each layout with one other choice at a time."""
    for case in map(Case, LAYOUTS):
        yield case
        yield from (replace(case, loss_kind=loss) for loss in LOSSES[1:])
        yield from (replace(case, rows=rows) for rows in ROWS[1:])
        yield from (replace(case, recomputed=recomputed) for recomputed in RECOMPUTED[1:])
        yield from (replace(case, model=model) for model in MODELS[1:])


@pytest.fixture(scope="module")
def baseline(pool, four_layers):
    results: dict[tuple, Outcome] = {}

    def get(loss_kind, model=MODELS[0]):
        if (loss_kind, model) not in results:
            rows = 2 if loss_kind == "preference" else 1
            config = {"batching": "padded", "micro_batch_size": rows}
            outcome = merged(pool.run(1, TARGET, four_layers(*model), config, loss_kind))
            results[loss_kind, model] = outcome
        return results[loss_kind, model]

    return get


def check(case, pool, baseline, four_layers):
    ranks, parallel = LAYOUTS[case.layout]
    config = {"parallel": parallel, "micro_batch_tokens": 64}
    if case.rows == SHARED:
        config |= {"batching": "shared"}
    elif case.rows:
        config |= {"batching": "padded", "micro_batch_size": case.rows}
    if case.recomputed != "none":
        config |= {"activation_checkpointing": case.recomputed, "logprob_chunk_tokens": 5}
    actual = pool.run(ranks, TARGET, four_layers(*case.model), config, case.loss_kind)
    assert_same(merged(actual), baseline(case.loss_kind, case.model))


def assert_same(actual: Outcome, expected: Outcome, tolerance=TOLERANCE):
    for name, numbers in expected.numbers.items():
        assert actual.numbers[name] == pytest.approx(numbers, abs=tolerance), name
    assert actual.logprobs.keys() == expected.logprobs.keys()
    for row, logprobs in expected.logprobs.items():
        assert (actual.logprobs[row] - logprobs).abs().max() < tolerance, row
    assert actual.parameters.keys() == expected.parameters.keys()
    for name, tensor in expected.parameters.items():
        assert (actual.parameters[name] - tensor).abs().max() < tolerance, name


@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_invariance_of_layout_loss_batching_recomputation_and_model(
    case, pool, baseline, four_layers
):
    check(case, pool, baseline, four_layers)


@pytest.mark.full
@pytest.mark.parametrize("case", filter(Case.is_possible, full_cases()), ids=str)
def test_invariance_of_each_layout_with_each_single_change(case, pool, baseline, four_layers):
    check(case, pool, baseline, four_layers)


def test_invariance_cases_cover_every_pair_of_choices():
    """And of a layout and each choice, as far as the number of its cases allows."""
    cases = list(covering_cases())
    choices = {"loss_kind": LOSSES, "rows": ROWS, "recomputed": RECOMPUTED, "model": MODELS}
    for (a, values_a), (b, values_b) in itertools.combinations(choices.items(), 2):
        met = {(getattr(case, a), getattr(case, b)) for case in cases}
        possible = set(itertools.product(values_a, values_b)) - {("preference", 1)}
        assert met == possible, (a, b, possible - met)
    for name, (ranks, _) in LAYOUTS.items():
        for choice, values in choices.items():
            met = {getattr(case, choice) for case in cases if case.layout == name}
            values = rows_of(name) if choice == "rows" else values
            assert len(met) == min(number_of_cases(name, ranks), len(values)), (name, choice)


def test_invariance_of_the_tolerance_would_show_a_doubled_gradient(baseline):
    expected = baseline("policy_gradient")
    wrong = replace(expected, numbers={"loss": expected.numbers["loss"], "grad_norm": [1e-3] * 3})
    with pytest.raises(AssertionError, match="grad_norm"):
        assert_same(wrong, expected)
    moved = {name: tensor + 2e-5 for name, tensor in expected.parameters.items()}
    with pytest.raises(AssertionError):
        assert_same(replace(expected, parameters=moved), expected)
    assert torch.tensor(expected.numbers["grad_norm"]).min() > 0.5, "clipping must be at work"
