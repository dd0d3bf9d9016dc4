"""Text of the kernels of write windows (W > 1): the read of every token and the fold of every W-th."""

from __future__ import annotations

LOAD_WINDOW = """    i_buffer = tl.load(buffers + i_n).to(tl.int64)
    n_pending = tl.load(pending + i_n)
"""

BUFFERS = """    p_us = us + (i_buffer * H + i_h) * ((W - 1) * V)
    p_u_scale = u_scale + (i_buffer * H + i_h) * (W - 1)
    p_keys = keys + (i_buffer * $key_heads + $key_head) * ((W - 1) * K)
    p_key_scale = key_scale + (i_buffer * $key_heads + $key_head) * (W - 1)
$gates"""

GATES_KDA = """    p_ratio, p_gamma = ratios, gammas + (i_buffer * H + i_h) * K
"""

# Ratios and gate take turns between two places: what a token replaces, other programs of its head may still read.
GATES_GDN = """    p_ratio = ratios + ((i_buffer * H + i_h) * 2 + ($turn) % 2) * (W - 1)
    p_gamma = gammas + (i_buffer * H + i_h) * 2 + ($turn) % 2
"""

LOAD_GAMMA = """    gamma = tl.load(p_gamma$gamma_index, mask=$gamma_mask, other=1.0)
"""

PREFETCH_HEAD = """    prefetch_head(p_page, p_table$part)
"""

PREFETCH_WINDOW = """    prefetch_bytes(p_us, n_pending * (V * p_us.dtype.element_ty.primitive_bitwidth // 8), 32)
    prefetch_bytes(p_keys, n_pending * (K * p_keys.dtype.element_ty.primitive_bitwidth // 8), 32)
"""

READ_CODES = '''
@triton.jit
def read_codes(
    p_page, p_table, x_k, x_q, slot, col, col_in, i_part, PARTS: tl.constexpr,
    FOUR: tl.constexpr, BITS: tl.constexpr, ARCH: tl.constexpr,
    NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):
    """k^T S and q^T S of a head of integer rows, for k and q with all that depends on the row in them."""
$open    G: tl.constexpr = JP // GROUP if FOUR and PARTS == 1 else 1  # a part is a block, of one group
    bytes_of = open_planes(p_page, p_table, 4)
    words = load_block(bytes_of, i_part, J, M, E, 4, FULL, FOUR, $planes)
    factors = read_factors(p_r, slot, i_part // BLOCKS, K, GROUPS, FOUR)
    c = tl.load(p_c + col, mask=col_in, other=0).to(tl.float32)
    issue_loads()
    return multiply_head(
        bytes_of, words, factors, p_r, c, x_k, x_q, slot, K, J, M, JP // PARTS, E, G, GROUPS, UNIT, FULL, True, FOUR,
        $planes
    )

'''

READ = '''
@triton.jit
def read(
    pages, stride_page, table, row_w, row_limits, order, slots, stride_slot,
    q, stride_q, k, stride_k, v, stride_v, a, stride_a, b, stride_b, A_log, dt_bias, scale, out, stride_out,
    buffers, phases, pending, keys, key_scale, us, u_scale, ratios, gammas, k_now, u_now, arrivals,
    L2NORM: tl.constexpr, FEW: tl.constexpr, PARTS: tl.constexpr, ARCH: tl.constexpr,
):
    """One decode step without writeback: program (n, h, part) reads head h of request n and appends its token.

    FEW: ask for a head's bytes first (`kernel_plan.few_programs`). PARTS: programs that have a block of its columns
    each (`kernel_plan.read_parts`), or 1; the last one writes what they have in common, and of KDA replaces keys once
    the others have read them (`await_parts`).

    `phases[n]` is the request's length mod W and `pending[n]` its entries, both before this token; a token at phase
    W - 1 is not appended but left to `fold` in `k_now` and `u_now`; its gate is folded into everything pending.
    """
    i_h, i_n = tl.program_id(1), tl.program_id(0).to(tl.int64)
    i_part = 0
    if PARTS > 1:
        i_part = tl.program_id(2)
$places$window    issue_loads()
    if i_slot < 0:
        tl.store(out + i_n * stride_out + i_h * V + col, tl.zeros([VP // PARTS], out.dtype.element_ty), mask=col_in)
        return
    p_page = pages + i_slot * stride_page
$buffers    issue_loads()  # what was prefetched is on its way before anything is waited for
$body$read_pivots    h_k, h_q = read_pending(
        h_k, h_q, x_k, x_q, decay, entries, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending, o_key,
        row_in, col, col_in, K, V, SHARED_KEYS, INT8, PARTS == 1,
    )
$arrive    u = beta * (raw_v.to(tl.float32) - h_k)
    tl.store(out + i_n * stride_out + i_h * V + col, (h_q + qk * u).to(out.dtype.element_ty), mask=col_in)
    if i_phase == W - 1:
        tl.store(u_now + (i_n * H + i_h) * V + col, saturate(u, u_now), mask=col_in)
    else:
        store_entry(p_us, p_u_scale, u, n_pending, n_pending + 1, col, col_in, V, INT8)
    if PARTS > 1:
        if i_part < PARTS - 1:
            return
$append
'''

NO_CODES = "    h_k, h_q = tl.zeros([VP // PARTS], tl.float32), tl.zeros([VP // PARTS], tl.float32)\n"

READ_PIVOT_HEAD = """p_pivots = (p_page + table_offset(p_table, T_PIVOT)).to(tl.pointer_type(tl.float16))
        h_k, h_q = multiply_pivots(p_pivots, $x, col, col_in, K, V, VP, PARTS)"""

LATE = """    i_phase = tl.load(phases + i_n)
    o_key = $key_index
    entries = load_entries(p_keys, p_us, 0, n_pending, o_key, row_in, col, col_in, K, V)
    issue_loads()
"""

# q and k are asked for again: meanwhile their registers hold words.
BODY_GDN = """\
$keys$dispatch$gates$values$gamma$late$keys\
    x_q, x_k, qk, norm_q, norm_k = token_vectors(raw_q, raw_k, scale, L2NORM)
    decay, beta = token_gate(raw_a, raw_dt, a_log), write_strength(raw_b)
    base = gamma * decay
    h_k, h_q = h_k * (norm_k * base), h_q * (norm_q * base)
"""

BODY_KDA = """$keys$gates$gamma    x_q, x_k, qk, norm_q, norm_k = token_vectors(raw_q, raw_k, scale, L2NORM)
    decay = token_gate(raw_a, raw_dt, a_log)
    base = gamma * decay
$dispatch$values$late    beta = write_strength(raw_b)
"""

APPEND_GDN = """    if i_h % (H // HK) == 0:
        if i_phase == W - 1:
            tl.store(k_now + (i_n * HK + i_h // (H // HK)) * K + o_key, saturate(x_k, k_now), mask=row_in)
        else:
            store_entry(p_keys, p_key_scale, x_k, n_pending, n_pending + 1, o_key, row_in, K, INT8)
    o_w, o_next = tl.arange(0, W), 1 - 2 * (n_pending % 2)  # from this token's place to the next one's
    ratio = tl.load(p_ratio + o_w, mask=o_w < n_pending, other=0.0) * decay
    ratio = tl.where(o_w < n_pending, ratio, 1.0)
    tl.store(p_ratio + o_next * (W - 1) + o_w, ratio, mask=(o_w <= n_pending) & (o_w < W - 1))
    tl.store(p_gamma + o_next, base)
"""

ARRIVE_KDA = """    if PARTS > 1:
        if i_part < PARTS - 1:
            arrive(arrivals + i_n * H + i_h)
"""

APPEND_KDA = """    if PARTS > 1:
        await_parts(arrivals + i_n * H + i_h, PARTS - 1)
        gate_entries(p_keys, decay, n_pending, o_key, row_in, K)
    if i_phase == W - 1:
        tl.store(k_now + (i_n * H + i_h) * K + o_key, saturate(x_k, k_now), mask=row_in)
    else:
        store_entry(p_keys, p_key_scale, x_k, n_pending, n_pending + 1, o_key, row_in, K, INT8)
    tl.store(p_gamma + o_key, base, mask=row_in)
"""

FOLD = '''
@triton.jit
def fold_codes(
    p_page, p_table, p_w, p_limits, gamma, slot, p_us, p_u_now, n_pending, keys,
    WITHIN: tl.constexpr, NOW: tl.constexpr, FOUR: tl.constexpr, BITS: tl.constexpr, ARCH: tl.constexpr,
    NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):
    """Everything pending into a head of integer rows, then fit, quantise and pack.

    Sums of |X| over the first blocks for the row factors, then block by block.
    """
$open$constants$first    keys_now = key_operands(keys, WITHIN, EN, SHARED_KEYS, INT8)
    for g in tl.range(0, GROUPS, num_stages=1):
$factors$sums$fit
'''

WINDOW_LOAD = "${name}_us = value_operands(p_us, p_u_now, n_pending, $b, V, J, E, EN, NOW)\n"
WINDOW_TILE = "x = add_window(x, ${name}_us, keys_now, M, E, WIDE)\n"

FOLD_PIVOT_ROWS = '''
@triton.jit
def fold_pivot_rows(
    p_page, p_table, p_gamma, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, p_k_now, p_u_now, n_pending, p_order,
    NOW: tl.constexpr,
):
    """Everything pending into the FP16 rows of a head of integer rows."""
    col, col_in = tile_columns(J, JP)
    p_pivots = (p_page + table_offset(p_table, T_PIVOT)).to(tl.pointer_type(tl.float16))
    fold_pivots(
        p_pivots, tl.load(p_table + T_PIVOTS), p_gamma, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, p_k_now,
        p_u_now, n_pending, p_order, col, col_in, K, V, EN, NOW, SHARED_KEYS, PERMUTED, INT8, WIDE,
    )

'''

FOLD_PIVOT_HEAD = '''
@triton.jit
def fold_pivot_head(
    p_page, p_table, base, p_us, p_u_now, n_pending, keys, WITHIN: tl.constexpr, NOW: tl.constexpr
):
    """Everything pending into a head that is kept in FP16."""
    keys_now = key_operands(keys, WITHIN, EN, SHARED_KEYS, INT8)
    p_pivots = (p_page + table_offset(p_table, T_PIVOT)).to(tl.pointer_type(tl.float16))
    for b in tl.range(0, J // (8 * E), num_stages=1):
        p, inside = pivot_place(p_pivots, b, K, V, J, M, E)
        x = tl.load(p, mask=inside, other=0).to(tl.float32) * base
        x = add_window(x, value_operands(p_us, p_u_now, n_pending, b, V, J, E, EN, NOW), keys_now, M, E, WIDE)
        tl.store(p, saturate_half(x), mask=inside)

'''

FOLD_KERNEL = '''
@triton.jit
def fold(
    pages, stride_page, table, row_w, row_limits, order, slots, stride_slot,
    buffers, phases, pending, keys, key_scale, us, u_scale, ratios, gammas, k_now, u_now, folds, ARCH: tl.constexpr,
):
    """Writeback: program (i, h) folds head h of every so many-th request whose window the token just read completes.

    `folds` has how many those are and their places in the batch (`stepquant.codegen.folds`).
    """
    i_h, n_folds = tl.program_id(1), tl.load(folds)
    p_table = table + i_h * 16
    i_bits = tl.load(p_table + T_BITS)
    slot = tl.arange(0, KP)
    row_in = slot < K
    for i in tl.range(tl.program_id(0), n_folds, tl.num_programs(0), num_stages=1):
        i_n = tl.load(folds + 1 + i).to(tl.int64)
        i_slot = tl.load(slots + i_n * stride_slot).to(tl.int64)
$window        issue_loads()
        if i_slot >= 0:
            p_page = pages + i_slot * stride_page
            p_u_now = u_now + (i_n * H + i_h) * V
            p_k_now = k_now + (i_n * $key_heads + $key_head) * K
$buffers$dispatch'''

FLUSH_KERNEL = '''
@triton.jit
def flush(
    pages, stride_page, table, row_w, row_limits, order, slots, stride_slot,
    buffers, phases, pending, keys, key_scale, us, u_scale, ratios, gammas, ARCH: tl.constexpr,
):
    """Fold a window that is not full, before a slot is copied, forked or sent away; nothing pending changes nothing."""
    i_h, i_n = tl.program_id(1), tl.program_id(0).to(tl.int64)
    p_table = table + i_h * 16
    i_slot = tl.load(slots + i_n * stride_slot).to(tl.int64)
    i_bits = tl.load(p_table + T_BITS)
$window    if i_slot < 0:
        return
    if n_pending == 0:
        return
    p_page = pages + i_slot * stride_page
    slot = tl.arange(0, KP)
    row_in = slot < K
$buffers    p_u_now, p_k_now = us, keys  # there is no token: neither is used
$dispatch'''

FOLD_OPERANDS = """    p_w, p_limits = row_w + i_h * K, row_limits + i_h * K
    WITHIN: tl.constexpr = keys.dtype.element_ty == tl.float16
    parts = load_operands(
        p_keys, p_key_scale, p_u_scale, p_ratio, p_k_now, n_pending, order + i_h * K, K, M, EN, $now, SHARED_KEYS,
        PERMUTED, INT8,
    )
"""
