"""One table of inputs and results worked by hand, for everything between a reward and a loss.

Names such as E01 are those of public reports of what has gone wrong elsewhere. The arithmetic
stands beside each case: a number here is never copied from what the code gave.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nemo_like.batch import keys
from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.advantages import AdvantageConfig
from nemo_like.config.losses import LossConfig
from nemo_like.losses.advantages import (
    group_advantages,
    has_signal,
    overlong_penalty,
    whiten,
    zero_variance_share,
)
from nemo_like.losses.policy_gradient import ClippedPGLoss, kl_estimate, kl_loss, kl_of_rows
from nemo_like.losses.protocol import Denominators, apply_loss
from nemo_like.losses.value import gae
from nemo_like.observe.metrics import merge, values

NAN = math.nan
ROOT_HALF = math.sqrt(0.5)


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[..., Any]
    inputs: dict[str, Any]
    expected: Any

    def __str__(self):
        return self.name


# What is called. Inputs are plain lists; results are lists, or numbers.


def advantage(rewards, baseline, scale, groups=None, valid=None):
    rewards = torch.tensor(rewards)
    config = AdvantageConfig(baseline=baseline, scale=scale)
    groups = torch.zeros(len(rewards)) if groups is None else torch.tensor(groups)
    count = len(rewards)
    valid = torch.tensor([True] * count if valid is None else valid, dtype=torch.bool)
    return group_advantages(rewards, groups, valid, config).tolist()


def signal(rewards, groups):
    valid = torch.ones(len(rewards), dtype=torch.bool)
    return has_signal(torch.tensor(rewards), torch.tensor(groups), valid).tolist()


def flat_share(rewards, groups):
    valid = torch.ones(len(rewards), dtype=torch.bool)
    return zero_variance_share(torch.tensor(rewards), torch.tensor(groups), valid)


def penalties(lengths, **settings):
    return overlong_penalty(torch.tensor(lengths), **settings).tolist()


def gae_of(rewards, values, mask, lengths, gamma, lam):
    both = gae(
        torch.tensor(rewards),
        torch.tensor(values),
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor(lengths),
        gamma,
        lam,
    )
    return [each.tolist() for each in both]


def whitened(x, mask):
    return whiten(torch.tensor(x), torch.tensor(mask, dtype=torch.bool)).tolist()


def kl(d, kind):
    return kl_estimate(torch.tensor(d), kind).tolist()


def kl_with_slope(d, kind, ratio):
    """The KL term of one token and its derivative by the current logprob.

    d is reference - current logprob, and ``ratio`` current / old probability.
    """
    current = torch.tensor(0.0, requires_grad=True)
    term = kl_loss(d - current, (current + math.log(ratio)).exp(), kind)
    (slope,) = torch.autograd.grad(term, current)
    return [term.item(), slope.item()]


def row_kl(policy, reference, lengths, mask, sample, kind):
    batch = rows_of(lengths, [0.0] * len(lengths), {}, mask, sample)
    return kl_of_rows(torch.tensor(policy), torch.tensor(reference), batch, kind).tolist()


def rows_of(lengths, advantages, columns, mask=None, sample=None):
    mask = [True] * sum(lengths) if mask is None else mask
    sample = [True] * len(lengths) if sample is None else sample
    return TensorBatch(
        lengths=torch.tensor(lengths),
        tokens={keys.LOSS_MASK: torch.tensor(mask, dtype=torch.bool)}
        | {name: torch.tensor(column) for name, column in columns.items()},
        rows={
            keys.ADVANTAGES: torch.tensor(advantages),
            keys.SAMPLE_MASK: torch.tensor(sample),
        },
    )


def loss_function(settings):
    """With words for choices."""
    default = LossConfig()
    typed = {
        name: type(getattr(default, name))(value) if isinstance(value, str) else value
        for name, value in settings.items()
    }
    return ClippedPGLoss(LossConfig(**typed))


def loss(
    advantages,
    *,
    lengths=None,
    ratios=None,
    current=None,
    mask=None,
    sample=None,
    parts=None,
    token_advantages=None,
    reference=None,
    generation=None,
    entropies=None,
    **settings: Any,
):
    """Loss and gradient by the current logprobs, which are log ratios over an old policy of 0."""
    lengths = lengths or [1] * len(advantages)
    n = sum(lengths)
    logprobs = [math.log(r) for r in ratios] if ratios else (current or [0.0] * n)
    columns = {
        keys.POLICY_LOGPROBS: [0.0] * n,
        keys.GENERATION_LOGPROBS: generation or [0.0] * n,
        keys.REFERENCE_LOGPROBS: reference or [0.0] * n,
    }
    if token_advantages:
        columns[keys.ADVANTAGES] = token_advantages
    batch = rows_of(lengths, advantages, columns, mask, sample)
    trained = batch.tokens[keys.LOSS_MASK] & batch.rows[keys.SAMPLE_MASK][batch.row_of_token]
    whole = Denominators(
        tokens=float(trained.sum()), sequences=float(len(batch.row_of_token[trained].unique()))
    )
    function = loss_function(settings)
    total, gradient, metrics = 0.0, torch.zeros(n), []
    for part in parts or [list(range(len(lengths)))]:
        at = torch.isin(batch.row_of_token, torch.tensor(part)).nonzero()[:, 0]
        x = torch.tensor(logprobs)[at].requires_grad_()
        entropy = torch.tensor(entropies or [0.0] * n)[at]
        value, numbers = apply_loss(function, torch.stack([x, entropy]), batch.select(part), whole)
        (gradient[at],) = torch.autograd.grad(value, x)
        total += value.item()
        metrics.append(numbers)
    assert values(merge(metrics))["train/loss"] == pytest.approx(total, abs=1e-6)
    return [total, gradient.tolist()]


def value(advantages, **inputs):
    return loss(advantages, **inputs)[0]


def clip_share(advantages, ratios, **settings):
    n = len(ratios)
    columns = {name: [0.0] * n for name in (keys.POLICY_LOGPROBS, keys.GENERATION_LOGPROBS)}
    batch = rows_of([1] * n, advantages, columns)
    whole = Denominators(tokens=float(n), sequences=float(n))
    _, metrics = loss_function(settings)(torch.tensor(ratios).log(), batch, whole)
    return metrics["train/clip_share"].value


# The table.
# fmt: off

ONE_OF_FOUR = {"rewards": [1.0, 0.0, 0.0, 0.0]}

ADVANTAGES = [
    # Mean 1/4.
    Case("mean", advantage, ONE_OF_FOUR | {"baseline": "mean", "scale": "none"},
         [0.75, -0.25, -0.25, -0.25]),
    # E04: squares 0.5625 + 3 * 0.0625 = 0.75; unbiased deviation sqrt(0.75 / 3) = 0.5.
    Case("E04 mean std", advantage, ONE_OF_FOUR | {"baseline": "mean", "scale": "std"},
         [1.5, -0.5, -0.5, -0.5]),
    # Others' means 0, 1/3, 1/3, 1/3.
    Case("leave one out", advantage, ONE_OF_FOUR | {"baseline": "leave_one_out", "scale": "none"},
         [1.0, -1 / 3, -1 / 3, -1 / 3]),
    # E01: others of row 0 have no deviation, so it stays 1. Others of row 1 are 1, 0, 0: squares
    # 4/9 + 2 * 1/9 = 2/3, deviation sqrt(1/3); -(1/3) * sqrt(3) = -1 / sqrt(3).
    Case("E01 lone success", advantage,
         ONE_OF_FOUR | {"baseline": "leave_one_out", "scale": "std"},
         [1.0] + [-1 / math.sqrt(3)] * 3),
    # E02: row 0's others are equal, so it is 0 - r. Others of row 1 are 0 and six of r: their mean
    # is 6 r / 7, squares (6 r / 7)^2 + 6 (r / 7)^2 = 6 r^2 / 7, deviation r / sqrt(7); and
    # (r / 7) / (r / sqrt(7)) = 1 / sqrt(7) = 0.377964.
    *(
        Case(f"E02 {r}", advantage,
             {"rewards": [0.0] + [r] * 7, "baseline": "leave_one_out", "scale": "std"},
             [-r] + [1 / math.sqrt(7)] * 7)
        for r in (0.95, 0.35, 0.4, 0.3)
    ),
    # E04: means 1/2 and 1; deviation of 1, 0 is sqrt(1/2), and 0.5 / sqrt(1/2) = sqrt(1/2).
    Case("E04 groups", advantage,
         {"rewards": [1.0, 0.0, 1.0, 1.0], "groups": [0, 0, 1, 1], "baseline": "mean",
          "scale": "std"},
         [ROOT_HALF, -ROOT_HALF, 0, 0]),
    Case("E04 interleaved", advantage,
         {"rewards": [1.0, 1.0, 0.0, 1.0], "groups": [0, 1, 0, 1], "baseline": "mean",
          "scale": "std"},
         [ROOT_HALF, 0, -ROOT_HALF, 0]),
    # E23: the row that was not scored is in no statistic: others of row 0 are 0, 0.5.
    Case("E23 not scored", advantage,
         {"rewards": [1.0, NAN, 0.0, 0.5], "valid": [True, False, True, True],
          "baseline": "leave_one_out", "scale": "none"},
         [0.75, 0.0, -0.75, 0.0]),
    *(
        Case(f"nothing scored, {len(valid)}", advantage,
             {"rewards": [NAN] * len(valid), "valid": valid, "baseline": "leave_one_out",
              "scale": "batch"},
             [0.0] * len(valid))
        for valid in ([], [False, False])
    ),
    Case("reinforce", advantage,
         {"rewards": [1.0, NAN, -2.0], "valid": [True, False, True], "baseline": "none",
          "scale": "none"},
         [1.0, 0.0, -2.0]),
    # Without a baseline a group's deviation is still about its mean: sqrt(1/2) for 3, 2.
    Case("none std", advantage, {"rewards": [3.0, 2.0], "baseline": "none", "scale": "std"},
         [3 / ROOT_HALF, 2 / ROOT_HALF]),
    # REINFORCE++: 1, 0, 3, 4 have mean 2, squares 1 + 4 + 1 + 4 = 10, deviation sqrt(10 / 3).
    Case("none batch", advantage,
         {"rewards": [1.0, 0.0, 3.0, 4.0], "groups": [0, 0, 1, 1], "baseline": "none",
          "scale": "batch"},
         [x / math.sqrt(10 / 3) for x in (-1, -2, 1, 2)]),
    # REINFORCE++-baseline: centred in groups 1, -1, 0.5, -0.5, of mean 0; squares 2.5, n - 1 = 3.
    Case("mean batch", advantage,
         {"rewards": [2.0, 0.0, 4.0, 3.0], "groups": [0, 0, 1, 1], "baseline": "mean",
          "scale": "batch"},
         [x / math.sqrt(2.5 / 3) for x in (1, -1, 0.5, -0.5)]),
    # Rounding that centring leaves (0.3 - 2.4 / 8) is not blown up: no row differs.
    Case("equal batch", advantage, {"rewards": [0.3] * 8, "baseline": "mean", "scale": "batch"},
         [0.0] * 8),
]

SIGNAL = [
    # E05: raw rewards of the first group are equal, and what a penalty for length made of them
    # (0, 0, -0.5, -0.5) is not asked.
    Case("E05 raw", signal, {"rewards": [0.0] * 4 + [1.0, 0.0], "groups": [0] * 4 + [1] * 2},
         [False] * 4 + [True] * 2),
    Case("E26 all", flat_share, {"rewards": [1.0] * 4, "groups": [0, 0, 1, 1]}, 1.0),
    Case("E26 half", flat_share, {"rewards": [1.0, 0.0, 1.0, 1.0], "groups": [0, 0, 1, 1]}, 0.5),
    # DAPO Eq. 13 with a limit of 20 and a cache of 8: 0 up to 12, (12 - 14) / 8 at 14, -1 at 20.
    Case("overlong", penalties,
         {"lengths": [3, 12, 14, 20, 21], "max_new_tokens": 20, "buffer_tokens": 8},
         [0.0, 0.0, -0.25, -1.0, -1.0]),
    Case("overlong off", penalties,
         {"lengths": [20], "max_new_tokens": 20, "buffer_tokens": 0}, [0.0]),
]

TOOL = {"rewards": [0.0, 0.0, 0.0, 0.0, 1.0], "values": [0.0] * 5, "mask": [1, 0, 0, 1, 0],
        "lengths": [5]}
GAE = [
    # E19: the reward on the tool's token belongs to the policy's last token, and the first is one
    # step before it.
    Case("E19", gae_of, TOOL | {"gamma": 0.9, "lam": 1.0}, [[0.9, 0, 0, 1, 0]] * 2),
    Case("E19 no discount ahead", gae_of, TOOL | {"gamma": 0.0, "lam": 1.0}, [[0, 0, 0, 1, 0]] * 2),
    # Row 1: delta_2 = 1 - 0.5 = 0.5; delta_1 = 0.5 * 0.5 - 0.25 = 0, A_1 = 0 + 0.5 * 0.5 * 0.5
    # = 0.125. Row 2: A = 2 - 1 = 1, and nothing of it reaches row 1. Returns add the values.
    Case("values", gae_of,
         {"rewards": [9.0, 0.0, 1.0, 2.0], "values": [7.0, 0.25, 0.5, 1.0], "mask": [0, 1, 1, 1],
          "lengths": [3, 1], "gamma": 0.5, "lam": 0.5},
         [[0, 0.125, 0.5, 1.0], [0, 0.375, 1.0, 2.0]]),
    # lam = 0: A = delta. Rewards of each token: delta_1 = 1 + 2 - 1 = 2, delta_2 = 3 - 2 = 1.
    Case("one step", gae_of,
         {"rewards": [1.0, 3.0], "values": [1.0, 2.0], "mask": [1, 1], "lengths": [2],
          "gamma": 1.0, "lam": 0.0},
         [[2.0, 1.0], [3.0, 3.0]]),
    Case("nothing trains", gae_of,
         {"rewards": [1.0, 3.0], "values": [1.0, 2.0], "mask": [0, 0], "lengths": [2, 0],
          "gamma": 1.0, "lam": 0.0},
         [[0.0, 0.0]] * 2),
    Case("E22 none", whitened, {"x": [1.0, 2.0], "mask": [0, 0]}, [1.0, 2.0]),
    Case("E22 one", whitened, {"x": [1.0, 2.0], "mask": [1, 0]}, [1.0, 2.0]),
    # Mean 3, squares 1 + 1, deviation sqrt(2).
    Case("E22 two", whitened, {"x": [2.0, NAN, 4.0], "mask": [1, 0, 1]},
         [-ROOT_HALF, NAN, ROOT_HALF]),
    Case("E22 equal", whitened, {"x": [2.0, 2.0], "mask": [1, 1]}, [0.0, 0.0]),
]

E = math.e
KL = [
    Case("k1", kl, {"d": [-1.0, 0.0, 1.0], "kind": "k1"}, [1, 0, -1]),
    Case("k2", kl, {"d": [-1.0, 0.0, 2.0], "kind": "k2"}, [0.5, 0, 2]),
    # E07: exp(d) - d - 1: 1/e + 1 - 1, 0, e - 2; the exponent stops at 20.
    Case("E07 k3", kl, {"d": [-100.0, -1.0, 0.0, 1.0, NAN], "kind": "k3"},
         [99, 1 / E, 0, E - 2, NAN]),
    Case("E07 far", kl, {"d": [100.0], "kind": "k3"}, [math.exp(20) - 101]),
    # Slopes are r * (k + k'), and k' by the current logprob: 1 for k1, 1 - exp(d) for k3. So k1 has
    # (-d + 1) r; k3 has (exp(d) - d - 1 + 1 - exp(d)) r = -d r; k2, whose ratio has no gradient,
    # d * -1 * r. All act like -d * grad log p (E08), k1 with a part of mean 0 beside it.
    Case("E08 k1", kl_with_slope, {"d": 0.5, "kind": "k1", "ratio": 2.0}, [-1.0, 1.0]),
    Case("E08 k2", kl_with_slope, {"d": 0.5, "kind": "k2", "ratio": 2.0}, [0.25, -1.0]),
    # The slope is -d r however far the reference is; the value stops at exp(20) - d - 1, as above.
    Case("E07 slopes", kl_with_slope, {"d": 19.0, "kind": "k3", "ratio": 1.0},
         [math.exp(19) - 20, -19.0]),
    Case("E07 far slopes", kl_with_slope, {"d": 25.0, "kind": "k3", "ratio": 2.0},
         [2 * (math.exp(20) - 26), -50.0]),
    Case("E08 k3", kl_with_slope, {"d": 0.5, "kind": "k3", "ratio": 2.0},
         [2 * (math.exp(0.5) - 1.5), -1.0]),
    # Rows: (-0.5) + 1 by k1 (the prompt's token is left out), and a row that does not train.
    Case("rows k1", row_kl,
         {"policy": [NAN, -1.0, -1.0, -1.0], "reference": [0.0, -0.5, -2.0, -3.0],
          "lengths": [3, 1], "mask": [0, 1, 1, 1], "sample": [True, False], "kind": "k1"},
         [0.5, 0.0]),
    # 0.5^2 / 2 + 1 / 2.
    Case("rows k2", row_kl,
         {"policy": [NAN, -1.0, -1.0, -1.0], "reference": [0.0, -0.5, -2.0, -3.0],
          "lengths": [3, 1], "mask": [0, 1, 1, 1], "sample": [True, True], "kind": "k2"},
         [0.625, 2.0]),
]

ASYMMETRIC = {"clip_low": 0.2, "clip_high": 0.28}
CLIPS = [
    # E16: -min(r A, clip(r) A).
    *(
        Case(f"E16 {a:+} {r}", value, ASYMMETRIC | {"advantages": [a], "ratios": [r]}, expected)
        for a, r, expected in [
            (1.0, 1.25, -1.25), (1.0, 1.30, -1.28), (-1.0, 0.75, 0.8), (-1.0, 1.3, 1.3)
        ]
    ),
    # E17: r |A| = 10, at most 3 |A|.
    Case("E17", value, {"advantages": [-1.0], "ratios": [10.0], "dual_clip": 3.0}, 3.0),
    Case("E17 off", value, {"advantages": [-1.0], "ratios": [10.0]}, 10.0),
    Case("E17 gain", value, {"advantages": [1.0], "ratios": [10.0], "dual_clip": 3.0}, -1.2),
    Case("E17 inside", value, {"advantages": [-2.0], "ratios": [2.5], "dual_clip": 3.0}, 5.0),
    Case("no lower bound", value, {"advantages": [-1.0], "ratios": [0.5], "clip_low": None}, 0.5),
    Case("no upper bound", value, {"advantages": [1.0], "ratios": [5.0], "clip_high": None}, -5.0),
    # E25: of four tokens those without gradient count: (+, 1.5) and (-, 0.5).
    Case("E25", clip_share,
         {"advantages": [1.0, 1.0, -1.0, -1.0], "ratios": [0.5, 1.5, 0.5, 1.5]}, 0.5),
    # The dual clip takes the gradient of (-, 4) and not of (-, 2).
    Case("E25 dual", clip_share,
         {"advantages": [-1.0, -1.0], "ratios": [4.0, 2.0], "dual_clip": 3.0}, 0.5),
    # CISPO: -clip(r) A log p: log p = log 2 with weight 1.28; log p = log 0.5 with weight 0.8.
    Case("cispo", loss,
         ASYMMETRIC | {"advantages": [1.0, -1.0], "ratios": [2.0, 0.5], "objective": "cispo"},
         [(-1.28 * math.log(2) + 0.8 * math.log(0.5)) / 2, [-0.64, 0.4]]),
    Case("cispo one-sided", loss,
         {"advantages": [1.0, -1.0], "ratios": [2.0, 0.5], "objective": "cispo", "clip_low": None,
          "clip_high": 0.28},
         [(-1.28 * math.log(2) + 0.5 * math.log(0.5)) / 2, [-0.64, 0.25]]),
    Case("reinforce loss", loss,
         {"advantages": [1.0, -3.0], "current": [-2.0, -1.0], "objective": "reinforce"},
         [(2 - 3) / 2, [-0.5, 1.5]]),
    # GSPO: mean log ratio log(1.1) of row 1 and log(0.5) of row 2, which is clipped to 0.8:
    # -min(0.5 * -1, 0.8 * -1) = 0.8. Slope of row 1: -1.1 / (2 rows * 2 tokens).
    Case("gspo", loss,
         {"advantages": [1.0, -1.0], "lengths": [2, 1],
          "ratios": [1.1 * 1.5, 1.1 / 1.5, 0.5], "ratio_level": "sequence",
          "normalization": "sequence"},
         [(-1.1 + 0.8) / 2, [-1.1 / 4, -1.1 / 4, 0]]),
]

OPPOSED = {"advantages": [1.0, -1.0], "lengths": [2, 6]}
HALVED = [-1 / 8] * 2 + [1 / 8] * 6
MEANS = [
    # E11: -(2 - 6) / 8; (-1 + 1) / 2; -(2 - 6) / (2 * 10).
    Case("E11 token", value, OPPOSED | {"normalization": "token"}, 0.5),
    Case("E11 sequence", value, OPPOSED | {"normalization": "sequence"}, 0.0),
    Case("E11 constant", value, OPPOSED | {"normalization": "constant", "constant_tokens": 10},
         0.2),
    Case("E11 default", loss, OPPOSED, [0.5, HALVED]),
    # E10, F02: any parts add up to the same.
    *(
        Case(f"F02 {len(parts)} parts", loss, OPPOSED | {"parts": parts}, [0.5, HALVED])
        for parts in ([[0], [1]], [[1], [], [0]])
    ),
    # F01, F13: rows that do not train are in no count: -(1 + 2 + 2) / 3 tokens.
    Case("F13", loss,
         {"advantages": [1.0, 9.0, 2.0, 9.0], "lengths": [1, 3, 2, 1],
          "sample": [True, False, True, False]},
         [-5 / 3, [-1 / 3, 0, 0, 0, -2 / 3, -2 / 3, 0]]),
    *(
        Case(f"F01 {kind}", loss,
             {"advantages": [1.0, 2.0, 3.0, 9.0], "lengths": [1, 1, 1, 1],
              "sample": [True, True, True, False], "parts": [[0], [1], [2], [3]],
              "normalization": kind, "constant_tokens": 1},
             [-2.0, [-1 / 3, -2 / 3, -1, 0]])
        for kind in ("token", "sequence", "constant")
    ),
    # E20: advantages of tokens that do not train are in no mean: 1, not 5.5.
    Case("E20", value,
         {"advantages": [0.0], "lengths": [4], "mask": [1, 1, 0, 0],
          "token_advantages": [1.0, 1.0, 10.0, 10.0], "ratio_level": "sequence",
          "normalization": "sequence"},
         -1.0),
    # KL of the one token that differs, by k3 e - 2, over 4 tokens, or over 1 token of 2 rows.
    *(
        Case(f"E11 KL {kind}", value,
             {"advantages": [0.0, 0.0], "lengths": [1, 3], "reference": [1.0, 0.0, 0.0, 0.0],
              "kl_coef": 2.0, "normalization": kind, "constant_tokens": 4},
             2 * (E - 2) / divisor)
        for kind, divisor in (("token", 4), ("sequence", 2), ("constant", 8))
    ),
    # Entropies 1 and 3, 3, 3 with the same divisors: 10 / 4; (1 + 3) / 2; 10 / (2 * 4).
    *(
        Case(f"entropy {kind}", value,
             {"advantages": [0.0, 0.0], "lengths": [1, 3], "entropies": [1.0, 3.0, 3.0, 3.0],
              "entropy_coef": 0.1, "normalization": kind, "constant_tokens": 4},
             -0.1 * mean)
        for kind, mean in (("token", 2.5), ("sequence", 2.0), ("constant", 1.25))
    ),
    # Weights w = exp(0 - generation): 3 and 1/2 by token, their product by sequence; cap 2.
    *(
        Case(f"{kind} {level}", value,
             {"advantages": [1.0], "lengths": [2],
              "generation": [-math.log(3), math.log(2)], "importance": kind,
              "importance_level": level, "importance_cap": 2.0},
             -mean)
        for kind, level, mean in (
            ("truncate", "token", (2 + 0.5) / 2),
            ("truncate", "sequence", 1.5),
            ("mask", "token", (0 + 0.5) / 2),
            ("mask", "sequence", 1.5),
            ("none", "token", 1.0),
        )
    ),
]
# fmt: on


@pytest.mark.parametrize("case", [*ADVANTAGES, *SIGNAL, *GAE, *KL, *CLIPS, *MEANS], ids=str)
def test_results_are_those_worked_by_hand(case):
    actual, expected = case.function(**case.inputs), case.expected
    nested = isinstance(expected, list) and any(isinstance(each, list) for each in expected)
    pairs = zip(actual, expected, strict=True) if nested else [(actual, expected)]
    for got, wanted in pairs:
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6, nan_ok=True)
