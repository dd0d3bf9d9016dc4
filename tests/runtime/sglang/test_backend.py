"""What the attention backends call: decode and prefill on pages, in parts, with tracked prefixes.

SGLang's chunk kernel is stood in for by the codec's own delta rule on the dense workspace, with SGLang's signature and
layout.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepquant.codec.chunks import delta_rule
from stepquant.errors import BackendError
from stepquant.runtime.sglang import backend, pool
from stepquant.runtime.sglang.backend import PackedKernel
from stepquant.runtime.sglang.pool import PackedStates
from stepquant.runtime.sglang.state import activate
from stepquant.runtime.slots import SlotStore
from tests.runtime.plans import HEADS, LAYERS, K, V, kernels_of, layout_of, token_of
from tests.runtime.sglang.test_hooks import state_of

SLOTS = 8


class Native:
    """SGLang's extend kernel in plain torch: states `[n, H, V, K]` in place, chunk states `[1, C, H, V, K]`."""

    def __init__(self, outputs_only: bool = False) -> None:
        self.outputs_only, self.calls = outputs_only, 0

    def extend(
        self, q: Any, k: Any, v: Any, g: Any, beta: Any, *, ssm_states: Any, cache_indices: Any, query_start_loc: Any,
        **_: Any,
    ) -> Any:  # fmt: skip
        self.calls += 1
        starts, outputs, chunks = query_start_loc.tolist(), [], []
        for i, slot in enumerate(cache_indices.tolist()):
            x = [t[:, starts[i] : starts[i + 1]] for t in (q, k, v, g, beta)]
            state = ssm_states[slot].transpose(-1, -2)[None]
            chunks += [state] * -(-x[0].shape[1] // 64)
            y, state = delta_rule(*x, state)
            ssm_states[slot] = state[0].transpose(-1, -2)
            outputs.append(y)
        out = torch.cat(outputs, 1)
        return out if self.outputs_only else (out, None, torch.cat(chunks).transpose(-1, -2)[None])


def store_of(window: int = 4) -> SlotStore:
    return SlotStore(layout_of("gdn")[0], kernels_of("gdn", window), SLOTS, SLOTS, "cpu")


def states_of(store: SlotStore, layer: int) -> PackedStates:
    return PackedStates(store, layer, torch.Size((SLOTS + 1, HEADS, V, K)))


def tokens(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    g, total = torch.Generator().manual_seed(seed), sum(lengths)
    unit = torch.nn.functional.normalize
    return {
        "q": unit(torch.randn(1, total, HEADS, K, generator=g), dim=-1),
        "k": unit(torch.randn(1, total, HEADS, K, generator=g), dim=-1),
        "v": torch.randn(1, total, HEADS, V, generator=g),
        "g": -torch.rand(1, total, HEADS, generator=g),
        "beta": torch.rand(1, total, HEADS, generator=g),
    }


def begin(store: SlotStore, slots: torch.Tensor, lengths: list[int], prefixes: list[int] | None = None) -> None:
    before = torch.tensor(prefixes or [0] * len(lengths))
    store.begin_extend(slots, torch.arange(1, len(lengths) + 1), before, before + torch.tensor(lengths))


def dense(store: SlotStore, layer: int, slots: torch.Tensor) -> torch.Tensor:
    return store.kernels.unpack(layer, store.page(layer), slots, torch.zeros(len(slots), HEADS, V, K), True)


def test_extend_runs_the_native_kernel_on_unpacked_states_and_packs_them() -> None:
    store, slots, lengths = store_of(), torch.tensor([3, 1], dtype=torch.int32), [5, 70]
    store.pages.fill_(255)
    begin(store, slots, lengths)
    x, where = tokens(lengths), torch.tensor([0, 5, 75], dtype=torch.int32)
    for layer in range(LAYERS):
        y, last, h = PackedKernel(Native()).extend(
            **x, ssm_states=states_of(store, layer), cache_indices=slots, query_start_loc=where
        )
        assert last is None
        assert h.shape == (1, 3, HEADS, V, K)
        for i in range(2):
            expected, state = delta_rule(*(t[:, where[i] : where[i + 1]] for t in x.values()))
            assert torch.allclose(y[:, where[i] : where[i + 1]], expected, atol=1e-5)
            kept = dense(store, layer, slots[i : i + 1])[0].transpose(-1, -2)
            assert (kept - state[0]).norm() < 0.15 * state[0].norm()
    assert store.table[1, [3, 1]].tolist() == [5 % 4, 70 % 4]
    assert store.table[2, [3, 1]].tolist() == [0, 0]
    assert bool((store.pages[[2, 4, 5]] == 255).all())


@pytest.mark.parametrize("outputs_only", [False, True])
def test_a_large_batch_in_parts_is_the_batch(outputs_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [3, 64, 1, 130, 9]
    where = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    slots, x = torch.tensor([5, 2, 7, 1, 4], dtype=torch.int32), tokens(lengths)
    found = []
    for limit in (64, 2):
        monkeypatch.setattr(backend, "WORKSPACE_STATES", limit)
        store, native = store_of(), Native(outputs_only)
        begin(store, slots, lengths)
        for layer in range(LAYERS):
            result = PackedKernel(native).extend(
                **x, ssm_states=states_of(store, layer), cache_indices=slots, query_start_loc=where,
                extend_seq_lens_cpu=lengths, lower_bound=None,
            )  # fmt: skip
        assert native.calls == LAYERS * (1 if limit == 64 else 3)
        found.append((result, store))
    (a, first), (b, second) = found
    for one, other in zip([a] if outputs_only else a, [b] if outputs_only else b, strict=True):
        assert (one is None and other is None) or torch.allclose(one, other, atol=1e-5)
    assert torch.equal(first.table, second.table)
    assert (first.pages != second.pages).float().mean() < 0.001


def test_packed_decode_splits_the_projection_as_decode_gets_it() -> None:
    token = token_of("gdn", 3, torch.Generator().manual_seed(1))
    qkv = torch.cat([token[n].flatten(1) for n in ("q", "k", "v")], -1)
    slots, found = torch.tensor([2, -1, 5], dtype=torch.int32), []
    for packed in (True, False):
        store, kernel = store_of(1), PackedKernel(Native())
        for layer in range(LAYERS):
            gates = {n: token[n] for n in ("a", "b", "A_log", "dt_bias")}
            more = {"ssm_states": states_of(store, layer), "cache_indices": slots, **gates}
            if packed:
                out = kernel.packed_decode(qkv, scale=K**-0.5, num_v_heads=HEADS, head_v_dim=V, **more)
            else:
                q, k, v = (token[n][None] for n in ("q", "k", "v"))
                out = kernel.decode(q, k, v, query_start_loc=torch.arange(4), **more)
            assert out.shape == (1, 3, HEADS, V)
        found.append((out, store.pages))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert bool((found[0][0][0, 1] == 0).all())
    assert bool((found[0][0][0, 2] != 0).any())


class Backend:
    """The attributes of SGLang's attention backend that the hooks read."""

    def __init__(self, store: SlotStore) -> None:
        conv = [torch.arange(LAYERS * (SLOTS + 1) * 8.0).view(LAYERS, SLOTS + 1, 2, 4)]
        owner = SimpleNamespace(stepquant_store=store, mamba_cache=SimpleNamespace(conv=conv))
        self.req_to_token_pool, self.forward_metadata = SimpleNamespace(mamba_pool=owner), SimpleNamespace()
        self.conv = conv[0]


def batch_of(**more: Any) -> Any:
    mode = SimpleNamespace(is_decode_or_idle=lambda: more.pop("decoding", False))
    return SimpleNamespace(forward_mode=mode, **more)


def test_forward_metadata_hands_a_prefill_its_slots() -> None:
    store = store_of()
    store.pages.fill_(255)
    batch = batch_of(
        extend_prefix_lens=torch.tensor([0, 64]), req_pool_indices=torch.tensor([2, 1]),
        seq_lens=torch.tensor([7, 70]),
    )  # fmt: skip
    metadata = SimpleNamespace(mamba_cache_indices=torch.tensor([3, 4], dtype=torch.int32))
    assert backend.forward_metadata(lambda *_: metadata, Backend(store), batch) is metadata
    assert bool((store.pages[3] == 0).all())
    assert bool((store.pages[4] == 255).all())
    assert store.table[0, 3:5].tolist() == [2, 1]


def test_decode_tracks_all_layers_and_convolutions_after_the_last() -> None:
    store = store_of()
    for slot in range(1, SLOTS + 1):
        store.pages[slot] = slot
    owner = Backend(store)
    before = owner.conv.clone()
    batch = batch_of(
        batch_size=2, mamba_track_mask=torch.tensor([True, False]), mamba_track_indices=torch.tensor([7, 8])
    )
    slots = torch.tensor([2, 3], dtype=torch.int32)
    args = (batch, owner.conv[0])
    backend.track_decode(refused, owner, *args, states_of(store, 0), slots)
    assert int(store.pages[7, 0]) == 7
    backend.track_decode(refused, owner, *args, states_of(store, 1), slots, 1)
    assert [int(store.pages[i, 0]) for i in (7, 8)] == [2, 8]
    assert torch.equal(owner.conv[:, 7], before[:, 2])
    assert torch.equal(owner.conv[:, 8], before[:, 8])


def refused(*_: Any, **__: Any) -> None:
    raise AssertionError("SGLang's own tracking ran on packed states")


def test_prefill_tracks_chunk_states_and_final_states() -> None:
    store, slots, lengths = store_of(), torch.tensor([1, 2], dtype=torch.int32), [70, 64]
    begin(store, slots, lengths)
    x, where = tokens(lengths), torch.tensor([0, 70, 134], dtype=torch.int32)
    metadata = SimpleNamespace(
        has_mamba_track_mask=True, track_ssm_h_src=torch.tensor([1]), track_ssm_h_dst=torch.tensor([5]),
        track_ssm_final_src=torch.tensor([2]), track_ssm_final_dst=torch.tensor([6]),
    )  # fmt: skip
    for layer in range(LAYERS):
        states = states_of(store, layer)
        _, _, h = PackedKernel(Native()).extend(**x, ssm_states=states, cache_indices=slots, query_start_loc=where)
        h = torch.randn(h.shape, generator=torch.Generator().manual_seed(layer)).bfloat16()
        backend.track_extend(refused, Backend(store), None, h, states, metadata)
        kept = dense(store, layer, torch.tensor([5]))
        assert (kept[0] - h[0, 1].float()).norm() < 0.15 * h[0, 1].float().norm()
    assert torch.equal(store.pages[6], store.pages[2])
    assert store.table[:, 5].tolist() == [-1, 0, 0]
    assert store.table[:, 6].tolist() == [-1, 0, 0]


@pytest.mark.parametrize("outputs_only", [False, True])
def test_a_prefill_whose_state_is_not_finite_says_so_in_its_outputs(outputs_only: bool) -> None:
    """A state that overflowed in one layer after its last output: zero in the page, NaN in the request's outputs."""

    class Overflows(Native):
        def extend(self, *args: Any, **kwargs: Any) -> Any:
            result = super().extend(*args, **kwargs)
            kwargs["ssm_states"][1, 0, 3, 3] = torch.inf
            return result

    store, slots, lengths = store_of(), torch.tensor([1, 2, 4], dtype=torch.int32), [5, 70, 3]
    begin(store, slots, lengths)
    x, where = tokens(lengths), torch.tensor([0, 5, 75, 78], dtype=torch.int32)
    for layer in range(LAYERS):
        native = (Overflows if layer == 0 else Native)(outputs_only)
        found = PackedKernel(native).extend(
            **x, ssm_states=states_of(store, layer), cache_indices=slots, query_start_loc=where
        )
        out = found if outputs_only else found[0]
        expected = torch.zeros(78, dtype=torch.bool)
        expected[5:75] = layer == LAYERS - 1  # after the last layer, so that every layer before it is looked at
        assert torch.equal(out[0].isnan().all((1, 2)), expected)
        assert torch.equal(out[0].isnan().any(2).any(1), expected)
    assert bool((store.page(0)[2] == 0).all())
    assert not bool((store.page(0)[[1, 4]] == 0).all())
    assert store.nonfinite == 1


def test_anything_but_packed_states_is_refused() -> None:
    kernel, plain = PackedKernel(Native()), torch.zeros(3, HEADS, V, K)
    with pytest.raises(BackendError, match="the state pool is a Tensor, not packed"):
        kernel.extend(
            **tokens([1]), ssm_states=plain, cache_indices=torch.tensor([1]), query_start_loc=torch.tensor([0, 1])
        )
    with pytest.raises(BackendError, match="speculative decoding"):
        kernel.target_verify()
    with pytest.raises(BackendError, match=r"lower_bound=-5\.0"):
        kernel.decode(*[torch.zeros(1)] * 5, A_log=plain, dt_bias=plain, ssm_states=plain, cache_indices=plain,
                      query_start_loc=plain, lower_bound=-5.0)  # fmt: skip


def test_dispatchers_get_packed_kernels() -> None:
    native = Native()

    def original(self: Any, *_: Any) -> None:
        self.decode_kernel = self.extend_kernel = self.verify_kernel = native
        self.supports_packed_decode = False

    dispatcher = SimpleNamespace()
    backend.gdn_dispatcher(original, dispatcher, "triton", "triton")
    assert isinstance(dispatcher.decode_kernel, PackedKernel)
    assert dispatcher.extend_kernel.native is native
    assert dispatcher.supports_packed_decode is True


@pytest.mark.parametrize(
    ("version", "done"), [("0.5.12", True), ("0.5.23", True), ("0.5.23", False)]
)  # 0.5.12 calls its function for requests that end only
def test_a_slot_is_whole_before_the_prefix_cache_takes_it(version: str, done: bool) -> None:
    """Two tokens are pending when the request ends: they are in the page before SGLang's own code runs."""
    activate(state_of(version))
    store, slots = store_of(), torch.tensor([3], dtype=torch.int32)
    begin(store, slots, [4])
    for layer in range(LAYERS):
        store.extend_layer(layer, slots, torch.randn(1, HEADS, V, K, generator=torch.Generator().manual_seed(layer)))
    g = torch.Generator().manual_seed(9)
    for _ in range(2):
        for layer in range(LAYERS):
            store.decode(layer, slots, **token_of("gdn", 1, g), scale=K**-0.5, out=torch.empty(1, HEADS, V))
    assert store.table[:, 3].tolist() == [1, 2, 2]
    before, seen = store.pages[3].clone(), []
    slot = torch.tensor(3)
    req = SimpleNamespace(mamba_pool_idx=slot, kv=SimpleNamespace(mamba_pool_idx=slot), finished=lambda: done)

    def original(_: Any, own: Any, *args: Any, **kwargs: Any) -> str:
        seen.append((own is req, args, kwargs, store.table[:, 3].tolist(), torch.equal(store.pages[3], before)))
        return "cached"

    hook = pool.finished if version == "0.5.12" else pool.checkpoint
    assert hook(original, Backend(store), req, up_to=6) == "cached"
    assert seen == [(True, (), {"up_to": 6}, [-1 if done else 1, 2, 0], False)]
    nothing = SimpleNamespace(mamba_pool_idx=None, kv=SimpleNamespace(mamba_pool_idx=None), finished=lambda: True)
    assert hook(lambda *_, **__: "left", Backend(store), nothing) == "left"
