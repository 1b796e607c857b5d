"""KL(π_θ ‖ π_ref) from sampled tokens: values for metrics and rewards, and a loss whose gradient is the KL's.

d = log π_ref − log π_θ at a token sampled from π_θ (or from π_old, near it). Names after Schulman's note
"Approximating KL divergence" (2020).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Estimator = Callable[[Tensor], Tensor]
"""d → estimate per token."""


def k1(d: Tensor) -> Tensor:
    """−d: unbiased, large variance, may be negative."""
    return -d


def k2(d: Tensor) -> Tensor:
    """d² / 2: small bias and variance; its plain gradient −d·∇log π_θ is the KL's own, on policy."""
    return 0.5 * d * d


def k3(d: Tensor) -> Tensor:
    """exp(d) − 1 − d: unbiased, never negative (DeepSeekMath's)."""
    return d.exp() - 1.0 - d


ESTIMATORS: dict[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3}
"""By their name in `actor.loss.kl.estimator`."""


def kl_loss(log_pi: Tensor, log_old: Tensor, log_ref: Tensor, estimator: str, weighted: bool) -> Tensor:
    """Loss per token: r·k(d), r = π_θ / π_old: tokens sampled from π_old estimate KL(π_θ ‖ π_ref) at every θ.

    E_old[r·k1] and E_old[r·k3] are the KL itself, hence so are their gradients (k3 so weighted: DeepSeek-V3.2, 2025);
    k2's value is biased, and with sg[r] its gradient is exact. Without `weighted` the plain estimator is differentiated
    (DeepSeekMath's GRPO with k3): the gradient of KL(π_ref ‖ π_θ) for k3, of the KL for k2, and zero for k1.
    """
    value = ESTIMATORS[estimator](log_ref - log_pi)
    if not weighted:
        return value
    ratio = (log_pi - log_old).exp()
    return (ratio.detach() if estimator == "k2" else ratio) * value
