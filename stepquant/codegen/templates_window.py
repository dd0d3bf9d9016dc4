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
    p_page, p_table, x_k, x_q, slot, col, col_in, FOUR: tl.constexpr, BITS: tl.constexpr, ARCH: tl.constexpr,
    NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):
    """k^T S and q^T S of a head of integer rows, for k and q with all that depends on the row in them."""
$open    G: tl.constexpr = JP // GROUP if FOUR else 1
    bytes_of = open_planes(p_page, p_table, 4)
    words = load_block(bytes_of, 0, J, M, E, 4, FULL, FOUR, $planes)
    c = tl.load(p_c + col, mask=col_in, other=0).to(tl.float32)
    return multiply_head(bytes_of, words, p_r, c, x_k, x_q, slot, K, J, M, JP, E, G, UNIT, FULL, FOUR, $planes)

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
    p_page, p_table, p_w, p_bits, p_limits, base, slot, p_us, p_now, factor, n_pending, keys_now, NOW: tl.constexpr,
    FOUR: tl.constexpr, BITS: tl.constexpr, ARCH: tl.constexpr,
    NIBBLES: tl.constexpr, EIGHT: tl.constexpr, SIX: tl.constexpr, TWO: tl.constexpr,
):
    """Everything pending into a head of integer rows, then fit, quantise and pack.

    Two passes over the blocks, each made from the page and the window again: sums of |X|, then all the rest.
    """
$open$constants    for g in tl.static_range(GROUPS):
$factors$sums$fit
'''

WINDOW_BLOCK = """            x = packed_block(planes, b, p_c, rho, J, M, E, FULL, FOUR, $planes)
            x = add_window(x, value_operands(p_us, p_now, factor, n_pending, b, V, J, E, EN, NOW), keys_now, M, E)
"""

FOLD_PIVOT_ROWS = '''
@triton.jit
def fold_pivot_rows(
    p_page, p_table, x_k, decay, gamma, row_in, o_key, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, p_now, n_pending,
    NOW: tl.constexpr,
):
    """Everything pending into the FP16 rows of a head of integer rows."""
    col, col_in = tile_columns(J, JP)
    u = tl.zeros([VP], tl.float32)
    if NOW:
        u = tl.load(p_now + col, mask=col_in, other=0)
    p_pivots = (p_page + table_offset(p_table, T_PIVOT)).to(tl.pointer_type(tl.float16))
    ones = tl.full([KP], 1.0, tl.float32)
    fold_pivots(
        p_pivots, tl.load(p_table + T_PIVOTS), gamma * ones, p_keys, p_key_scale, p_us, p_u_scale, p_ratio, n_pending,
        decay * ones, x_k, u, o_key, row_in, col, col_in, K, V, KP, PIVOT_BLOCK, SHARED_KEYS, INT8,
    )

'''

FOLD_PIVOT_HEAD = '''
@triton.jit
def fold_pivot_head(p_page, p_table, base, p_us, p_now, factor, n_pending, keys_now, NOW: tl.constexpr):
    """Everything pending into a head that is kept in FP16."""
    p_pivots = (p_page + table_offset(p_table, T_PIVOT)).to(tl.pointer_type(tl.float16))
    for b in tl.range(0, J // (8 * E), num_stages=1):
        p, inside = dense_place(p_pivots, p_pivots, V, 1, b, K, K, J, M, E, False)
        x = tl.load(p, mask=inside, other=0).to(tl.float32) * base
        x = add_window(x, value_operands(p_us, p_now, factor, n_pending, b, V, J, E, EN, NOW), keys_now, M, E)
        tl.store(p, saturate(x, p_pivots).to(tl.float16), mask=inside)

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
    p_now = u_now + (i_n * H + i_h) * V
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
    p_page = pages + i_slot * stride_page
    slot = tl.arange(0, KP)
    row_in = slot < K
    row = $row
$buffers    decay = $one
    x_k, p_now = tl.zeros([KP], tl.float32), gammas  # there is no token: neither is used
$dispatch'''

FOLD_OPERANDS = """    p_w, p_bits, p_limits = row_w + i_h * K, row_bits + i_h * K, row_bits + (H + i_h) * K
    factor = value_factors(p_ratio, p_u_scale, n_pending, decay, EN, SHARED_KEYS, INT8)
    keys_now = key_operands(
        p_keys, p_key_scale, n_pending, decay, x_k, order + i_h * K, K, M, EN, SHARED_KEYS, PERMUTED, INT8
    )
    base = gamma * decay
"""
