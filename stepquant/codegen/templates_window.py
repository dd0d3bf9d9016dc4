"""Text of the kernels of write windows (W > 1): the read of every token and the fold of every W-th."""

from __future__ import annotations

BUFFERS = '''    i_buffer = tl.load(buffers + i_n).to(tl.int64)
    i_phase = tl.load(phases + i_n)
    n_pending = tl.load(pending + i_n)
    p_us = us + (i_buffer * H + i_h) * ((W - 1) * V)
    p_u_scale = u_scale + (i_buffer * H + i_h) * (W - 1)
    p_keys = keys + (i_buffer * $key_heads + $key_head) * ((W - 1) * K)
    p_key_scale = key_scale + (i_buffer * $key_heads + $key_head) * (W - 1)
    p_ratio = ratios + (i_buffer * H + i_h) * (W - 1)
    p_gamma = gammas + (i_buffer * H + i_h)$gamma_width
    o_key = $key_index
    o_w = tl.arange(0, W)
    gamma = tl.load(p_gamma$gamma_index, mask=$gamma_mask, other=1.0) + tl.zeros([KP], tl.float32)
'''

READ = '''
@triton.jit
def read_codes(
    p_page, p_table, p_bits, x_q, x_k, decay, slot, col, col_in,
    G: tl.constexpr, C: tl.constexpr, FOUR: tl.constexpr,
):
    """k^T D S and q^T D S of a head of integer rows; `decay` holds all gates since the fold."""
    step_z, top, inv_top, unit = code_constants(p_bits, p_table, slot, K, M, UNIFORM, FOUR)
    p_r, r_in = row_factors(p_page, p_table, slot, K, KP, G, J // C if FOUR else 1, FOUR)
    p_c = (p_page + table_offset(p_table, T_COLUMN)).to(tl.pointer_type(tl.float16)) + col
    z00, z01, z10, z11 = load_codes(p_page, p_table, J, M, JP, FOUR, $planes)
    rho = tl.load(p_r, mask=r_in, other=0).to(tl.float32) * unit * grouped(decay, KP, G, FOUR)
    c = tl.load(p_c, mask=col_in, other=0).to(tl.float32)
    k_rho, q_rho = rho * grouped(x_k, KP, G, FOUR), rho * grouped(x_q, KP, G, FOUR)
    if MATRIX:
        h_k, h_q = multiply_codes(z00, z01, z10, z11, k_rho, q_rho, M, JP, G, FOUR)
    else:
        x = codes_to_tile(z00, z01, z10, z11, M, G, C)
        h_k, h_q = sum_rows(x * spread_rows(k_rho, M, G, FOUR), x * spread_rows(q_rho, M, G, FOUR), VP)
    return h_k * c, h_q * c


@triton.jit
def read(
    pages, stride_page, table, row_w, row_bits, order, slots, stride_slot,
    q, stride_q, k, stride_k, v, stride_v, a, stride_a, b, stride_b, A_log, dt_bias, scale, out, stride_out,
    buffers, phases, pending, keys, key_scale, us, u_scale, ratios, gammas, u_now, L2NORM: tl.constexpr,
):
    """One decode step without writeback: program (h, n) reads head h of request n and appends its token.

    `phases[n]` is the request's length mod W and `pending[n]` its entries, both before this token; a token at phase
    W - 1 is not appended but left to `fold`, with its residual in `u_now`.
    """
    i_h, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    col, col_in = tile_columns(J, VP)
    p_out = out + i_n * stride_out + i_h * V + col
    i_slot = tl.load(slots + i_n * stride_slot).to(tl.int64)
    if i_slot < 0:
        tl.store(p_out, tl.zeros([VP], out.dtype.element_ty), mask=col_in)
        return
    p_page = pages + i_slot * stride_page
    p_table = table + i_h * 16
    p_bits = row_bits + i_h * K
$token
$buffers
    base = gamma * decay
    h_k, h_q = tl.zeros([VP], tl.float32), tl.zeros([VP], tl.float32)
$dispatch$read_pivots
    entries = load_entries(p_keys, p_key_scale, o_w, n_pending, o_key, row_in, K, INT8) * $entry_decay
    residuals = load_entries(p_us, p_u_scale, o_w, n_pending, col, col_in, V, INT8)
    h_k, h_q = read_pending(h_k, h_q, entries, residuals, x_k, x_q)
    u = beta * (x_v - h_k)
    y = h_q + tl.sum(x_q * x_k) * u
    tl.store(p_out, y.to(out.dtype.element_ty), mask=col_in)
    if i_phase == W - 1:
        tl.store(u_now + (i_n * H + i_h) * V + col, u, mask=col_in)
    else:
        store_entry(p_us, p_u_scale, u, n_pending, col, col_in, V, INT8)
$append
'''

APPEND_GDN = '''        if i_h % (H // HK) == 0:
            store_entry(p_keys, p_key_scale, x_k, n_pending, o_key, row_in, K, INT8)
        tl.store(p_ratio + o_w, tl.where(o_w < n_pending, ratio, 1.0), mask=o_w <= n_pending)
        tl.store(p_gamma, tl.max(base, 0))
'''

APPEND_KDA = '''        store_entries(p_keys, p_key_scale, entries, o_w, n_pending, o_key, row_in, K, INT8)
        store_entry(p_keys, p_key_scale, x_k, n_pending, o_key, row_in, K, INT8)
        tl.store(p_gamma + o_key, base, mask=row_in)
'''

FOLD = '''
@triton.jit
def fold_codes(
    p_page, p_table, p_w, p_bits, x_k, u, decay, gamma, slot, row_in, col, col_in, o_key,
    p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending,
    G: tl.constexpr, C: tl.constexpr, FOUR: tl.constexpr,
):
    """Everything pending into a head of integer rows, then fit, quantise and pack; the state stays on the chip."""
    step_z, top, inv_top, unit = code_constants(p_bits, p_table, slot, K, M, UNIFORM, FOUR)
    p_r, r_in = row_factors(p_page, p_table, slot, K, KP, G, J // C if FOUR else 1, FOUR)
    p_c = (p_page + table_offset(p_table, T_COLUMN)).to(tl.pointer_type(tl.float16)) + col
    z00, z01, z10, z11 = load_codes(p_page, p_table, J, M, JP, FOUR, $planes)
    rho = tl.load(p_r, mask=r_in, other=0).to(tl.float32) * unit * grouped(gamma * decay, KP, G, FOUR)
    c = tl.load(p_c, mask=col_in, other=0).to(tl.float32)
    x = codes_to_tile(z00, z01, z10, z11, M, G, C) * spread_columns(c, G, C) * spread_rows(rho, M, G, FOUR)
    x = fold_pending(
        x, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending, decay, o_key, row_in, col, col_in,
        K, V, M, G, C, SHARED_KEYS, INT8,
    )
    x += spread_rows(x_k, M, 1, False) * spread_columns(u, G, C)
    w = grouped(tl.load(p_w + slot, mask=row_in, other=1.0), KP, G, FOUR)
    inv_w = grouped(tl.load(p_w + H * K + slot, mask=row_in, other=1.0), KP, G, FOUR)
    z, r, c = fit_codes(x, w, inv_w, step_z, top, inv_top, unit, M, G, C, REFITS, UNIFORM, FOUR)
$mask_pivots    tl.store(p_r, r, mask=r_in)
    tl.store(p_c, c, mask=col_in)
    z00, z01, z10, z11 = tile_to_codes(z, M, JP)
    store_codes(p_page, p_table, z00, z01, z10, z11, J, M, JP, FOUR, $planes)


@triton.jit
def fold(
    pages, stride_page, table, row_w, row_bits, order, slots, stride_slot,
    q, stride_q, k, stride_k, v, stride_v, a, stride_a, b, stride_b, A_log, dt_bias, scale, out, stride_out,
    buffers, phases, pending, keys, key_scale, us, u_scale, ratios, gammas, u_now, L2NORM: tl.constexpr,
):
    """Writeback: program (h, n) folds the window of head h of request n in, if this token completes one."""
    i_h, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_slot = tl.load(slots + i_n * stride_slot).to(tl.int64)
    if i_slot < 0:
        return
    if tl.load(phases + i_n) != W - 1:
        return
    col, col_in = tile_columns(J, VP)
    p_page = pages + i_slot * stride_page
    p_table = table + i_h * 16
    p_w, p_bits = row_w + i_h * K, row_bits + i_h * K
$token
$buffers
    u = tl.load(u_now + (i_n * H + i_h) * V + col, mask=col_in, other=0)
$dispatch'''

FLUSH = '''
@triton.jit
def flush(
    pages, stride_page, table, row_w, row_bits, order, slots, stride_slot,
    buffers, phases, pending, keys, key_scale, us, u_scale, ratios, gammas,
):
    """Fold a window that is not full, before a slot is copied, forked or sent away; nothing pending changes nothing."""
    i_h, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_slot = tl.load(slots + i_n * stride_slot).to(tl.int64)
    if i_slot < 0:
        return
    if tl.load(pending + i_n) == 0:
        return
    col, col_in = tile_columns(J, VP)
    p_page = pages + i_slot * stride_page
    p_table = table + i_h * 16
    p_w, p_bits = row_w + i_h * K, row_bits + i_h * K
    slot = row_slots(KP)
    row_in = slot < K
    row = $row
$buffers
    decay = tl.full([KP], 1.0, tl.float32)
    x_k, u = tl.zeros([KP], tl.float32), tl.zeros([VP], tl.float32)
$dispatch'''

FOLD_PIVOTS = '''
@triton.jit
def fold_pivot_head(
    p_page, p_table, x_k, u, decay, gamma, row_in, col, col_in, o_key,
    p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending, n_pivots,
):
    """Everything pending into the FP16 rows of a head."""
    p_pivots = (p_page + table_offset(p_table, T_PIVOT)).to(tl.pointer_type(tl.float16))
    fold_pivots(
        p_pivots, n_pivots, gamma, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending, decay, x_k, u,
        o_key, row_in, col, col_in, K, V, KP, PIVOT_BLOCK, SHARED_KEYS, INT8,
    )

'''
