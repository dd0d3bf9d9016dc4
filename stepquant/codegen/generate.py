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
from stepquant.codegen.spec import KernelSpec

GENERATOR_VERSION = "1"
TITLES = {
    "step": "Decode step: unpack, update, read, fit and pack, one pass over the state.",
    "pack": "Prefill boundary: dense FP32 states to pages.",
    "unpack": "Prefill boundary: pages to dense FP32 states.",
}
PLANES = "NIBBLES, EIGHT, SIX, TWO"


def generate(spec: KernelSpec, plan_hash: str) -> dict[str, str]:
    """Source of every variant of a plan by name.

    Args:
        spec: what the kernels are specialised to.
        plan_hash: identity of the plan, for the header.
    """
    kernels = {"step": _step(spec), "pack": _dense(spec, "pack"), "unpack": _dense(spec, "unpack")}
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
    lines = "\n".join(f"{key} = tl.constexpr({value})" for key, value in constants.items())
    return Template(t.HEADER).substitute(
        title=title, version=GENERATOR_VERSION, plan=plan_hash[:16], summary=summary, constants=lines
    )


def _token(spec: KernelSpec) -> str:
    kda = spec.family == "kda"
    gate = "i_h * K + row, row_in" if kda else "i_h, True"
    decay = f"decay_of(a + i_n * stride_a, dt_bias, a_log, {gate})"
    if not kda:
        decay = f"{decay} + tl.zeros([KP], tl.float32)"
    return Template(t.LOAD_TOKEN).substitute(
        row="tl.load(order + i_h * K + slot, mask=row_in, other=0)" if spec.permuted else "slot",
        decay=decay,
        round_beta="" if kda else ".to(b.dtype.element_ty).to(tl.float32)",
    )


def _dispatch(spec: KernelSpec, call: str, pivots: str) -> str:
    """Call the body of each kind of head that the plan has."""
    plain = call.format(G="1", C="JP", FOUR=False)
    four = call.format(G="JP // GROUP", C="GROUP", FOUR=True)
    kinds = []
    if any(b != 2 or not spec.four for b in spec.precisions):
        kinds.append(("0", plain))
    if spec.four:
        kinds.append(("1", four))
    if spec.pivots == "heads":
        kinds.append(("2", pivots))
    if len(kinds) == 1:
        return f"    {kinds[0][1]}\n"
    lines = ["    i_kind = tl.load(p_table + T_KIND)\n"]
    lines += [f"    if i_kind == {kind}:\n        {body}\n" for kind, body in kinds]
    return "".join(lines)


def _step(spec: KernelSpec) -> str:
    rows = spec.pivots == "rows"
    body = Template(t.STEP).substitute(
        planes=PLANES,
        read_pivots=t.READ_PIVOTS if rows else "",
        mask_pivots=t.MASK_PIVOTS if rows else "",
        update_pivots=t.UPDATE_PIVOTS if rows else "",
    )
    vectors = "x_q, x_k, x_v, decay, beta"
    call = (
        f"step_codes(p_page, p_table, p_w, p_bits, {vectors}, slot, row_in, col, col_in, p_out, "
        "{G}, {C}, {FOUR})"
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
        "{G}, {C}, {FOUR})"
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
