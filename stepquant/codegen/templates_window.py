"""Text of the kernels of write windows (W > 1): the read of every token and the fold of every W-th."""

from __future__ import annotations

LOAD_WINDOW = """    i_buffer = tl.load(buffers + i_n).to(tl.int64)
    i_phase = tl.load(phases + i_n)
    n_pending = tl.load(pending + i_n)
"""

BUFFERS = """    p_us = us + (i_buffer * H + i_h) * ((W - 1) * V)
    p_u_scale = u_scale + (i_buffer * H + i_h) * (W - 1)
    p_keys = keys + (i_buffer * $key_heads + $key_head) * ((W - 1) * K)
    p_key_scale = key_scale + (i_buffer * $key_heads + $key_head) * (W - 1)
    p_ratio = ratios + (i_buffer * H + i_h) * (W - 1)
    p_gamma = gammas + (i_buffer * H + i_h)$gamma_width
    o_key = $key_index
    gamma = tl.load(p_gamma$gamma_index, mask=$gamma_mask, other=1.0)
"""

READ_CODES = '''
@triton.jit
def read_codes(
    p_page, p_table, x_k, x_q, slot, col, col_in, G: tl.constexpr, FOUR: tl.constexpr, BITS: tl.constexpr,
    ARCH: tl.constexpr, NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):
    """k^T S and q^T S of a head of integer rows, for k and q with all that depends on the row in them."""
    FULL: tl.constexpr = BITS > 0 and K == 8 * M  # every row of the tile is there
    UNIT: tl.constexpr = 1.0 / 32.0 if FOUR else (2.0 ** (BITS - 8) if BITS > 0 else 1.0)
    planes = open_planes(p_page, p_table)
    words = load_block(planes, 0, J, M, E, FULL, FOUR, $planes)
    p_r = (p_page + table_offset(p_table, T_ROW)).to(tl.pointer_type(tl.float16))
    p_c = (p_page + table_offset(p_table, T_COLUMN)).to(tl.pointer_type(tl.float16))
    c = tl.load(p_c + col, mask=col_in, other=0).to(tl.float32)
    return multiply_head(planes, words, p_r, c, x_k, x_q, slot, K, J, M, JP, E, G, UNIT, FULL, FOUR, $planes)

'''

READ = '''
@triton.jit
def read(
    pages, stride_page, table, row_w, row_bits, order, slots, stride_slot,
    q, stride_q, k, stride_k, v, stride_v, a, stride_a, b, stride_b, A_log, dt_bias, scale, out, stride_out,
    buffers, phases, pending, keys, key_scale, us, u_scale, ratios, gammas, u_now,
    L2NORM: tl.constexpr, ARCH: tl.constexpr,
):
    """One decode step without writeback: program (h, n) reads head h of request n and appends its token.

    `phases[n]` is the request's length mod W and `pending[n]` its entries, both before this token; a token at phase
    W - 1 is not appended but left to `fold`, with its residual in `u_now`.
    """
    i_h, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
$token$window    p_out = out + i_n * stride_out + i_h * V + col
    if i_slot < 0:
        tl.store(p_out, tl.zeros([VP], out.dtype.element_ty), mask=col_in)
        return
    p_page = pages + i_slot * stride_page
    prefetch_head(p_page, p_table)
$buffers$body$read_pivots    h_k, h_q = read_pending(
        h_k, h_q, x_k, x_q, decay, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending, i_phase != W - 1,
        o_key, row_in, col, col_in, K, V, SHARED_KEYS, INT8,
    )
    u = beta * (raw_v.to(tl.float32) - h_k)
    tl.store(p_out, (h_q + qk * u).to(out.dtype.element_ty), mask=col_in)
    if i_phase == W - 1:
        tl.store(u_now + (i_n * H + i_h) * V + col, u, mask=col_in)
    else:
        store_entry(p_us, p_u_scale, u, n_pending, n_pending + 1, col, col_in, V, INT8)
$append
'''

BODY_GDN = """    h_k, h_q = tl.zeros([VP], tl.float32), tl.zeros([VP], tl.float32)
    x_q, x_k = raw_q.to(tl.float32), raw_k.to(tl.float32)  # norms and gates are scalars, and come later
$dispatch    x_q, x_k, qk, norm_q, norm_k = token_vectors(raw_q, raw_k, scale, L2NORM)
    decay, beta = token_gates(raw_a, raw_dt, a_log, raw_b)
    base = gamma * decay
    h_k, h_q = h_k * (norm_k * base), h_q * (norm_q * base)
"""

BODY_KDA = """    x_q, x_k, qk, norm_q, norm_k = token_vectors(raw_q, raw_k, scale, L2NORM)
    decay, beta = token_gates(raw_a, raw_dt, a_log, raw_b)
    base = gamma * decay
    h_k, h_q = read_codes(p_page, p_table, x_k * base, x_q * base, slot, col, col_in, $kind)
"""

APPEND_GDN = """        if i_h % (H // HK) == 0:
            store_entry(p_keys, p_key_scale, x_k, n_pending, n_pending + 1, o_key, row_in, K, INT8)
        o_w = tl.arange(0, W)
        ratio = tl.load(p_ratio + o_w, mask=o_w < n_pending, other=0.0) * decay
        tl.store(p_ratio + o_w, tl.where(o_w < n_pending, ratio, 1.0), mask=o_w <= n_pending)
        tl.store(p_gamma, base)
"""

APPEND_KDA = """        store_entry(p_keys, p_key_scale, x_k, n_pending, n_pending + 1, o_key, row_in, K, INT8)
        tl.store(p_gamma + o_key, base, mask=row_in)
"""

FOLD = '''
@triton.jit
def fold_codes(
    p_page, p_table, p_w, p_bits, x_k, u, decay, gamma, slot, row_in, col, col_in,
    p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending, p_order,
    G: tl.constexpr, FOUR: tl.constexpr, BITS: tl.constexpr, ARCH: tl.constexpr,
    NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):
    """Everything pending into a head of integer rows, then fit, quantise and pack; the state stays on the chip."""
    p_r, r_in = row_factors(p_page, p_table, slot, K, KP, G, J // GROUP if FOUR else 1, FOUR)
    p_c = (p_page + table_offset(p_table, T_COLUMN)).to(tl.pointer_type(tl.float16)) + col
    rho, c = tl.load(p_r, mask=r_in, other=0).to(tl.float32), tl.load(p_c, mask=col_in, other=0).to(tl.float32)
    w, inv_w = tl.load(p_w + slot, mask=row_in, other=1.0), tl.load(p_w + H * K + slot, mask=row_in, other=1.0)
    x = load_tile(p_page, p_table, J, M, JP, E, G, FOUR, $planes)
    top, inv_top, unit = code_constants(p_bits, slot, K, M, BITS, FOUR)
    rho = rho * unit * $factor_decay
    x = x * spread_columns(c, JP, E, G) * spread_rows(rho, M, G, FOUR)
    x = fold_pending(
        x, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending, $tile_decay, p_order,
        K, V, M, J, JP, E, G, SHARED_KEYS, PERMUTED, INT8,
    )
    x += spread_rows(x_k, M, 1, False) * spread_columns(u, JP, E, G)
    w, inv_w = grouped(w, KP, G, FOUR), grouped(inv_w, KP, G, FOUR)
    z, r, c = fit_codes(x, w, inv_w, top, inv_top, unit, M, JP, E, G, REFITS, BITS, FOUR)
$mask_pivots    tl.store(p_r, r, mask=r_in)
    tl.store(p_c, c, mask=col_in)
    store_tile(p_page, p_table, z, J, M, JP, E, BITS, ARCH, $planes)

'''

FOLD_PIVOTS = '''
@triton.jit
def fold_pivot_head(
    p_page, p_table, x_k, u, decay, gamma, row_in, col, col_in, o_key,
    p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending, n_pivots,
):
    """Everything pending into the FP16 rows of a head."""
    p_pivots = (p_page + table_offset(p_table, T_PIVOT)).to(tl.pointer_type(tl.float16))
    ones = tl.full([KP], 1.0, tl.float32)
    fold_pivots(
        p_pivots, n_pivots, gamma * ones, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending, decay * ones,
        x_k, u, o_key, row_in, col, col_in, K, V, KP, PIVOT_BLOCK, SHARED_KEYS, INT8,
    )

'''

FOLD_KERNEL = '''
@triton.jit
def fold(
    pages, stride_page, table, row_w, row_bits, order, slots, stride_slot,
    q, stride_q, k, stride_k, v, stride_v, a, stride_a, b, stride_b, A_log, dt_bias, scale, out, stride_out,
    buffers, phases, pending, keys, key_scale, us, u_scale, ratios, gammas, u_now,
    L2NORM: tl.constexpr, ARCH: tl.constexpr,
):
    """Writeback: program (h, n) folds the window of head h of request n in, if this token completes one."""
    i_h, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(phases + i_n) != W - 1:
        return
$token$window    if i_slot < 0:
        return
    p_page = pages + i_slot * stride_page
    p_w, p_bits = row_w + i_h * K, row_bits + i_h * K
    u = tl.load(u_now + (i_n * H + i_h) * V + col, mask=col_in, other=0)
$buffers    x_q, x_k, qk, norm_q, norm_k = token_vectors(raw_q, raw_k, scale, L2NORM)
    decay, beta = token_gates(raw_a, raw_dt, a_log, raw_b)
$dispatch'''

FLUSH_KERNEL = '''
@triton.jit
def flush(
    pages, stride_page, table, row_w, row_bits, order, slots, stride_slot,
    buffers, phases, pending, keys, key_scale, us, u_scale, ratios, gammas, ARCH: tl.constexpr,
):
    """Fold a window that is not full, before a slot is copied, forked or sent away; nothing pending changes nothing."""
    i_h, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    p_table = table + i_h * 16
    i_slot = tl.load(slots + i_n * stride_slot).to(tl.int64)
    i_bits = tl.load(p_table + T_BITS)
$window    if i_slot < 0:
        return
    if n_pending == 0:
        return
    col, col_in = tile_columns(J, JP)
    p_page = pages + i_slot * stride_page
    p_w, p_bits = row_w + i_h * K, row_bits + i_h * K
    slot = tl.arange(0, KP)
    row_in = slot < K
    row = $row
$buffers    decay = $one
    x_k, u = tl.zeros([KP], tl.float32), tl.zeros([VP], tl.float32)
$dispatch'''
