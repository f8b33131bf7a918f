"""The fast implementation for mean pooling, where every row is calibrated: one pass over the keys, basket by basket.

Attention over the keys of basket b alone gives an output o_b and the log-sum-exp lse_b of its logits. The plain output
is sum_b w_b o_b with w = softmax(lse). With the shares of `blended_shares` in place of w, the same sum is the
calibrated output. So no L x L matrix is needed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.access.attention_call import FusedCall, expand_heads
from fair_calibration.config import FairConfig
from fair_calibration.method.baskets import Baskets
from fair_calibration.method.kernels import attend_with_lse, select_kernel
from fair_calibration.method.shares import MASKED, blended_shares
from fair_calibration.method.visible_baskets import (
    BasketRun,
    VisibleBasket,
    VisibleBaskets,
    count_baskets,
    find_visible_baskets,
)

_ROWS_PER_BLOCK = 1024  # torch's kernel for CPUs is slower below 768
_CPU_BYTES = 16 * 2**20  # the basket outputs held at once on CPUs, few enough to stay in cache
_DEVICE_BYTES = 512 * 2**20  # the same on other devices


def calibrate_all_rows(output: Tensor, call: FusedCall, baskets: Baskets, config: FairConfig) -> None:
    """Overwrites every row of a token in every calibrated sequence in ``output`` with the calibrated row.

    Rows of padding may get any finite numbers. The arguments are those of `calibrate_pooled_row`, but ``output`` need
    not be initialized for calibrated sequences.
    """
    n_sequences, _, length, _ = call.query.shape
    if not any(baskets.is_calibrated):
        return
    # Under autocast, models pass query, key and value in different dtypes.
    dtype = torch.promote_types(torch.promote_types(call.query.dtype, call.key.dtype), call.value.dtype)
    device = call.query.device
    on_cpu = device.type == "cpu"
    # On other devices the whole batch at once: many small kernel launches would cost more than the padding does.
    groups = _groups(baskets, call.value.shape[-1]) if on_cpu else [slice(0, n_sequences)]
    for group in groups:
        valid = baskets.valid[group] if on_cpu else ((0, length),)
        every_row = range(min(first for first, _ in valid), max(stop for _, stop in valid))
        query, key, value = (tensor[group].to(dtype) for tensor in (call.query, call.key, call.value))
        if on_cpu:
            key, value = (_lay_out(tensor, baskets.basket_size) for tensor in (key, value))
        row_steps, head_steps = _steps(query, value, every_row, count_baskets(baskets, group))
        for rows in row_steps:
            visible = None if call.bias.is_per_head else _find_once(call.bias, baskets, group, rows, device)
            for heads, kv_heads in head_steps:
                bias = call.bias.select_heads(heads)
                block = replace(
                    call, query=query[:, heads, rows], key=key[:, kv_heads], value=value[:, kv_heads], bias=bias
                )
                seen = find_visible_baskets(bias, baskets, group, rows, device) if visible is None else visible
                _calibrate_block(output[group, rows, heads], block, baskets, seen, group, rows, config)


def _find_once(
    bias: AttentionBias, baskets: Baskets, group: slice, rows: slice, device: torch.device
) -> VisibleBaskets:
    """Finds the visible baskets, once for all layers that share a mask."""
    # They are not cached with additive biases, which are large, nor on other devices, where finding them is cheap.
    if device.type != "cpu" or bias.is_additive:
        return find_visible_baskets(bias, baskets, group, rows, device)
    key = (group.start, group.stop, rows.start, rows.stop)
    return bias.cached(key, lambda: find_visible_baskets(bias, baskets, group, rows, device))


def _groups(baskets: Baskets, dim: int) -> list[slice]:
    """Groups neighbouring calibrated sequences that can be computed together; other sequences are left out.

    The sequences of a group have their baskets at the same positions, so that a basket is one slice of all their keys,
    and equally many of them, so that little padding is computed. The memory for their basket outputs (D_v = ``dim``) is
    bounded; for a single sequence `_steps` bounds it.
    """
    groups: list[slice] = []
    layout = None
    for i, (calibrated, content) in enumerate(zip(baskets.is_calibrated, baskets.content, strict=True)):
        if not calibrated:
            continue
        last_layout, layout = layout, None
        n_baskets = count_baskets(baskets, slice(i, i + 1))
        if content is not None:
            layout = (content[0], n_baskets, baskets.sizes[i])
        start, stop = baskets.valid[i]
        n_bytes = min(stop - start, _ROWS_PER_BLOCK) * n_baskets * dim * 4  # the basket outputs of one head
        joins = groups and groups[-1].stop == i and layout is not None and layout == last_layout
        if joins and (i + 1 - groups[-1].start) * n_bytes <= _CPU_BYTES:
            groups[-1] = slice(groups[-1].start, i + 1)
        else:
            groups.append(slice(i, i + 1))
    return groups


def _steps(query: Tensor, value: Tensor, rows: range, n_baskets: int) -> tuple[list[slice], list[tuple[slice, slice]]]:
    """Cuts the work into steps that bound the memory: slices of rows, and of heads with their key-value heads."""
    n_sequences, n_heads = query.shape[:2]
    n_kv, dim = value.shape[1], value.shape[-1]
    n_groups = n_heads // n_kv
    bytes_per_row = n_sequences * n_groups * max(1, n_baskets) * dim * 4  # for one key-value head
    if query.device.type == "cpu":
        n_rows = min(len(rows), _ROWS_PER_BLOCK)
        # One key-value head at a time is broadcast to the heads that share it, without a copy.
        n_kv_heads = 1 if n_groups > 1 else max(1, _CPU_BYTES // (bytes_per_row * n_rows))
    else:
        n_rows = max(1, _DEVICE_BYTES // (bytes_per_row * n_kv))
        n_kv_heads = n_kv
    row_steps = [slice(i, min(i + n_rows, rows.stop)) for i in range(rows.start, rows.stop, n_rows)]
    kv_steps = [slice(i, min(i + n_kv_heads, n_kv)) for i in range(0, n_kv, n_kv_heads)]
    return row_steps, [(slice(kv.start * n_groups, kv.stop * n_groups), kv) for kv in kv_steps]


def _calibrate_block(
    output: Tensor,
    block: FusedCall,
    baskets: Baskets,
    visible: VisibleBaskets,
    group: slice,
    rows: slice,
    config: FairConfig,
) -> None:
    """Overwrites the output (b, l, h, D_v) of l rows and h heads of a group of b sequences.

    ``block`` holds the queries (b, h, l, D), the keys and values (b, h_kv, K, ...) that these heads share, and the bias
    of these heads in the whole batch.
    """
    run_outputs, lse = _attend_run(block, visible.run)
    n_run = len(lse)
    outputs, others_lse = _attend_others(block, visible.others)
    lse += others_lse
    # How many keys of each basket each row sees, with the baskets of the run first.
    sizes = [*(visible.run.size if visible.run is not None else ()), *(basket.size for basket in visible.others)]
    isolated_logits, isolated_visible = _isolated_logits(block, baskets, group, rows)
    shares = blended_shares(
        torch.stack(lse) if lse else isolated_logits[:0],
        isolated_logits,
        torch.stack(torch.broadcast_tensors(*sizes)) if lse else isolated_visible[:0].long(),  # type: ignore[no-untyped-call]
        isolated_visible,
        n_kept=baskets.n_kept,
        config=config,
    )
    n_heads = block.query.shape[1]
    isolated_value = expand_heads(_take_keys(block.value, baskets.isolated[group]), n_heads).float()
    run_shares = shares.baskets[:n_run].movedim(0, 1)[..., None]  # (b, n, h, l, 1)
    # If there is a run, head by head, so that the sum over the baskets of a head stays in cache.
    for heads in [slice(i, i + 1) for i in range(n_heads)] if n_run else [slice(0, n_heads)]:
        if n_run:
            weighted = run_outputs[heads.start].float().mul_(run_shares[:, :, heads.start])
            result = weighted.sum(1)[:, None]  # (b, 1, l, D_v)
        else:
            result = torch.zeros_like(output, dtype=torch.float32).transpose(1, 2)
        for basket, basket_output, share in zip(visible.others, outputs, shares.baskets[n_run:], strict=True):
            result[:, :, basket.rows].addcmul_(basket_output[:, heads], share[:, heads, basket.rows, None])
        for i, share in enumerate(shares.isolated):
            result.addcmul_(isolated_value[:, heads, i, None], share[:, heads, :, None])
        new = result.transpose(1, 2)
        if block.query.device.type != "cpu":
            calibrated = baskets.calibrated[group, None, None, None]
            new = torch.where(calibrated, new.to(output.dtype), output[:, :, heads])
        output[:, :, heads] = new


def _attend_run(block: FusedCall, run: BasketRun | None) -> tuple[list[Tensor], list[Tensor]]:
    """Computes attention within each of the n baskets of a run, with one call per head for all of them.

    Returns the outputs (b, n, l, D_v) of each of the h heads, and the log-sum-exps (b, h, l) of each basket.
    """
    if run is None:
        return [], []
    query, key, value = block.query, block.key, block.value
    kernel = select_kernel(query, value)
    n_baskets, n_groups = len(run.size), query.shape[1] // key.shape[1]
    outputs, lse = [], []
    for kv_head in range(key.shape[1]):
        head_key, head_value = (
            tensor[:, kv_head, run.keys].view(len(tensor), n_baskets, -1, tensor.shape[-1]) for tensor in (key, value)
        )
        for head in range(kv_head * n_groups, (kv_head + 1) * n_groups):
            # The baskets take the place of the heads in this call.
            head_output, head_lse = attend_with_lse(
                query[:, head : head + 1].expand(-1, n_baskets, -1, -1),
                head_key,
                head_value,
                bias=None,
                visible=run.visible,
                scale=block.scale,
                kernel=kernel,
            )
            outputs.append(head_output)
            lse.append(head_lse)
    return outputs, list(torch.stack(lse, dim=2).unbind(1))


def _attend_others(block: FusedCall, others: list[VisibleBasket]) -> tuple[list[Tensor], list[Tensor]]:
    """Computes attention within baskets one by one, with all heads at once.

    Returns the outputs (b, h, rows, D_v) of the rows that see each basket, and the log-sum-exps (b, h, l) of all rows.
    """
    query = block.query
    kernel = select_kernel(query, block.value)
    every = slice(0, query.shape[2])
    outputs, lse = [], []
    for basket in others:
        basket_output, basket_lse = attend_with_lse(
            query[:, :, basket.rows],
            _take_keys(block.key, basket.keys),
            _take_keys(block.value, basket.keys),
            bias=basket.bias,
            visible=basket.visible,
            scale=block.scale,
            kernel=kernel,
        )
        if basket.rows != every:
            all_rows = basket_lse.new_full(query.shape[:3], MASKED)
            all_rows[:, :, basket.rows] = basket_lse
            basket_lse = all_rows
        outputs.append(basket_output)
        lse.append(basket_lse)
    return outputs, lse


def _isolated_logits(block: FusedCall, baskets: Baskets, group: slice, rows: slice) -> tuple[Tensor, Tensor]:
    """Returns the logits of the isolated tokens, float32 (I, b, h, l), and which of them each row sees, bool."""
    query, isolated = block.query, baskets.isolated[group]
    isolated_key = expand_heads(_take_keys(block.key, isolated), query.shape[1])
    logits = query.float() @ isolated_key.float().transpose(-1, -2) * block.scale
    added, visible = block.bias.block(group, rows, isolated, query.device)
    filled = baskets.isolated_filled[group][:, None, None]
    visible = filled if visible is None else visible & filled
    if added is not None:
        logits = logits + added
    return torch.where(visible, logits, MASKED).movedim(-1, 0), visible.movedim(-1, 0)


def _lay_out(tensor: Tensor, n_spare: int) -> Tensor:
    """Copies keys or values (b, H_kv, K, D) into contiguous memory (b, H_kv, K + n_spare, D), zeros at the end."""
    # They are read many times, and models pass them in a layout in which the positions of a head are far apart. With
    # the zeros the last basket can be read as if it were full.
    n_sequences, n_heads, n_keys, dim = tensor.shape
    copy = tensor.new_empty(n_sequences, n_heads, n_keys + n_spare, dim)
    copy[:, :, :n_keys] = tensor
    copy[:, :, n_keys:] = 0.0
    return copy


def _take_keys(tensor: Tensor, keys: slice | Tensor) -> Tensor:
    """Takes n of the keys or values (b, H_kv, K, D): a slice of them, or positions int64 (b, n)."""
    if isinstance(keys, slice):
        return tensor[:, :, keys]
    index = keys[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
    return tensor.gather(2, index)
