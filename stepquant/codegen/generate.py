"""LayoutPlan -> readable Triton source, one file a variant, deterministic to the byte.

The text of a variant depends on the `KernelSpec` and the plan's hash alone. Loading an artifact never executes what
lies in it: the runtime generates the text again and compares hashes (`load_source` runs what was generated here).
"""

from __future__ import annotations

import hashlib
import linecache
import types
from string import Template

from stepquant.codegen import templates as t
from stepquant.codegen import templates_window as tw
from stepquant.codegen.spec import KernelSpec

GENERATOR_VERSION = "1"
TITLES = {
    "step": "Decode step: unpack, update, read, fit and pack, one pass over the state.",
    "pack": "Prefill boundary: dense FP32 states to pages.",
    "unpack": "Prefill boundary: pages to dense FP32 states.",
    "read": "Decode step of a write window: one pass over the packed state, nothing written back.",
    "fold": "Writeback of a full window: the state, fitted and packed once in W steps.",
    "flush": "Writeback of a window that is not full.",
}
PLANES = "NIBBLES, EIGHT, SIX, TWO"


def generate(spec: KernelSpec, plan_hash: str) -> dict[str, str]:
    """Source of every variant of a plan by name.

    Args:
        spec: what the kernels are specialised to.
        plan_hash: identity of the plan, for the header.
    """
    kernels = {"pack": _dense(spec, "pack"), "unpack": _dense(spec, "unpack")}
    if spec.window == 1:
        kernels["step"] = _step(spec)
    else:
        kernels.update(read=_read(spec), fold=_fold(spec, "fold"), flush=_fold(spec, "flush"))
    return {name: _header(spec, name, plan_hash) + body for name, body in kernels.items()}


def source_hash(sources: dict[str, str]) -> str:
    """SHA-256 over all variants."""
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(f"{name}\0{sources[name]}\0".encode())
    return digest.hexdigest()


def load_source(name: str, source: str) -> types.ModuleType:
    """Execute generated source as a module; Triton and tracebacks find its text through `linecache`."""
    path = f"<stepquant {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    module = types.ModuleType(f"stepquant_generated_{name}")
    module.__file__ = path
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def _header(spec: KernelSpec, name: str, plan_hash: str) -> str:
    title = TITLES[name]
    kind = "Gated DeltaNet" if spec.family == "gdn" else "Kimi Delta Attention"
    precisions = ", ".join(map(str, spec.precisions))
    summary = f"{kind}, {spec.num_heads} heads of {spec.key_dim} x {spec.value_dim}; precisions {precisions}."
    constants = {**spec.constants, "UNIFORM": spec.uniform}
    if spec.window > 1:
        constants |= {"SHARED_KEYS": spec.family == "gdn", "INT8": spec.buffer == "int8", "MATRIX": _matrix(spec)}
        constants["PERMUTED"] = spec.permuted
    lines = "\n".join(f"{key} = tl.constexpr({value})" for key, value in constants.items())
    return Template(t.HEADER).substitute(
        title=title, version=GENERATOR_VERSION, plan=plan_hash[:16], summary=summary, constants=lines
    )


def _token(spec: KernelSpec) -> str:
    kda = spec.family == "kda"
    place = "i_h * K + row, row_in" if kda else "i_h, True"
    decay = f"decay_of(a + i_n * stride_a, dt_bias, a_log, {place})"
    return Template(t.LOAD_TOKEN).substitute(
        row="tl.load(order + i_h * K + slot, mask=row_in, other=0)" if spec.permuted else "slot",
        gate=f"    decay = {decay}\n" if kda else f"    gate = {decay}\n    decay = gate + tl.zeros([KP], tl.float32)\n",
        round_beta="" if kda else ".to(b.dtype.element_ty).to(tl.float32)",
    )


def _dispatch(spec: KernelSpec, call: str, pivots: str) -> str:
    """Call the body of each kind of head that the plan has, specialised to its precision where heads have one."""
    if not spec.uniform:
        planes = ", ".join(f"{n}={n}" for n in ("NIBBLES", "EIGHT", "SIX", "TWO"))
        return f"    {call.format(kind=f'G=1, FOUR=False, BITS=0, ARCH=ARCH, {planes}')}\n"
    lines = ["    i_bits = tl.load(p_table + T_BITS)\n"]
    for bits in spec.precisions:
        four = bits == 2
        kind = f"G={'JP // GROUP' if four else 1}, FOUR={four}, BITS={bits}, ARCH=ARCH, "
        kind += f"NIBBLES={not four}, EIGHT={bits == 8}, SIX={bits == 6}, TWO={four}"
        lines.append(f"    if i_bits == {bits}:\n        {call.format(kind=kind)}\n")
    if spec.pivots == "heads" and pivots:
        lines.append(f"    if i_bits == 16:\n        {pivots}\n")
    return "".join(lines)


def _step(spec: KernelSpec) -> str:
    rows = spec.pivots == "rows"
    body = Template(t.STEP).substitute(
        planes=PLANES,
        read_pivots=t.READ_PIVOTS if rows else "",
        mask_pivots=t.MASK_PIVOTS if rows else "",
        update_pivots=t.UPDATE_PIVOTS if rows else "",
    )
    vectors = "x_q, x_k, qk, x_v, decay, beta"
    call = (
        f"step_codes(p_page, p_table, p_w, p_bits, {vectors}, slot, row_in, col, col_in, p_out, "
        "{kind})"
    )
    pivots = f"step_pivots(p_page, p_table, {vectors}, col, col_in, p_out)"
    kernel = Template(t.STEP_KERNEL).substitute(token=_token(spec), dispatch=_dispatch(spec, call, pivots))
    return body + (t.STEP_PIVOTS if spec.pivots == "heads" else "") + kernel


def _dense(spec: KernelSpec, name: str) -> str:
    """The codec of the prefill boundary, `pack` or `unpack`."""
    rows = spec.pivots == "rows"
    row = "tl.load(p_order + o_slot, mask=o_slot < K, other=0)" if spec.permuted else "o_slot"
    coded = "K - tl.load(p_table + T_PIVOTS)" if rows and name == "unpack" else "K"
    head, constants = Template(t.DENSE_HEAD).substitute(), "p_w, p_bits" if name == "pack" else "p_bits"
    call = (
        f"{name}_codes(p_page, p_table, {constants}, p_state, p_order, stride_row, stride_col, col, col_in, "
        "{kind})"
    )
    pivots = Template(t.DENSE_PIVOTS).substitute(name=name, permuted=spec.permuted) if spec.pivots != "none" else ""
    return Template(t.PACK if name == "pack" else t.UNPACK).substitute(
        tile=Template(t.DENSE_TILE).substitute(row=row, coded=coded),
        head=head,
        planes=PLANES,
        mask_pivots="    n_pivots = tl.load(p_table + T_PIVOTS)\n" + t.MASK_PIVOTS if rows else "",
        dispatch=_dispatch(spec, call, "pass"),
        pivots=pivots,
    )


def _matrix(spec: KernelSpec) -> bool:
    """Whether the matrix units take the tile: their int8 instruction is 32 deep and 16 wide."""
    return spec.constants["KP"] >= 64 and spec.constants["JP"] >= 16


def _buffers(spec: KernelSpec) -> str:
    kda = spec.family == "kda"
    return Template(tw.BUFFERS).substitute(
        key_heads="H" if kda else "HK",
        key_head="i_h" if kda else "i_h // (H // HK)",
        gamma_width=" * K" if kda else "",
        key_index="tl.arange(0, KP)" if kda else "row",
        gamma_index=" + o_key" if kda else "",
        gamma_mask="row_in & (o_key < n_pending * KP)" if kda else "n_pending > 0",
    )


def _read(spec: KernelSpec) -> str:
    kda = spec.family == "kda"
    call = (
        "h_k, h_q = read_codes(p_page, p_table, p_bits, x_q, x_k, base, slot, col, col_in, {kind})"
    )
    buffers, read_pivots = _buffers(spec), ""
    if spec.pivots != "none":
        read_pivots = t.READ_PIVOTS.replace("decay", "base")
    return Template(tw.READ).substitute(
        planes=PLANES,
        token=_token(spec),
        buffers=buffers,
        dispatch=_dispatch(spec, call, ""),
        read_pivots=read_pivots,
        append=tw.APPEND_KDA if kda else tw.APPEND_GDN,
    )


def _fold(spec: KernelSpec, name: str) -> str:
    rows = spec.pivots == "rows"
    window = "o_key, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending"
    call = (
        "fold_codes(p_page, p_table, p_w, p_bits, x_k, u, decay, gamma, slot, row_in, col, col_in, "
        f"{window}, order + i_h * K, {{kind}})"
    )
    pivots = f"fold_pivot_head(p_page, p_table, x_k, u, decay, gamma, row_in, col, col_in, {window}, "
    dispatch = _dispatch(spec, call, pivots + "K)")
    if rows:
        dispatch += f"    {pivots}tl.load(p_table + T_PIVOTS))\n"
    fold = tw.FOLD.split("\n\n\n@triton.jit\ndef fold(")
    body = Template(fold[0]).substitute(
        planes=PLANES,
        tile_decay="spread_rows(decay, M, 1, False)" if spec.family == "kda" else "tl.max(decay, 0)",
        mask_pivots="    n_pivots = tl.load(p_table + T_PIVOTS)\n" + t.MASK_PIVOTS if rows else "",
    )
    kernel = "\n@triton.jit\ndef fold(" + fold[1] if name == "fold" else tw.FLUSH
    kernel = Template(kernel).substitute(
        token=_token(spec),
        buffers=_buffers(spec),
        row="tl.load(order + i_h * K + slot, mask=row_in, other=0)" if spec.permuted else "slot",
        dispatch=dispatch,
    )
    return body + "\n\n" + (tw.FOLD_PIVOTS if spec.pivots != "none" else "") + kernel
