"""The fast path for mean pooling: every row calibrated in one pass over the keys, basket by basket.

Attention restricted to basket b gives an output and a log-sum-exp; the plain output is the baskets' outputs weighted by
the softmax of the log-sum-exps. With other weights the same sum is the calibrated output, and no L x L matrix exists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fair_calibration.access.attention_bias import AttentionBias
from fair_calibration.config import FairConfig
from fair_calibration.method.baskets import Baskets
from fair_calibration.method.kernels import attend_with_lse, expand_heads, select_kernel
from fair_calibration.method.shares import MASKED, blended_shares
from fair_calibration.method.visible_baskets import BasketRun, SeenBasket, SeenBaskets, count_baskets, see_baskets

_ROWS_PER_BLOCK = 1024  # torch's kernel for CPUs is slower below 768
_CPU_BYTES = 16 * 2**20  # of basket outputs held at once: few enough to stay in cache
_DEVICE_BYTES = 512 * 2**20


def calibrate_all_rows(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: AttentionBias,
    baskets: Baskets,
    *,
    scale: float,
    config: FairConfig,
    strength: float,
) -> None:
    """Overwrites every valid row of every calibrated sequence in ``output`` with its calibrated one.

    Rows of padding may be overwritten with anything finite.

    Args:
        output: (B, L, H, D_v), changed in place.
        query: (B, H, L, D).
        key: (B, H_kv, L, D).
        value: (B, H_kv, L, D_v).
        bias: The call's masks and biases.
        baskets: The batch's geometry, on the same device.
        scale: What the products of query and key are multiplied by.
        config: A resolved config.
        strength: In [0, 1].
    """
    n_sequences, _, length, _ = query.shape
    if not any(baskets.is_calibrated):
        return
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    on_cpu = query.device.type == "cpu"
    # On a device all at once: many small launches would cost more than the padding does.
    groups = _groups(baskets, value.shape[-1]) if on_cpu else [slice(0, n_sequences)]
    for group in groups:
        valid = baskets.valid[group] if on_cpu else ((0, length),)
        every_row = range(min(first for first, _ in valid), max(stop for _, stop in valid))
        # Under autocast models hand them over in different dtypes.
        group_query, group_key, group_value = (tensor[group].to(dtype) for tensor in (query, key, value))
        if on_cpu:
            group_key, group_value = (_lay_out(tensor, baskets.basket_size) for tensor in (group_key, group_value))
        row_steps, head_steps = _steps(group_query, group_value, every_row, count_baskets(baskets, group))
        for rows in row_steps:
            seen = None if bias.is_per_head else _see_once(bias, baskets, group, rows, query.device)
            for heads, kv_heads in head_steps:
                heads_bias = bias.of_heads(heads)
                _calibrate_block(
                    output[group, rows, heads],
                    group_query[:, heads, rows],
                    group_key[:, kv_heads],
                    group_value[:, kv_heads],
                    heads_bias,
                    baskets,
                    see_baskets(heads_bias, baskets, group, rows, query.device) if seen is None else seen,
                    group,
                    rows,
                    scale=scale,
                    config=config,
                    strength=strength,
                )


def _see_once(bias: AttentionBias, baskets: Baskets, group: slice, rows: slice, device: torch.device) -> SeenBaskets:
    """Looks which baskets are seen, once for all layers where the looking costs more than what is kept of it."""
    if device.type != "cpu" or bias.is_added:
        return see_baskets(bias, baskets, group, rows, device)
    key = (group.start, group.stop, rows.start, rows.stop)
    return bias.keep(key, lambda: see_baskets(bias, baskets, group, rows, device))


def _groups(baskets: Baskets, dim: int) -> list[slice]:
    """Cuts the batch into calibrated sequences that can be worked on together.

    Their baskets begin at the same positions, so that a basket is one slice of all their keys, and there are equally
    many, so that little padding is computed. What they take is bounded; alone a sequence may take more (`_steps`).
    """
    groups: list[slice] = []
    place = None
    for i, (calibrated, content) in enumerate(zip(baskets.is_calibrated, baskets.content, strict=True)):
        if not calibrated:
            continue
        last_place, place = place, None
        n_baskets = count_baskets(baskets, slice(i, i + 1))
        if content is not None:
            place = (content[0], n_baskets)
        start, stop = baskets.valid[i]
        n_bytes = min(stop - start, _ROWS_PER_BLOCK) * n_baskets * dim * 4  # of one head's basket outputs
        joins = groups and groups[-1].stop == i and place is not None and place == last_place
        if joins and (i + 1 - groups[-1].start) * n_bytes <= _CPU_BYTES:
            groups[-1] = slice(groups[-1].start, i + 1)
        else:
            groups.append(slice(i, i + 1))
    return groups


def _steps(query: Tensor, value: Tensor, rows: range, n_baskets: int) -> tuple[list[slice], list[tuple[slice, slice]]]:
    """Cuts rows, and heads with their key-value heads, such that the outputs of all baskets stay in bounds at once."""
    n_sequences, n_heads = query.shape[:2]
    n_kv, dim = value.shape[1], value.shape[-1]
    n_groups = n_heads // n_kv
    bytes_per_row = n_sequences * n_groups * n_baskets * dim * 4  # of one key-value head
    if query.device.type == "cpu":
        n_rows = min(len(rows), _ROWS_PER_BLOCK)
        # Of one key-value head alone no copy is needed for the heads that share it.
        n_kv_heads = 1 if n_groups > 1 else max(1, _CPU_BYTES // (bytes_per_row * n_rows))
    else:
        n_rows = max(1, _DEVICE_BYTES // (bytes_per_row * n_kv))
        n_kv_heads = n_kv
    row_steps = [slice(i, min(i + n_rows, rows.stop)) for i in range(rows.start, rows.stop, n_rows)]
    kv_steps = [slice(i, min(i + n_kv_heads, n_kv)) for i in range(0, n_kv, n_kv_heads)]
    return row_steps, [(slice(kv.start * n_groups, kv.stop * n_groups), kv) for kv in kv_steps]


def _calibrate_block(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: AttentionBias,
    baskets: Baskets,
    seen: SeenBaskets,
    group: slice,
    rows: slice,
    *,
    scale: float,
    config: FairConfig,
    strength: float,
) -> None:
    """Overwrites the output (b, l, h, D_v) of some rows and heads of a group of sequences.

    ``output`` and ``query`` hold these rows alone, ``key`` and ``value`` all positions, each these heads alone.
    ``bias`` and ``baskets`` are those of the whole batch, ``rows`` and ``group`` tell where in it, ``seen`` which
    baskets count.
    """
    n_heads = query.shape[1]
    run_outputs, lse = _attend_run(query, key, value, seen.run, scale)
    n_run = len(lse)
    outputs, others_lse = _attend_others(query, key, value, seen.others, scale)
    lse += others_lse
    isolated_logits, isolated_visible = _isolated_logits(query, key, bias, baskets, group, rows, scale)
    shares = blended_shares(
        torch.stack(lse) if lse else isolated_logits[:0],
        isolated_logits,
        _stack_sizes(seen) if lse else isolated_visible[:0].long(),
        isolated_visible,
        n_kept=baskets.n_kept,
        config=config,
        strength=strength,
    )
    isolated_value = expand_heads(_take_keys(value, baskets.isolated[group]), n_heads).float()
    run_shares = shares.baskets[:n_run].movedim(0, 1)[..., None]  # (b, n, h, l, 1)
    # Head by head where there is a run: what a head's baskets are summed up to stays in cache then.
    for heads in [slice(i, i + 1) for i in range(n_heads)] if n_run else [slice(0, n_heads)]:
        if n_run:
            weighted = run_outputs[heads.start].float().mul_(run_shares[:, :, heads.start])
            result = weighted.sum(1)[:, None]  # (b, 1, l, D_v)
        else:
            result = torch.zeros_like(output, dtype=torch.float32).transpose(1, 2)
        for basket, basket_output, share in zip(seen.others, outputs, shares.baskets[n_run:], strict=True):
            result[:, :, basket.rows].addcmul_(basket_output[:, heads], share[:, heads, basket.rows, None])
        for i, share in enumerate(shares.isolated):
            result.addcmul_(isolated_value[:, heads, i, None], share[:, heads, :, None])
        block = result.transpose(1, 2)
        if query.device.type != "cpu":
            calibrated = baskets.calibrated[group, None, None, None]
            block = torch.where(calibrated, block.to(output.dtype), output[:, :, heads])
        output[:, :, heads] = block


def _attend_run(
    query: Tensor, key: Tensor, value: Tensor, run: BasketRun | None, scale: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Attends to each basket of a run: h outputs (b, n, l, D_v), and n log-sum-exps (b, h, l)."""
    if run is None:
        return [], []
    kernel = select_kernel(query, value)
    n_baskets, n_groups = len(run.size), query.shape[1] // key.shape[1]
    outputs, lse = [], []
    for kv_head in range(key.shape[1]):
        head_key, head_value = (
            tensor[:, kv_head, run.keys].view(len(tensor), n_baskets, -1, tensor.shape[-1]) for tensor in (key, value)
        )
        for head in range(kv_head * n_groups, (kv_head + 1) * n_groups):
            # What the op takes for heads are the baskets here: one call for all of them.
            head_output, head_lse = attend_with_lse(
                query[:, head : head + 1].expand(-1, n_baskets, -1, -1),
                head_key,
                head_value,
                bias=None,
                visible=run.visible,
                scale=scale,
                kernel=kernel,
            )
            outputs.append(head_output)
            lse.append(head_lse)
    return outputs, list(torch.stack(lse, dim=2).unbind(1))


def _attend_others(
    query: Tensor, key: Tensor, value: Tensor, others: list[SeenBasket], scale: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Attends to baskets one by one: outputs (b, h, l', D_v) of the rows that see it, log-sum-exps (b, h, l)."""
    kernel = select_kernel(query, value)
    every = slice(0, query.shape[2])
    outputs, lse = [], []
    for basket in others:
        basket_output, basket_lse = attend_with_lse(
            query[:, :, basket.rows],
            _take_keys(key, basket.keys),
            _take_keys(value, basket.keys),
            bias=basket.bias,
            visible=basket.visible,
            scale=scale,
            kernel=kernel,
        )
        if basket.rows != every:
            all_rows = basket_lse.new_full(query.shape[:3], MASKED)
            all_rows[:, :, basket.rows] = basket_lse
            basket_lse = all_rows
        outputs.append(basket_output)
        lse.append(basket_lse)
    return outputs, lse


def _isolated_logits(
    query: Tensor,
    key: Tensor,
    bias: AttentionBias,
    baskets: Baskets,
    group: slice,
    rows: slice,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns the logits of the isolated tokens, float32 (I, b, H, l), and which of them each row sees."""
    isolated = baskets.isolated[group]
    isolated_key = expand_heads(_take_keys(key, isolated), query.shape[1])
    logits = query.float() @ isolated_key.float().transpose(-1, -2) * scale
    added, visible = bias.block(group, rows, isolated, query.device)
    filled = baskets.isolated_filled[group][:, None, None]
    visible = filled if visible is None else visible & filled
    if added is not None:
        logits = logits + added
    return torch.where(visible, logits, MASKED).movedim(-1, 0), visible.movedim(-1, 0)


def _stack_sizes(seen: SeenBaskets) -> Tensor:
    sizes = [*(seen.run.size if seen.run is not None else ()), *(basket.size for basket in seen.others)]
    return torch.stack(torch.broadcast_tensors(*sizes))  # type: ignore[no-untyped-call]


def _lay_out(tensor: Tensor, n_spare: int) -> Tensor:
    """Copies keys or values (b, H_kv, K, D) to (b, H_kv, K + n_spare, D), zeros behind.

    They are read many times, and models hand them over with the heads in between. With the spare places the last
    basket can be taken as if it were full.
    """
    n_sequences, n_heads, n_keys, dim = tensor.shape
    copy = tensor.new_empty(n_sequences, n_heads, n_keys + n_spare, dim)
    copy[:, :, :n_keys] = tensor
    copy[:, :, n_keys:] = 0.0
    return copy


def _take_keys(tensor: Tensor, keys: slice | Tensor) -> Tensor:
    """Takes keys or values (b, H_kv, K, D) of a basket: a slice of them, or by positions (b, n)."""
    if isinstance(keys, slice):
        return tensor[:, :, keys]
    index = keys[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
    return tensor.gather(2, index)
