"""Importance weights for tokens that were drawn by another engine than the one that trains.

A server computes the same policy with kernels of its own, so the probability q that it drew a token with differs from
the trainer's p, and what was sampled is off the policy even before the first step. As in TRL 1.16 (its settings
`vllm_importance_sampling_mode`, with a clip_max and no clip_min; after https://fengyao.notion.site/off-policy-rl):

1. When a round begins the trainer scores every token of its rows: log p. A token's ratio is p / q; at level `sequence`
   it is the product of its row's ratios, the same for all tokens of the row.
2. `truncate` caps the ratio; `mask` makes it 0 where it is above the cap. The result is the token's weight.
3. The weight multiplies the token's policy loss, not its KL term. The clipped ratio of the update is then taken
   against p, so that it measures what the steps of the round have changed, and nothing else.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from twofold.settings import Correction


def ratios_of(scored: Tensor, sampled: Tensor, settings: Correction) -> Tensor:
    """The ratio of each token of one row, (T,), from its log-probabilities by the trainer and by the sampler, (T,)."""
    gaps = scored - sampled
    if settings.level == "sequence":
        gaps = gaps.sum().expand_as(gaps)
    return gaps.exp()


def weights_of(ratios: Tensor, settings: Correction) -> Tensor:
    """What each token's loss counts, from its ratio; the shapes are equal."""
    match settings.mode:
        case "none":
            return torch.ones_like(ratios)
        case "truncate":
            return ratios.clamp(max=settings.cap)
    return ratios.where(ratios <= settings.cap, 0.0)


def warning(metrics: Mapping[str, float], settings: Correction) -> str:
    """What to say of a round's `sampler_gap` when it is too large; empty when it is not."""
    gap = metrics.get("sampler_gap", 0.0)
    if gap <= settings.warn_gap:
        return ""
    more = " Use weights.correction.mode 'truncate' or 'mask'." if settings.mode == "none" else ""
    return (
        f"sampler and trainer give tokens log-probabilities that differ by {gap:.3f} in the mean (n = "
        f"{metrics['sampler_gap_n']:.0f} tokens), more than weights.correction.warn_gap ({settings.warn_gap:g}). "
        f"Do both have the same model in the same dtype?{more}"
    )
