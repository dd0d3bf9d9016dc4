"""The kernels' work in plain torch: what serves a CPU, and what the pool and the transformers backend are tested with.

`ReferenceKernels` has the public methods of `stepquant.runtime.step.PackedKernels` and reads and writes the same
pages (`PackedCodec`) and the same window buffers (`WindowBuffers`); only the order of a buffer's rows is its own.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stepquant.codec.dual_axis import to_fp16, to_scale
from stepquant.codec.packed import PackedCodec
from stepquant.codec.spec import CodecSpec
from stepquant.codec.window import last_dtype, store
from stepquant.codegen.spec import KernelSpec
from stepquant.layout import PageLayout
from stepquant.runtime.window import WindowBuffers, WindowSteps

EPSILON = 1e-6  # of the L2 norm of q and k, as the models and the kernels have it


class ReferenceKernels(WindowSteps):
    """The operations of one plan on one device in torch; arguments as `PackedKernels`, without a plan's hash.

    Raises:
        BackendError: if the layout is none that the kernels take.
    """

    def __init__(
        self, layout: PageLayout, w: Tensor, codec: CodecSpec, family: Literal["gdn", "kda"], num_key_heads: int,
        window: int = 1, buffer: str = "fp16", device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.spec = KernelSpec.of(family, num_key_heads, layout, codec, window, buffer)
        self.layout, self.device = layout, torch.device(device)
        self.codecs = [PackedCodec(layout, i, w[i].to(self.device), codec) for i in range(layout.num_layers)]

    def step(
        self, layer: int, pages: Tensor, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
        A_log: Tensor, dt_bias: Tensor, scale: float, out: Tensor, l2norm: bool = True,
    ) -> Tensor:  # fmt: skip
        """One decode step of a layer in place; see `PackedKernels.step`."""
        live, index = self._live(slots)
        out.zero_()
        if not len(live):
            return out
        q, k, v, gate, beta = self._token(q[live], k[live], v[live], a[live], b[live], A_log, dt_bias, scale, l2norm)
        codec = self.codecs[layer]
        state = codec.unpack(pages[index]) * gate.unsqueeze(-1)
        u = beta.unsqueeze(-1) * (v - (k.unsqueeze(-2) @ state).squeeze(-2))
        state = state + k.unsqueeze(-1) * u.unsqueeze(-2)
        pages[index] = codec.pack(state)
        out[live] = (q.unsqueeze(-2) @ state).squeeze(-2).to(out.dtype)
        return out

    def read(
        self, layer: int, pages: Tensor, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor,
        A_log: Tensor, dt_bias: Tensor, scale: float, out: Tensor, buffers: WindowBuffers, rows: Tensor,
        phases: Tensor, pending: Tensor, l2norm: bool = True,
    ) -> Tensor:  # fmt: skip
        """Outputs of a step; pages are not written; see `PackedKernels.read`."""
        live, index = self._live(slots)
        out.zero_()
        if not len(live):
            return out
        raw_k = k[live].float()
        q, k, v, gate, beta = self._token(q[live], k[live], v[live], a[live], b[live], A_log, dt_bias, scale, l2norm)
        row, count = rows[live].long(), pending[live].long()
        keys, us, gamma = self._pending(buffers, row, count)
        decay, keys = gamma * gate, keys * gate.unsqueeze(-2)
        reads = torch.stack([k, q], -2)
        base = self.codecs[layer].unpack(pages[index])
        total = (reads * decay.unsqueeze(-2)) @ base + (reads @ keys.transpose(-1, -2)) @ us
        u = beta.unsqueeze(-1) * (v - total[..., 0, :])
        out[live] = (total[..., 1, :] + (q * k).sum(-1, keepdim=True) * u).to(out.dtype)
        if self.spec.family == "gdn":
            k = _normalised(raw_k) if l2norm else raw_k  # value heads of a group share the raw key
        self._decay(buffers, row, count, gate, decay)
        full = phases[live] == self.spec.window - 1
        last = last_dtype(self.spec.buffer)
        buffers.k_now[live[full]] = store(k[full], last).to(buffers.k_now.dtype)
        buffers.u_now[live[full]] = store(u[full], last).to(buffers.u_now.dtype)
        row, count = row[~full], count[~full]
        if self.spec.family == "gdn":
            buffers.ratios[row, :, (count + 1) % 2, count] = 1
        _store(buffers.keys, buffers.key_scale, row, count, k[~full])
        _store(buffers.us, buffers.u_scale, row, count, u[~full])
        return out

    def fold(
        self, layer: int, pages: Tensor, slots: Tensor, buffers: WindowBuffers, rows: Tensor, phases: Tensor,
        pending: Tensor, folds: Tensor,
    ) -> None:  # fmt: skip
        """Windows that the tokens just read complete go into the pages; see `PackedKernels.fold`."""
        places = folds[1 : 1 + int(folds[0])].long()
        places = places[slots[places] >= 0]
        if len(places):
            row = rows[places].long()
            keys, us, gamma = self._pending(buffers, row, pending[places].long(), now=True)
            k, u = buffers.k_now[places].float(), buffers.u_now[places].float()
            k = k.repeat_interleave(self.spec.num_heads // k.shape[1], 1)
            codec, index = self.codecs[layer], slots[places].long()
            state = codec.unpack(pages[index]) * gamma.unsqueeze(-1) + keys.transpose(-1, -2) @ us
            pages[index] = codec.pack(state + k.unsqueeze(-1) * u.unsqueeze(-2))

    def flush(
        self, layer: int, pages: Tensor, slots: Tensor, buffers: WindowBuffers, rows: Tensor, phases: Tensor,
        pending: Tensor,
    ) -> None:  # fmt: skip
        """Fold what is pending into the pages; see `PackedKernels.flush`."""
        live, index = self._live(torch.where(pending.to(slots.device) > 0, slots, -1))
        if not len(live):
            return
        keys, us, gamma = self._pending(buffers, rows[live].long(), pending[live].long())
        codec = self.codecs[layer]
        state = codec.unpack(pages[index]) * gamma.unsqueeze(-1) + keys.transpose(-1, -2) @ us
        pages[index] = codec.pack(state)

    def pack(self, layer: int, pages: Tensor, slots: Tensor, state: Tensor, v_first: bool = False) -> None:
        """Quantise dense states into pages; see `PackedKernels.pack`."""
        live, index = self._live(slots)
        state = state[live].transpose(-1, -2) if v_first else state[live]
        if len(live):
            pages[index] = self.codecs[layer].pack(state.float().contiguous())

    def unpack(self, layer: int, pages: Tensor, slots: Tensor, state: Tensor, v_first: bool = False) -> Tensor:
        """Write pages out as dense FP32 states; see `PackedKernels.unpack`."""
        live, index = self._live(slots)
        if len(live):
            dense = self.codecs[layer].unpack(pages[index])
            state[live] = dense.transpose(-1, -2) if v_first else dense
        return state

    def _live(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Places of a batch that are no padding, and their slots."""
        live = (slots >= 0).nonzero().flatten()
        return live, slots[live].long()

    def _token(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float,
        l2norm: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """q, k `[B, H, K]`, v `[B, H, V]`, the gate `[B, H, 1 or K]` and beta `[B, H]` as the recurrence takes them."""
        spec = self.spec
        q, k, v = q.float(), k.float(), v.float()
        if l2norm:
            q, k = _normalised(q), _normalised(k)
        repeat = spec.num_heads // spec.num_key_heads
        q, k = (q * scale).repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
        a = a.float() + dt_bias.float().flatten()
        gate = a.unflatten(-1, (spec.num_heads, -1))  # [B, H, 1] or [B, H, K]
        gate = torch.exp(-A_log.float().flatten().exp().unsqueeze(-1) * F.softplus(gate))
        return q, k, v, gate, torch.sigmoid(b.float())

    def _pending(
        self, buffers: WindowBuffers, row: Tensor, count: Tensor, now: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys `[B, H, W-1, K]` with all later gates in them, us `[B, H, W-1, V]`, Gamma `[B, H, 1 or K]`; entries
        past `count` are zero. `now`: the gate of a token that is no entry is in them, pending ones or not."""
        spec = self.spec
        there = torch.arange(spec.window - 1, device=row.device) < count.unsqueeze(-1)  # [B, W-1]
        mask = there[:, None, :, None]
        keys = torch.where(mask, _load(buffers.keys, buffers.key_scale, row), 0)
        us = torch.where(mask, _load(buffers.us, buffers.u_scale, row), 0)
        gamma = buffers.gammas[row]
        if spec.family == "gdn":
            turn = (count + now) % 2
            ratios = torch.where(there[:, None], buffers.ratios[row, :, turn], 0)
            keys = keys.repeat_interleave(spec.num_heads // spec.num_key_heads, 1) * ratios.unsqueeze(-1)
            gamma = buffers.gammas[row, :, turn].unsqueeze(-1)
        return keys, us, torch.where((count + now > 0)[:, None, None], gamma, 1)

    def _decay(self, buffers: WindowBuffers, row: Tensor, count: Tensor, gate: Tensor, decay: Tensor) -> None:
        """Fold the gate of a token into everything pending; `decay` is the product of all of them."""
        before = torch.arange(self.spec.window - 1, device=row.device) < count.unsqueeze(-1)
        if self.spec.family == "gdn":
            old, new = count % 2, (count + 1) % 2
            ratios = torch.where(before[:, None], buffers.ratios[row, :, old] * gate, buffers.ratios[row, :, new])
            buffers.ratios[row, :, new], buffers.gammas[row, :, new] = ratios, decay.squeeze(-1)
            return
        for i in range(int(count.max())):
            some = before[:, i]
            old = _load(buffers.keys, buffers.key_scale, row[some])[:, :, i]
            _store(buffers.keys, buffers.key_scale, row[some], torch.full_like(row[some], i), old * gate[some])
        buffers.gammas[row] = decay


def _normalised(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt()


def _load(values: Tensor, scales: Tensor, row: Tensor) -> Tensor:
    """Vectors `[B, heads, W-1, N]` of a buffer."""
    x = values[row].float()
    return x * scales[row].float().unsqueeze(-1) if values.dtype == torch.int8 else x


def _store(values: Tensor, scales: Tensor, row: Tensor, entry: Tensor, x: Tensor) -> None:
    """Write vectors `[B, heads, N]` as entry `entry[b]` of row `row[b]`."""
    if values.dtype == torch.int8:
        scale = to_scale(x.abs().amax(-1, keepdim=True) / 127)
        scales[row, :, entry] = scale.squeeze(-1).half()
        values[row, :, entry] = (x / scale).round().clamp(-127, 127).to(torch.int8)
    else:
        values[row, :, entry] = to_fp16(x) if values.dtype == torch.float16 else x.to(values.dtype)
