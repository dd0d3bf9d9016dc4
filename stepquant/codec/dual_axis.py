"""Key-row-aware dual-axis fitting: Xhat_ij = r_i c_j z_ij (equations 11 to 14, appendix C, design 2.2).

For one head with precision b_i per key row and row weights w_i (geometric mean 1):

- r_i = sqrt(mean_j |X_ij| / w_i), rounded to FP16 before it is used;
- c_j = max_i |X_ij| / (r_i z_max,i) over integer rows, FP16; quantise (by a scale that reaches every value, where
  FP16 is too coarse or too narrow for that, `REACH`); then, codes fixed, the weighted least squares refit
  c_j = sum_i w_i^2 v_ij X_ij / sum_i w_i^2 v_ij^2 with v = r z; quantise again. Without refits (the default) a first
  scale stays, with less reach for two-bit rows (`spec.TWO_BIT_COVER`); four-level heads are always refitted;
- pivot rows (bits 16) are stored as FP16 and take no part in the column fit.

`fit` gives the codes and scales that are stored, `reconstruct` what is read back, `roundtrip` both in one without
the integer detour. All are batched over leading dimensions and run in FP32 on the tensor's device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stepquant.codec.spec import (
    MAGNITUDE_FLOOR,
    PIVOT,
    SCALE_MAX,
    SCALE_MIN,
    CodecSpec,
    code_step,
    covers,
    four_refits,
    max_code,
)

REACH = 1 - 2.0**-10  # of the exact scale: FP16 rounds normal numbers by less, so it only counts outside of them


@dataclass
class Codes:
    """What a set of heads stores: `codes` int8 `[..., K, V]` (in units of the code step), `r` FP16 `[..., K, G]`
    with G row factors a row (1, or V / group in four-level heads), `c` FP16 `[..., V]`, and `pivots` FP16
    `[..., K, V]`, meaningful in rows whose precision is 16 only."""

    codes: Tensor
    r: Tensor
    c: Tensor
    pivots: Tensor


def to_scale(x: Tensor) -> Tensor:
    """Round to FP16 within [2^-24, 65504] and return in the input's dtype: what calibration and serving both see."""
    return x.clamp(SCALE_MIN, SCALE_MAX).half().to(x.dtype)


def to_fp16(x: Tensor) -> Tensor:
    """Round values (pivots) to FP16, saturating instead of overflowing."""
    return x.clamp(-SCALE_MAX, SCALE_MAX).half()


class DualAxisCodec:
    """The codec of one layer, or of any set of heads, with the per-row constants of its precision map prepared.

    Args:
        bits: precision map uint8 `[H, K]`; 16 marks a pivot row.
        w: row weights float32 `[H, K]`.
        spec: codec settings.
        value_dim: value columns V.
    """

    def __init__(self, bits: Tensor, w: Tensor, spec: CodecSpec, value_dim: int) -> None:
        self.bits, self.spec, self.value_dim = bits, spec, value_dim
        device = w.device
        bits = bits.to(device)
        self.pivot = bits == PIVOT
        table_max = torch.ones(PIVOT + 1, device=device)
        table_step = torch.ones_like(table_max)
        for b in range(2, 9):
            table_max[b], table_step[b] = max_code(b, spec), code_step(b, spec)
        index = bits.long()
        self.max_code = table_max[index].unsqueeze(-1)  # [H, K, 1], in code units
        self.step = table_step[index].unsqueeze(-1)
        self.w = w.float().unsqueeze(-1)
        self.integer = (~self.pivot).unsqueeze(-1)
        cover = torch.from_numpy(covers(bits.cpu().numpy(), spec.refits)).to(device).unsqueeze(-1)
        self.bound = cover / self.max_code * self.integer  # of the largest value; pivots have no say in the fit
        self.any_pivot, self.all_pivots = bool(self.pivot.any()), bool(self.pivot.all())
        one = bits.numel() > 0 and bool((bits == bits.flatten()[0]).all())
        self.limit = float(self.max_code.flatten()[0]) if one else None  # of a map of one precision
        self.w2 = self.w.square() * self.integer  # pivots have no say in the column fit
        four = (bits == 2).all(-1) if spec.codebook == "head" else torch.zeros_like(bits[:, 0], dtype=torch.bool)
        self.four_heads = four.nonzero().flatten() if bool(four.any()) else None
        self.every_four = bool(four.all())  # nothing to gather and scatter
        self.fitted = (four if spec.refits == 0 else torch.ones_like(four)).view(-1, 1, 1)  # heads that refits change

    def roundtrip(self, x: Tensor) -> Tensor:
        """Quantise and reconstruct: Q(X) of equation 4, `[..., H, K, V]` float32 in and out."""
        if self.all_pivots:
            return to_fp16(x).to(x.dtype)
        codes, rs, c = self._fit(x)
        out = codes.mul_(rs).mul_(c)
        return torch.where(self.pivot.unsqueeze(-1), to_fp16(x).to(x.dtype), out) if self.any_pivot else out

    def fit(self, x: Tensor) -> Codes:
        """Codes and scales of `[..., H, K, V]` float32 states, as they are stored."""
        codes, rs, c = self._fit(x)
        groups = self.value_dim // self.spec.group if self.four_heads is not None else 1
        r = (rs / self.step)[..., :: self.value_dim // groups] if rs.shape[-1] > 1 else rs / self.step
        return Codes(codes.to(torch.int8), r.half(), c.squeeze(-2).half(), to_fp16(x))

    def reconstruct(self, stored: Codes) -> Tensor:
        """Xhat `[..., H, K, V]` float32 from what is stored."""
        r = stored.r.float()
        if r.shape[-1] > 1:
            r = r.repeat_interleave(self.value_dim // r.shape[-1], -1)
        out = stored.codes.float() * (r * self.step) * stored.c.float().unsqueeze(-2)
        return torch.where(self.pivot.unsqueeze(-1), stored.pivots.float(), out) if self.any_pivot else out

    def _row_factors(self, magnitude: Tensor) -> Tensor:
        """r `[..., H, K, 1]`, or `[..., H, K, V]` when some heads have one factor per group of columns."""
        if self.every_four:
            return self._group_factors(magnitude, self.w)
        r = to_scale((self._sampled(magnitude).mean(-1, keepdim=True).clamp_min(MAGNITUDE_FLOOR) / self.w).sqrt())
        if self.four_heads is None:
            return r
        r = r.expand(*magnitude.shape).clone()
        r[..., self.four_heads, :, :] = self._group_factors(
            magnitude[..., self.four_heads, :, :], self.w[self.four_heads]
        )
        return r

    def _group_factors(self, magnitude: Tensor, w: Tensor) -> Tensor:
        """r of four-level heads, the factor of a group in each of its columns."""
        part = magnitude.unflatten(-1, (-1, self.spec.group))
        part = part[..., : self.spec.sample or self.spec.group].mean(-1)
        part = to_scale((part.clamp_min(MAGNITUDE_FLOOR) / w).sqrt())
        return part.unsqueeze(-1).expand(*part.shape, self.spec.group).flatten(-2)

    def _sampled(self, magnitude: Tensor) -> Tensor:
        """The columns that row factors are means over."""
        half, sample = self.value_dim // 2, self.spec.sample
        if not 0 < sample < half:
            return magnitude
        return torch.cat([magnitude[..., :sample], magnitude[..., half : half + sample]], -1)

    def _fit(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Float codes `[..., H, K, V]`, r * step (broadcastable to it) and c `[..., H, 1, V]`."""
        magnitude = x.abs()
        rs = self._row_factors(magnitude) * self.step
        scaled = x * rs.reciprocal()  # X in units of r and the code step: codes are scaled / c
        bound = torch.abs(scaled, out=magnitude).mul_(self.bound)
        peak = bound.amax(-2, keepdim=True)
        c = to_scale(peak)
        weight = (self.w2 * rs.square()) if rs.shape[-1] > 1 else (self.w2 * rs.square()).transpose(-1, -2)
        refits = self.spec.refits if self.four_heads is None else four_refits(self.spec.refits)
        codes = self._quantise(scaled, torch.maximum(c, peak * REACH) if refits else c, bound)
        for _ in range(refits):
            product, square = codes * scaled, codes.square()
            if rs.shape[-1] > 1:
                numerator = (product * weight).sum(-2, keepdim=True)
                denominator = (square * weight).sum(-2, keepdim=True)
            else:
                numerator, denominator = weight @ product, weight @ square
            refit = to_scale(numerator / denominator)
            fitted = (denominator > 0) & self.fitted
            c = torch.where(fitted, refit, c)
            codes = self._quantise(scaled, c, codes)
        return codes, rs, c

    def _quantise(self, scaled: Tensor, c: Tensor, out: Tensor) -> Tensor:
        """Nearest code of `scaled / c`, ties to even; sign and magnitude with a threshold at 2 in four-level heads."""
        codes = torch.mul(scaled, c.reciprocal(), out=out)
        if self.limit is not None and self.four_heads is None:  # one precision: numbers instead of tensors
            return codes.round_().clamp_(-self.limit, self.limit)
        if self.four_heads is None:
            return torch.minimum(torch.maximum(codes.round_(), -self.max_code, out=codes), self.max_code, out=codes)
        if self.every_four:
            return _four_levels(codes)
        four = _four_levels(codes[..., self.four_heads, :, :])
        codes.round_().clamp_(-self.max_code, self.max_code)
        codes[..., self.four_heads, :, :] = four
        return codes


def _four_levels(scaled: Tensor) -> Tensor:
    """Codes -3, -1, 1, 3: sign and magnitude with a threshold at 2 (by arithmetic: on a CPU `torch.where` of numbers
    takes ten times as long)."""
    magnitude = scaled.abs().ge_(2).mul_(2).add_(1)
    return (scaled < 0).to(scaled.dtype).mul_(-2).add_(1).mul_(magnitude)
