"""LayoutPlan -> readable Triton source, one file a variant, deterministic to the byte.

The text of a variant depends on the `KernelSpec` and the plan's hash alone. Loading an artifact never executes what
lies in it: the runtime generates the text again and compares hashes (`load_source` runs what was generated here).
"""

from __future__ import annotations

import hashlib
import linecache
import re
import types
from string import Template
from textwrap import indent

from stepquant.codegen import templates as t
from stepquant.codegen import templates_window as tw
from stepquant.codegen.kernel_plan import TITLES
from stepquant.codegen.spec import KernelSpec
from stepquant.errors import ArtifactError

GENERATOR_VERSION = "8"
INDENT = "    "
KEY_HEAD = {"key_heads": "HK", "key_head": "i_h // (H // HK)"}
PLANES = "NIBBLES, EIGHT, SIX, TWO"
# Public names of the building blocks, so that a generated file imports what it uses and nothing else.
BLOCKS = {
    "blocks": ("fit_block", "fit_rows", "issue_loads", "load_constants", "load_factors", "load_packed", "packed_tile",
               "pivot_place", "read_pivots", "saturate_half", "softplus", "store_codes", "update_pivots"),
    "dense": ("line_tile", "pack_pivot_head", "pack_pivots", "pivot_lines", "row_place"),
    "matrix": ("add_triple", "multiply_head", "read_factors"),
    "pivot_heads": ("multiply_pivots",),
    "pending": ("add_window", "arrive", "await_parts", "fold_pivots", "gate_entries", "key_operands", "load_entries",
                "load_operands", "read_pending", "saturate", "store_entry", "value_operands"),
    "planes": ("load_block", "open_planes", "prefetch_bytes", "prefetch_head"),
    "table": ("T_BITS", "T_COLUMN", "T_PIVOT", "T_PIVOTS", "T_ROW", "table_offset"),
    "words": ("exponential", "inverse_root", "opaque"),
    "tile": ("block_vector", "in_sums", "line_columns", "partial_sums", "spread_rows", "tile_columns",
             "tile_from_rows"),
}  # fmt: skip


def generate(spec: KernelSpec, plan_hash: str) -> dict[str, str]:
    """Source of every variant of a plan by name.

    Args:
        spec: what the kernels are specialised to.
        plan_hash: identity of the plan, for the header.
    """
    kernels = {"pack": _pack(spec), "unpack": _unpack(spec)}
    if spec.window == 1:
        kernels["step"] = _token_math(spec) + _step(spec)
    else:
        kernels["read"] = _token_math(spec) + _read(spec)
        kernels["fold"] = _fold(spec, tw.FOLD_KERNEL, True)
        kernels["flush"] = _fold(spec, tw.FLUSH_KERNEL, False)
    return {name: _header(spec, name, body, plan_hash) + body for name, body in kernels.items()}


def source_hash(sources: dict[str, str]) -> str:
    """SHA-256 over all variants."""
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(f"{name}\0{sources[name]}\0".encode())
    return digest.hexdigest()


def check_source(found: str, expected: str | None) -> None:
    """Compare the hash of what is generated now with an artifact's, None where that shows no kernels.

    Raises:
        ArtifactError: if they differ.
    """
    if expected is not None and found != expected:
        raise ArtifactError(
            f"kernels/ was generated as {expected[:16]}, this stepquant generates {found[:16]}; compile the plan again "
            "with this version: reuse=DIR takes the tables of this artifact"
        )


def load_source(name: str, source: str) -> types.ModuleType:
    """Execute generated source as a module; Triton and tracebacks find its text through `linecache`."""
    path = f"<stepquant {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    module = types.ModuleType(f"stepquant_generated_{name}")
    module.__file__ = path
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def _header(spec: KernelSpec, name: str, body: str, plan_hash: str) -> str:
    kind = "Gated DeltaNet" if spec.family == "gdn" else "Kimi Delta Attention"
    precisions = ", ".join(map(str, spec.precisions))
    summary = f"{kind}, {spec.num_heads} heads of {spec.key_dim} x {spec.value_dim}; precisions {precisions}."
    constants: dict[str, object] = dict(spec.constants)
    if spec.window > 1:
        constants |= {
            "SHARED_KEYS": spec.family == "gdn", "INT8": spec.buffer == "int8", "WIDE": spec.buffer == "fp32",
            "PERMUTED": spec.permuted,
        }  # fmt: skip
    words = set(re.findall(r"\w+", body))
    imports = [
        f"from stepquant.codegen.{module} import {', '.join(n for n in names if n in words)}"
        for module, names in BLOCKS.items()
        if words.intersection(names)
    ]
    return Template(t.HEADER).substitute(
        title=TITLES[name],
        version=GENERATOR_VERSION,
        plan=plan_hash[:16],
        summary=summary,
        imports="\n".join(imports),
        constants="\n".join(f"{key} = tl.constexpr({value})" for key, value in constants.items() if key in words),
    )


def _row(spec: KernelSpec) -> str:
    return "tl.load(order + i_h * K + slot, mask=row_in, other=0)" if spec.permuted else "slot"


def _token(spec: KernelSpec, columns: str = "J, JP") -> dict[str, str]:
    """What finds a program's place, and the loads of a token: vectors of rows, gates, values."""
    place = "i_h * K + row, mask=row_in, other=0" if spec.family == "kda" else "i_h"
    return {
        "places": Template(t.LOAD_PLACES).substitute(row=_row(spec), columns=columns),
        "keys": t.LOAD_KEYS,
        "gates": Template(t.LOAD_GATES).substitute(gate_place=place),
        "values": t.LOAD_VALUES,
    }


def _token_math(spec: KernelSpec) -> str:
    kda = spec.family == "kda"
    text = Template(t.TOKEN_MATH).substitute(
        gate_kind="of every row" if kda else "of the head",
        round_beta="" if kda else ".to(raw_b.dtype).to(tl.float32)",
    )
    return text


def _mixed_kind() -> str:
    planes = ", ".join(f"{n}={n}" for n in PLANES.split(", "))
    return f"FOUR=False, BITS=0, ARCH=ARCH, {planes}"


def _dispatch(spec: KernelSpec, call: str, pivots: str) -> str:
    """Call the body of each kind of head that the plan has, specialised to its precision where heads have one.

    `pivots` is called for heads that are kept in FP16, which have no codes; empty where all pivot rows come later.
    """
    if not spec.uniform:
        call = call.format(kind=_mixed_kind())
        if not spec.whole:
            return f"    {call}\n"
        return f"    if i_bits != 16:\n        {call}\n" + (f"    else:\n        {pivots}\n" if pivots else "")
    lines: list[str] = []
    for bits in spec.precisions:
        four = bits == 2
        kind = f"FOUR={four}, BITS={bits}, ARCH=ARCH, "
        kind += f"NIBBLES={not four}, EIGHT={bits == 8}, SIX={bits == 6}, TWO={four}"
        lines.append(f"    {'elif' if lines else 'if'} i_bits == {bits}:\n        {call.format(kind=kind)}\n")
    if spec.pivots == "heads" and pivots:
        lines.append(f"    {'elif' if lines else 'if'} i_bits == 16:\n        {pivots}\n")
    return "".join(lines)


def _fit(spec: KernelSpec, load: str, tile: str, base: str, following: str = "") -> dict[str, str]:
    """The lines of a body that fits: blocks of columns by `load` and `tile`, row factors times `base` in them.

    following: what becomes of a block once row factors are known, where that is not `tile` times their inverse.
    """

    def lines(text: str, level: int, b: str, name: str = "block") -> str:
        return indent(Template(text).safe_substitute(b=b, name=name, planes=PLANES), level * INDENT)

    factors = t.LOAD_FACTORS if base else ""
    first = Template(t.FIRST).substitute(load_factors=factors, load_first=lines(load, 1, "0"))
    sums = Template(t.SUMS).substitute(
        load_b=lines(load, 3, "g * BLOCKS + i", "sampled"),
        tile=lines(tile, 3, "g * BLOCKS + i", "sampled"),
        tile_first=lines(tile, 2, "g * BLOCKS"),
    )
    fit = Template(t.FIT).substitute(
        load_following=lines(load, 3, "following"),
        tile_following=lines(following or tile, 4, "following"),
        scale_rows=t.SCALE_ROWS if following else "",
        scale_block="" if following else t.SCALE_BLOCK,
        mask_pivots=t.MASK_PIVOTS if spec.pivots == "rows" else "",
        next_factors=indent(factors, 2 * INDENT),
        planes=PLANES,
    )
    return {
        "planes": PLANES,
        "open": t.OPEN,
        "constants": t.CONSTANTS,
        "first": first,
        "factors": Template(t.FACTORS).substitute(base=base),
        "sums": sums,
        "fit": fit,
    }


def _step(spec: KernelSpec) -> str:
    rows, kda = spec.pivots == "rows", spec.family == "kda"
    vector = "decay" if kda else "decay + tl.zeros([KP], tl.float32)"
    tile, following = (t.PACKED_TILE + f"x += {x} * block_vector(u, $b, JP, E)\n" for x in ("key", "key_in_units"))
    body = Template(t.STEP).substitute(
        _fit(spec, t.PACKED_LOAD, tile, "decay[None, :]" if kda else "decay", following),
        read_pivots=t.READ_PIVOTS.replace("$decay", vector) if rows else "",
        update_pivots=t.UPDATE_PIVOTS.replace("u, decay", f"u, {vector}") if rows else "",
    )
    token = "raw_q, raw_k, raw_v, raw_a, raw_dt, a_log, raw_b, scale"
    call = f"step_codes(p_page, p_table, p_w, p_limits, {token}, slot, row_in, col, col_in, p_out, L2NORM, {{kind}})"
    pivots = f"step_pivots(p_page, p_table, {token}, col, col_in, p_out, L2NORM)"
    kernel = Template(t.STEP_KERNEL).substitute(_token(spec), dispatch=_dispatch(spec, call, pivots))
    return body + (t.STEP_PIVOTS if spec.pivots == "heads" or spec.whole else "") + kernel


def _pack(spec: KernelSpec) -> str:
    """The way into pages at the prefill boundary."""
    call = "pack_codes(p_page, p_table, p_w, p_limits, p_rows, stride_col, slot, slot_in, {kind})"
    rows = Template(t.PACK_PIVOT_ROWS).substitute(permuted=spec.permuted) if spec.pivots == "rows" else ""
    row = "tl.load(order + i_h * K + slot, mask=slot_in, other=0)" if spec.permuted else "slot"
    return Template(t.PACK).substitute(
        _fit(spec, t.DENSE_LOAD, t.DENSE_TILE, ""),
        head=t.DENSE_HEAD,
        row=row,
        dispatch=_dispatch(spec, call, t.PACK_PIVOT_HEAD if spec.pivots == "heads" else ""),
        pivots=rows,
    )


def _unpack(spec: KernelSpec) -> str:
    """The way out of them."""
    call = "unpack_codes(p_page, p_table, b, p, col, slot, row_in, {kind})"
    slot = "tl.load(order + (H + i_h) * K + row, mask=row_in, other=0)" if spec.permuted else "row"
    return Template(t.UNPACK).substitute(
        planes=PLANES,
        open=t.OPEN,
        head=t.DENSE_HEAD,
        slot=slot,
        dispatch=_dispatch(spec, call, t.UNPACK_PIVOT_HEAD),
        pivots=t.UNPACK_PIVOT_ROWS if spec.pivots == "rows" else "",
    )


def _keys(spec: KernelSpec) -> dict[str, str]:
    """How a program finds its key head's vectors."""
    return {"key_heads": "H", "key_head": "i_h"} if spec.family == "kda" else KEY_HEAD


def _buffers(spec: KernelSpec, now: bool = False) -> str:
    """Where the pending tokens of a request and head are; `now`: with the token just read."""
    gates = tw.GATES_KDA if spec.family == "kda" else tw.GATES_GDN.replace("$turn", f"n_pending + {int(now)}")
    return Template(tw.BUFFERS).substitute(_keys(spec), gates=gates)


def _gamma(spec: KernelSpec, now: bool = False) -> str:
    """Load of the gate of everything pending."""
    kda = spec.family == "kda"
    mask = "row_in & (slot < n_pending * KP)" if kda else "n_pending > 0"
    if now:  # the gate of the token just read is in it, whether anything is pending or not
        mask = "row_in" if kda else "i_slot >= 0"
    return Template(tw.LOAD_GAMMA).substitute(gamma_index=" + slot" if kda else "", gamma_mask=mask)


def _read(spec: KernelSpec) -> str:
    kda = spec.family == "kda"
    read_pivots = ""
    if spec.pivots == "rows":
        vector = "base" if kda else "base + tl.zeros([KP], tl.float32)"
        read_pivots = t.READ_PIVOTS.replace("$decay", vector)
    functions = Template(tw.READ_CODES).substitute(planes=PLANES, open=t.OPEN)
    x = "x_k * base, x_q * base" if kda else "raw_k, raw_q"  # GDN: norms and gates are scalars, and come later
    call = f"h_k, h_q = read_codes(p_page, p_table, {x}, slot, col, col_in, i_part, PARTS, {{kind}})"
    pivots = Template(tw.READ_PIVOT_HEAD).substitute(x=x) if spec.pivots == "heads" else ""
    dispatch = _dispatch(spec, call, pivots)
    if not kda or spec.whole:
        dispatch = tw.NO_CODES + dispatch
    late = Template(tw.LATE).substitute(key_index="slot" if kda else "row")
    token = _token(spec, "J, JP, PARTS, i_part")
    prefetch = Template(tw.PREFETCH_HEAD).substitute(part=", PARTS, i_part")
    body = Template(tw.BODY_KDA if kda else tw.BODY_GDN).substitute(
        token, gamma=_gamma(spec), dispatch=dispatch, late=late
    )
    return functions + Template(tw.READ).substitute(
        places=token["places"],
        window=tw.LOAD_WINDOW,
        buffers=_buffers(spec) + "    if FEW:\n" + indent(prefetch, INDENT) + tw.PREFETCH_WINDOW,
        body=body,
        read_pivots=read_pivots,
        arrive=tw.ARRIVE_KDA if kda else "",
        append=tw.APPEND_KDA if kda else tw.APPEND_GDN,
    )


def _fold(spec: KernelSpec, kernel: str, now: bool) -> str:
    kda = spec.family == "kda"
    call = (
        "fold_codes(p_page, p_table, p_w, p_limits, gamma, slot, p_us, p_u_now, n_pending, parts, WITHIN, "
        f"{now}, {{kind}})"
    )
    base = "spread_rows(gamma[None, :], M, 1)" if kda else "gamma"
    pivots = f"fold_pivot_head(p_page, p_table, {base}, p_us, p_u_now, n_pending, parts, WITHIN, {now})"
    dispatch = tw.FOLD_OPERANDS.replace("$now", str(now)) + _dispatch(
        spec, call, pivots if spec.pivots == "heads" else ""
    )
    functions = Template(tw.FOLD).substitute(
        _fit(spec, t.PACKED_LOAD + tw.WINDOW_LOAD, t.PACKED_TILE + tw.WINDOW_TILE, "gamma[None, :]" if kda else "gamma")
    )
    if spec.pivots == "rows":
        functions += tw.FOLD_PIVOT_ROWS
        dispatch += (
            "    fold_pivot_rows(\n        p_page, p_table, p_gamma, p_keys, p_key_scale, p_us, p_u_scale, p_ratio,\n"
            f"        p_k_now, p_u_now, n_pending, order + i_h * K, {now},\n    )\n"
        )
    elif spec.pivots == "heads":
        functions += tw.FOLD_PIVOT_HEAD
    window = tw.LOAD_WINDOW
    buffers = _buffers(spec, now) + Template(tw.PREFETCH_HEAD).substitute(part="")
    buffers += tw.PREFETCH_WINDOW + _gamma(spec, now)
    if now:
        window, buffers, dispatch = indent(window, INDENT), indent(buffers, 2 * INDENT), indent(dispatch, 2 * INDENT)
    return functions + Template(kernel).substitute(_keys(spec), window=window, buffers=buffers, dispatch=dispatch)
