"""Output sensitivity measured by brute force: noise at one head's output, the model's KL, one forward a head.

The reference that the affordable estimates of `stepquant.passes.sensitivity` are judged by (design 2.5 a):

    F_h = KL under noise of 10% of the head's RMS / (0.01 V E[y^2])
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepquant.models.adapter import LoadedModel
from stepquant.models.capture import Replacement, capture_delta_rule

NOISE = 0.1  # of the head's RMS


@torch.no_grad()
def noise_sensitivity(loaded: LoadedModel, tokens: Tensor, replace: Replacement | None = None, seed: int = 0) -> Tensor:
    """F `[L, H]` in nats a token per unit of squared output error (summed over the V value columns).

    Args:
        loaded: model.
        tokens: `[B, T]`.
        replace: what runs instead of the model's own delta rule (`Context.delta_rule`).
        seed: of the noise; the same noise shape for every head.
    """
    g = loaded.geometry
    power = torch.zeros(g.num_delta_layers, g.num_heads, dtype=torch.float64)

    def measure(layer: int, y: Tensor) -> Tensor:
        power[layer] = y.float().square().mean((0, 1, 3), dtype=torch.float64).cpu()
        return y

    tokens = tokens.to(loaded.device)
    reference = _log_probabilities(loaded, tokens, replace, measure)
    found = torch.zeros_like(power)
    for layer in range(g.num_delta_layers):
        for head in range(g.num_heads):

            def disturb(at: int, y: Tensor, layer: int = layer, head: int = head) -> Tensor:
                if at != layer:
                    return y
                generator = torch.Generator(device=y.device).manual_seed(seed)
                noise = torch.randn(y[:, :, head].shape, generator=generator, device=y.device)
                y = y.clone()
                y[:, :, head] += (NOISE * float(power[layer, head]) ** 0.5 * noise).to(y.dtype)
                return y

            disturbed = _log_probabilities(loaded, tokens, replace, disturb)
            kl = (reference.exp() * (reference - disturbed)).sum(-1).mean(dtype=torch.float64)
            found[layer, head] = float(kl) / (NOISE**2 * g.value_dim * float(power[layer, head]))
    return found


def _log_probabilities(loaded: LoadedModel, tokens: Tensor, replace: Replacement | None, edit: object) -> Tensor:
    with capture_delta_rule(loaded, replace=replace, edit=edit):  # type: ignore[arg-type]
        return loaded.model(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
