"""Optional penalty on the distance to a frozen reference policy. The paper's objective has none."""

from __future__ import annotations

from torch import Tensor

from hacrl.algorithms.importance import MAX_LOG_RATIO


def k3_divergence(logprobs_BT: Tensor, reference_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean over tokens of r - log r - 1 with r = pi_ref / pi_k, (B,).

    The estimate (k3) is unbiased and never negative. A response without a token in the mask has divergence 0.
    """
    log_r_BT = (reference_logprobs_BT - logprobs_BT).masked_fill(~mask_BT, 0.0)
    log_r_BT = log_r_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3_BT = log_r_BT.exp() - log_r_BT - 1.0
    return k3_BT.sum(dim=-1) / mask_BT.sum(dim=-1).clamp(min=1)
