"""The Triton kernel for GPUs: calibrated attention in one pass over the keys, for all rows or the pooled rows alone.

A block of rows walks over the baskets. It keeps the sums of ordinary online softmax over all keys, from which the plain
output follows at the end. Beside them it adds up the output of each basket by itself, o_b = softmax over the keys of b,
times the basket's weight w_b, which is 1 (or the number of its visible keys). With the masses p_i of the isolated
tokens and their target shares t_i the calibrated output is

    (1 - strength) * plain + strength * ((1 - sum_i t_i) / sum_b w_b * sum_b w_b o_b + sum_i t_i v_i)

so there is no second pass and no matrix over rows and keys. The arithmetic is float32; keys and values are read in
their own dtype. It has not been run on a GPU yet; docs/gpu.md says what was verified. This module imports Triton and
is imported only when the kernel is chosen (`one_pass` launches it).
"""

from __future__ import annotations

import triton
import triton.language as tl

# The exponents of 2 of a hidden key: finite, so that rows without visible keys do not give NaN.
HIDDEN = tl.constexpr(-1.0e30)
BLOCK_ISOLATED = tl.constexpr(16)  # the smallest block that tensor cores multiply


@triton.jit
def _load(tensor, at, is_there, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads the vectors at positions ``at`` (N,): (N, BLOCK_D), with zeros beyond D and where ``is_there`` is False."""
    dims = tl.arange(0, BLOCK_D)
    mask = is_there[:, None] if BLOCK_D == D else is_there[:, None] & (dims < D)[None, :]
    return tl.load(tensor + at[:, None] * stride + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _logits(
    rows, key, at, is_key, stride, scale, low, high,
    D: tl.constexpr, BLOCK_D: tl.constexpr, RANGES: tl.constexpr, PRECISION: tl.constexpr, AS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Multiplies rows (M, BLOCK_D) with the keys at positions ``at`` (N,).

    Returns:
        float32 (M, N), in exponents of 2, `HIDDEN` for keys that a row does not see; and whether it sees them, (M, N),
        or (1, N) without RANGES.
    """
    visible = is_key[None, :]
    if RANGES:
        visible = visible & (at[None, :] >= low[:, None]) & (at[None, :] < high[:, None])
    keys = _load(key, at, is_key, stride, D, BLOCK_D)
    if AS_FLOAT32 or rows.dtype != keys.dtype:  # the dtypes differ under autocast
        rows = rows.to(tl.float32)
        keys = keys.to(tl.float32)
    logits = tl.dot(rows, tl.trans(keys), input_precision=PRECISION) * scale
    return tl.where(visible, logits, HIDDEN), visible


@triton.jit
def _weigh(
    weights, value, at, is_key, stride,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, AS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Sums the values at positions ``at`` (N,) with weights (M, N): float32 (M, BLOCK_DV)."""
    values = _load(value, at, is_key, stride, DV, BLOCK_DV)
    weights = weights.to(values.dtype)
    if AS_FLOAT32:
        weights = weights.to(tl.float32)
        values = values.to(tl.float32)
    return tl.dot(weights, values, input_precision=PRECISION)


@triton.jit
def _merge(peak, total, values, other_peak, other_total, other_values):
    """Merges the softmax over some keys with that over others: highest logits, sums of exp2(logit - peak), values."""
    new_peak = tl.maximum(peak, other_peak)
    shrink = tl.exp2(peak - new_peak)
    other_shrink = tl.exp2(other_peak - new_peak)
    total = total * shrink + other_total * other_shrink
    return new_peak, total, values * shrink[:, None] + other_values * other_shrink[:, None]


# Triton would compile variants for the values 1 and 16 of these.
_UNSPECIALIZED = (
    "share_kind", "proportional", "n_slots", "n_isolated", "n_kept", "basket_size", "range_stride_b",
    "range_stride_l",
)  # fmt: skip


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def one_pass(
    query, key, value, output, sequences, slots, isolated, lowest, highest,
    exponent_scale, strength, fixed_share, share_kind, proportional,
    n_groups, n_slots, n_isolated, n_kept, basket_size,
    query_stride_b, query_stride_h, query_stride_l,
    key_stride_b, key_stride_h, key_stride_l,
    value_stride_b, value_stride_h, value_stride_l,
    output_stride_b, output_stride_l, output_stride_h,
    range_stride_b, range_stride_l,
    RANGES: tl.constexpr, GATHER: tl.constexpr, SINGLE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, PRECISION: tl.constexpr, AS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Overwrites the rows of one block, which belong to all query heads of one key-value head of one sequence.

    Args:
        query: (B, H, L, D), or (1, H, T, D) without padding; the last dimension is contiguous in all four tensors.
        key: (B, H_kv, L, D), or (1, H_kv, T, D).
        value: (B, H_kv, L, D_v), or (1, H_kv, T, D_v).
        output: (B, L, H, D_v), or (1, T, H, D_v).
        sequences: int32 (B, 6), of each sequence: where it begins in a batch without padding (else 0), the first row to
            compute and the one after the last, where the content begins, the number of content tokens, and the size of
            its baskets. Positions are counted from the beginning of the sequence.
        slots: int64 (B, n_slots), the position of each content token by basket; read only with GATHER.
        isolated: int32 (B, n_isolated), the positions of the tokens outside the baskets, -1 for one that is lacking.
        lowest: int32 (B or 1, L or 1), the first key that a row sees; read only with RANGES.
        highest: the same for the key after the last.
        exponent_scale: The scale of the products of query and key, times log2(e).
        strength: In [0, 1].
        fixed_share: The share of an isolated token with ``share_kind`` 2.
        share_kind: 0 for isolated tokens that keep their own mass, 1 for as much as a basket, 2 for a fixed share.
        proportional: 1 if baskets weigh by their number of visible keys, else 0.
        n_groups: H / H_kv.
        n_slots: The width of ``slots``.
        n_isolated: The width of ``isolated``.
        n_kept: The last ``n_kept`` of the isolated tokens keep their own mass.
        basket_size: The largest number of tokens in a basket.
        query_stride_b: This and the next ones are the strides of the tensors by dimension, in elements.
        RANGES: Whether rows see only a range of keys each.
        GATHER: Whether the content of a sequence is not one range of positions. RANGES has to be set, too.
        SINGLE: Whether a basket fits into one block of keys.
        D: The head size of query and key.
        BLOCK_D: The next power of 2, at least 16.
        DV: The head size of the values.
        BLOCK_DV: The next power of 2, at least 16.
        BLOCK_ROWS: The number of rows, over all heads that share keys, of one block.
        BLOCK_KEYS: The number of keys of one block.
        PRECISION: How float32 is multiplied on tensor cores.
        AS_FLOAT32: Whether low precision is multiplied as float32, which Triton's interpreter needs for bfloat16.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    entry = sequences + sequence * 6
    offset = tl.load(entry).to(tl.int64)
    first_row = tl.load(entry + 1)
    end_row = tl.load(entry + 2)
    content = tl.load(entry + 3)
    n_content = tl.load(entry + 4)
    size = tl.load(entry + 5)
    if first_row + (block * BLOCK_ROWS) // n_groups >= end_row:
        return

    index = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = first_row + index // n_groups
    head = kv_head * n_groups + index % n_groups
    is_row = row < end_row
    query += sequence * query_stride_b
    key += sequence * key_stride_b + kv_head * key_stride_h + offset * key_stride_l
    value += sequence * value_stride_b + kv_head * value_stride_h + offset * value_stride_l
    slots += sequence * n_slots
    isolated += sequence * n_isolated
    rows = _load(query, head * query_stride_h + (offset + row) * query_stride_l, is_row, 1, D, BLOCK_D)

    first_basket = 0
    end_basket = tl.cdiv(n_content, size)
    low = tl.zeros([BLOCK_ROWS], tl.int32)
    high = tl.zeros([BLOCK_ROWS], tl.int32)
    if RANGES:
        ranges = sequence * range_stride_b + row * range_stride_l
        low = tl.load(lowest + ranges, mask=is_row, other=0)
        high = tl.load(highest + ranges, mask=is_row, other=0)
        if not GATHER:  # baskets that no row of the block sees are left out
            seen_from = tl.min(tl.where(is_row & (low < high), low, content + n_content), 0)
            first_basket = tl.maximum(seen_from - content, 0) // size
            seen_to = tl.minimum(tl.maximum(tl.max(high, 0) - content, 0), n_content)
            end_basket = tl.cdiv(seen_to, size)

    peak = tl.full([BLOCK_ROWS], HIDDEN, tl.float32)  # the highest logit so far
    total = tl.zeros([BLOCK_ROWS], tl.float32)  # the sum of exp(logit - peak) over all keys
    plain = tl.zeros([BLOCK_ROWS, BLOCK_DV], tl.float32)  # the same sum of values
    even = tl.zeros([BLOCK_ROWS, BLOCK_DV], tl.float32)  # the weighted sum of the baskets' own outputs
    weight = tl.zeros([BLOCK_ROWS], tl.float32)  # the sum of the baskets' weights
    n_seen = tl.zeros([BLOCK_ROWS], tl.float32)  # the number of baskets that a row sees
    for basket in range(first_basket, end_basket):
        begin = basket * size
        end = tl.minimum(begin + size, n_content)
        basket_peak = tl.full([BLOCK_ROWS], HIDDEN, tl.float32)
        basket_total = tl.zeros([BLOCK_ROWS], tl.float32)
        basket_sum = tl.zeros([BLOCK_ROWS, BLOCK_DV], tl.float32)
        n_keys = tl.zeros([BLOCK_ROWS], tl.int32)  # that a row sees
        # With a bound that is known, the loads of the next basket begin while this one is computed.
        for part in range(1 if SINGLE else tl.cdiv(basket_size, BLOCK_KEYS)):
            slot = begin + part * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
            is_key = slot < end
            at = content + slot
            if GATHER:
                at = tl.load(slots + slot + basket * (basket_size - size), mask=is_key, other=0).to(tl.int32)
            logits, visible = _logits(
                rows,
                key,
                at,
                is_key,
                key_stride_l,
                exponent_scale,
                low,
                high,
                D,
                BLOCK_D,
                RANGES,
                PRECISION,
                AS_FLOAT32,
            )
            part_peak = tl.max(logits, 1)
            weights = tl.where(visible, tl.exp2(logits - part_peak[:, None]), 0.0)
            part_total = tl.sum(weights, 1)
            part_sum = _weigh(weights, value, at, is_key, value_stride_l, DV, BLOCK_DV, PRECISION, AS_FLOAT32)
            if SINGLE:
                basket_peak, basket_total, basket_sum = part_peak, part_total, part_sum
            else:
                basket_peak, basket_total, basket_sum = _merge(
                    basket_peak, basket_total, basket_sum, part_peak, part_total, part_sum
                )
            if GATHER:
                n_keys += tl.sum(visible.to(tl.int32), 1)
        if RANGES and not GATHER:
            n_keys = tl.maximum(tl.minimum(high, content + end) - tl.maximum(low, content + begin), 0)
        if not RANGES:
            n_keys += end - begin
        is_seen = (n_keys > 0).to(tl.float32)
        n_seen += is_seen
        own_weight = tl.where(proportional != 0, n_keys.to(tl.float32), is_seen)
        weight += own_weight
        # A basket that a row does not see has a total of 0.
        even += basket_sum * (own_weight / tl.where(n_keys > 0, basket_total, 1.0))[:, None]
        peak, total, plain = _merge(peak, total, plain, basket_peak, basket_total, basket_sum)

    # The tokens outside the baskets. Those with a share of their own are added up without their masses.
    own_mass = tl.zeros([BLOCK_ROWS], tl.float32)
    own = tl.zeros([BLOCK_ROWS, BLOCK_DV], tl.float32)
    n_others = tl.zeros([BLOCK_ROWS], tl.float32)
    others = tl.zeros([BLOCK_ROWS, BLOCK_DV], tl.float32)
    for start in range(0, n_isolated, BLOCK_ISOLATED):
        token = start + tl.arange(0, BLOCK_ISOLATED)
        at = tl.load(isolated + token, mask=token < n_isolated, other=-1)
        logits, visible = _logits(
            rows, key, at, at >= 0, key_stride_l, exponent_scale, low, high, D, BLOCK_D, RANGES, PRECISION, AS_FLOAT32
        )
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        shrink = tl.exp2(peak - new_peak)
        weights = tl.where(visible, tl.exp2(logits - new_peak[:, None]), 0.0)
        keeps = (token >= n_isolated - n_kept) | (share_kind == 0)
        kept = tl.where(keeps[None, :], weights, 0.0)
        total = total * shrink + tl.sum(weights, 1)
        own_mass = own_mass * shrink + tl.sum(kept, 1)
        sums = _weigh(weights, value, at, at >= 0, value_stride_l, DV, BLOCK_DV, PRECISION, AS_FLOAT32)
        plain = plain * shrink[:, None] + sums
        sums = _weigh(kept, value, at, at >= 0, value_stride_l, DV, BLOCK_DV, PRECISION, AS_FLOAT32)
        own = own * shrink[:, None] + sums
        given = tl.broadcast_to((visible & (keeps == 0)[None, :]).to(tl.float32), weights.shape)
        n_others += tl.sum(given, 1)
        others += _weigh(given, value, at, at >= 0, value_stride_l, DV, BLOCK_DV, PRECISION, AS_FLOAT32)
        peak = new_peak

    # How the shares come about is described in `shares.blended_shares`.
    blend = tl.where(n_seen > 0, strength, 0.0)  # a row that sees no content has nothing to calibrate
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)  # rows that are not stored may see no key at all
    left = 1.0 - own_mass * inverse
    share = tl.where(share_kind == 1, left / tl.maximum(n_seen + n_others, 1.0), left * fixed_share)
    left -= share * n_others
    result = plain * ((1.0 - blend) * inverse)[:, None] + even * (blend * left / tl.maximum(weight, 1.0))[:, None]
    result += own * (blend * inverse)[:, None] + others * (blend * share)[:, None]

    value_dims = tl.arange(0, BLOCK_DV)
    pointers = output + sequence * output_stride_b + (offset + row) * output_stride_l + head * output_stride_h
    mask = is_row[:, None] if BLOCK_DV == DV else is_row[:, None] & (value_dims < DV)[None, :]
    tl.store(pointers[:, None] + value_dims[None, :], result.to(output.dtype.element_ty), mask=mask)
