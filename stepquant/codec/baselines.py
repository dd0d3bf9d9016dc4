"""The codecs that the paper compares with, as round trips of FP32 states `[..., H, K, V]`.

Every codec takes the precision map of its heads, so that mixed precision and FP16 pivot rows (bits 16) work under all
of them: rowwise INT with a solved map is the paper's *temporal only*, and pivots under `DampCodec` are DAMP's channels.
None of them changes its input; all run on the tensor's device, in its dtype (scales rounded as they are stored).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stepquant.codec.dual_axis import to_fp16, to_scale
from stepquant.codec.spec import MAGNITUDE_FLOOR, PIVOT, levels

ROW_SCALE_MIN, ROW_SCALE_MAX = 2.0**-14, 65504.0  # appendix B.5: FP16 scales of the rowwise codec, normal numbers only
E2M1_MAX, E4M3_MAX, NVFP4_BLOCK = 6.0, 448.0, 16


class MappedCodec:
    """What the baseline codecs share: largest codes by row, and pivot rows put back as FP16.

    Args:
        bits: precision map uint8 `[H, K]`; 16 marks a pivot row. Its device is the codec's.
        value_dim: value columns V.
    """

    def __init__(self, bits: Tensor, value_dim: int) -> None:
        self.bits, self.value_dim = bits, value_dim
        self.pivot = (bits == PIVOT).unsqueeze(-1)
        self.any_pivot = bool(self.pivot.any())
        table = torch.tensor([1.0, 1.0, *(float(levels(b)) for b in range(2, 9)), *[1.0] * 8], device=bits.device)
        self.max_code = table[bits.long().clamp_max(PIVOT)].unsqueeze(-1)  # q_b, [H, K, 1]

    def roundtrip(self, x: Tensor) -> Tensor:
        """Quantise and reconstruct states `[..., H, K, V]`: Q(X) of equation 4."""
        out = self._roundtrip(x)
        return torch.where(self.pivot, to_fp16(x).to(x.dtype), out) if self.any_pivot else out

    def _roundtrip(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def round_rows(x: Tensor, max_code: Tensor) -> Tensor:
    """Equation 3 with one FP16 absmax scale a row: s = clamp(max_j |x_ij| / q_b), codes nearest, ties to even.

    Args:
        x: `[..., K, V]`.
        max_code: q_b, broadcastable to `[..., K, 1]`.
    """
    scale = (x.abs().amax(-1, keepdim=True) / max_code).clamp_(ROW_SCALE_MIN, ROW_SCALE_MAX).half().to(x.dtype)
    codes = (x / scale).round_()
    torch.minimum(torch.maximum(codes, -max_code, out=codes), max_code, out=codes)
    return codes.mul_(scale)


class RowwiseCodec(MappedCodec):
    """Symmetric absmax INT with one FP16 scale a key row (the paper's INT8, INT6 and INT4; appendix B.5)."""

    def _roundtrip(self, x: Tensor) -> Tensor:
        return round_rows(x, self.max_code)


class DsqCodec(MappedCodec):
    """Q-Mamba's decoupled scales (DSQ), as the paper adapts it to delta-rule states.

    Q-Mamba gives the state one scale vector along each axis, both from absolute maxima, with neither impact weights nor
    a fit. Its text leaves the split between the axes to the reader; ours: the row factor takes the square root of the
    row's maximum, and the column factor covers what remains, so that nothing clips,

        a_i = sqrt(max_j |X_ij|),   c_j = max_i |X_ij| / a_i,   Xhat_ij = a_i c_j q_ij / q_b,

    with q_ij the nearest integer in [-q_b, q_b], and a, c rounded to FP16 (clamp 2^-24 .. 65504). 1 / q_b is a constant
    of the precision and costs nothing. Pivot rows have no say in c.
    """

    def _roundtrip(self, x: Tensor) -> Tensor:
        magnitude = x.abs()
        rows = to_scale(magnitude.amax(-1, keepdim=True).clamp_min_(MAGNITUDE_FLOOR).sqrt_())
        magnitude.mul_(rows.reciprocal())
        if self.any_pivot:
            magnitude.mul_(~self.pivot)
        step = rows * to_scale(magnitude.amax(-2, keepdim=True)) / self.max_code
        codes = torch.div(x, step, out=magnitude).round_()
        torch.minimum(torch.maximum(codes, -self.max_code, out=codes), self.max_code, out=codes)
        return codes.mul_(step)


class Nvfp4Codec(MappedCodec):
    """NVFP4: E2M1 codes, one FP8 E4M3 scale per 16 value columns, one FP32 scale a head.

    Head scale s = max |X| / (448 * 6); block scale e = E4M3(max |block| / 6 / s); Xhat = E2M1(X / (e s)) e s, each
    rounded to nearest, ties to even. A block whose scale rounds to zero reads back as zero.
    """

    def _roundtrip(self, x: Tensor) -> Tensor:
        blocks = x.unflatten(-1, (-1, NVFP4_BLOCK))
        peak = blocks.abs().amax(-1, keepdim=True)
        if self.any_pivot:
            peak = peak * ~self.pivot.unsqueeze(-1)
        head = (peak.amax((-3, -2), keepdim=True) / (E4M3_MAX * E2M1_MAX)).clamp_min(1e-30).float().to(x.dtype)
        scale = (peak / (E2M1_MAX * head)).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype) * head
        codes = torch.where(scale > 0, blocks / scale, torch.zeros((), dtype=x.dtype, device=x.device))
        return round_e2m1(codes).mul_(scale).flatten(-2)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign of `x`, ties to the even code, saturating; in place."""
    x.clamp_(-E2M1_MAX, E2M1_MAX)
    magnitude = x.abs()
    spacing = 0.5 + 0.5 * (magnitude >= 2) + 1.0 * (magnitude >= 4)  # 0.5 below 2, 1 below 4, 2 up to 6
    return x.div_(spacing).round_().mul_(spacing)


def hadamard(size: int, device: torch.device | str = "cpu") -> Tensor:
    """Orthonormal, symmetric block-diagonal Hadamard matrix `[size, size]`: blocks of the largest power of two that
    divides `size` (Sylvester's construction)."""
    block = size & -size
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return torch.block_diag(*[matrix / block**0.5] * (size // block)).to(device)


class DampCodec(MappedCodec):
    """DAMP-like: rowwise INT8 of the Hadamard-rotated value axis, selected key channels in FP16.

    Appendix G describes DAMP as FP16 key channels chosen by reconstruction error and decay persistence, the others in
    INT8 with a Hadamard transform; its code is not public, so the choice of channels is the precision map's (see
    `damp_channels`) and the scales are those of the rowwise codec.
    """

    def __init__(self, bits: Tensor, value_dim: int) -> None:
        super().__init__(bits, value_dim)
        self.rotation = hadamard(value_dim, bits.device)

    def _roundtrip(self, x: Tensor) -> Tensor:
        rotation = self.rotation.to(x.dtype)
        return round_rows(x @ rotation, self.max_code) @ rotation


DAMP_FRACTION = 0.2254
"""Key channels kept in FP16: as many as bring the 8.125 bits of 128 columns to the 9.9 bits a value DAMP reports."""


def damp_channels(row_error: Tensor, persistence: Tensor, fraction: float = DAMP_FRACTION) -> Tensor:
    """Precision map of `DampCodec`: FP16 for the rows with the largest persistent error, 8 bits for the others.

    Args:
        row_error: mean squared INT8 reconstruction error by row `[L, H, K]`.
        persistence: lifetime weight of equation 7 by row, broadcastable to `[L, H, K]`.
        fraction: share of all rows that stay in FP16.

    Returns:
        uint8 `[L, H, K]` of 8 and 16.
    """
    score = (row_error.double() * persistence.double()).flatten()
    bits = torch.full_like(score, 8, dtype=torch.uint8)
    bits[score.argsort(descending=True, stable=True)[: round(fraction * score.numel())]] = PIVOT
    return bits.view(row_error.shape)


class FloatCodec:
    """A state stored in a floating-point dtype; FP32 returns its input itself, so that nothing at all changes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def roundtrip(self, x: Tensor) -> Tensor:
        """The state after one trip through storage, `[..., H, K, V]`."""
        if self.dtype == torch.float32:
            return x
        return to_fp16(x).to(x.dtype) if self.dtype == torch.float16 else x.to(self.dtype).to(x.dtype)
