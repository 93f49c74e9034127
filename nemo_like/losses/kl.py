"""Estimators of KL(policy || reference) from samples of the policy.

With d = log reference - log policy for a sampled token (http://joschu.net/blog/kl-approx.html):
k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1.
"""

from torch import Tensor

from nemo_like.batch.tensor_batch import TensorBatch
from nemo_like.config.losses import KLEstimator
from nemo_like.losses.aggregate import row_sums, trained_tokens

# exp(20) = 4.9e8 is finite in float32 and bfloat16, and so is its gradient; 0 * inf never appears.
_MAX_EXPONENT = 20.0


def kl_estimate(log_ratio: Tensor, kind: KLEstimator) -> Tensor:
    """Per-token estimate from ``log_ratio`` = reference - policy logprobs, any shape.

    Value and gradient are finite for finite input; NaN stays NaN.

    >>> import torch
    >>> [round(v, 6) for v in kl_estimate(torch.tensor([-1.0, 0.0, 1.0]), "k3").tolist()]
    [0.367879, 0.0, 0.718282]
    """
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    return log_ratio.clamp(max=_MAX_EXPONENT).exp() - log_ratio - 1


def kl_loss(log_ratio: Tensor, importance: Tensor, kind: KLEstimator) -> Tensor:
    """Per-token term whose expected *gradient* is that of KL(policy || reference).

    A plain ``kl_estimate`` under a loss misses the gradient of the sampling distribution: k1 then
    has no effect on average (its reference drops out), k3 gives that of KL(reference || policy).
    Weighting by the ratio with gradient, E_old[ratio * k] = E_policy[k], restores it for k1 and k3.
    k2 is not an unbiased value, but its plain gradient, -d * grad log policy, already is the right
    one, so its ratio is detached.

    ``importance`` = current policy / sampling policy, with gradient, same shape as ``log_ratio``.

    >>> import torch
    >>> current = torch.zeros(3, requires_grad=True)
    >>> d = torch.tensor([1.0, 25.0, -100.0]) - current
    >>> kl_loss(d, current.exp(), "k3").sum().backward()
    >>> current.grad.tolist()
    [-1.0, -25.0, 100.0]
    """
    if kind == "k1":
        return importance * kl_estimate(log_ratio, kind)
    weight = importance.detach()
    smooth = weight * kl_estimate(log_ratio, "k2")
    if kind == "k2":
        return smooth
    # The gradient of ratio * k3 is that of k2 too: exp(d) cancels between the ratio's part and
    # k3's own, which float32, and the bound of the exponent, would leave huge and of either sign.
    return (weight * kl_estimate(log_ratio, kind)).detach() + (smooth - smooth.detach())


def kl_of_rows(
    policy_logprobs: Tensor, reference_logprobs: Tensor, batch: TensorBatch, kind: KLEstimator
) -> Tensor:
    """Estimate of each row's KL(policy || reference), summed over its trained tokens: float64 [B].

    Subtracted from rewards (``loss.kl_in=reward``; Eq. 2 of arXiv:2203.02155), it acts through the
    gradient of the sampling distribution only. That is the gradient of the KL for k1, whose own
    gradient is 0 on average; for k2 and k3 it is not. Logprobs are [N]; a row that does not train
    has 0.
    """
    at, row = trained_tokens(batch)
    log_ratio = reference_logprobs[at].double() - policy_logprobs[at].double()
    return row_sums(kl_estimate(log_ratio, kind), row, len(batch))
