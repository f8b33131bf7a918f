"""The fast path for mean pooling: every row calibrated in one pass over the keys, basket by basket.

Attention restricted to basket b gives an output and a log-sum-exp; the plain output is the baskets' outputs weighted by
the softmax of the log-sum-exps. With other weights the same sum is the calibrated output, and no L x L matrix exists.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fair_calibration.baskets import Baskets
from fair_calibration.bias import AttentionBias
from fair_calibration.config import FairConfig
from fair_calibration.kernels import attend_with_lse, expand_heads, select_kernel
from fair_calibration.shares import MASKED, blended_shares

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
    if query.device.type == "cpu":
        # One sequence at a time: no padding is computed, and a basket is a slice of the keys.
        groups = [slice(i, i + 1) for i, calibrated in enumerate(baskets.is_calibrated) if calibrated]
    else:
        # All at once: many small launches would cost more than the padding does.
        groups = [slice(0, n_sequences)]
    for group in groups:
        single = group.stop - group.start == 1
        first, stop = baskets.valid[group.start] if single else (0, length)
        # The products read these many times; models hand them over transposed, and under autocast in different dtypes.
        group_query, group_key, group_value = (tensor[group].to(dtype).contiguous() for tensor in (query, key, value))
        row_steps, head_steps = _steps(group_query, group_value, range(first, stop), baskets.n_baskets)
        for rows in row_steps:
            seen = None if bias.is_per_head else _see_baskets(bias, baskets, group, rows, query.device)
            for heads, kv_heads in head_steps:
                heads_bias = bias.of_heads(heads)
                block = _calibrated_block(
                    group_query[:, heads, rows],
                    group_key[:, kv_heads],
                    group_value[:, kv_heads],
                    heads_bias,
                    baskets,
                    _see_baskets(heads_bias, baskets, group, rows, query.device) if seen is None else seen,
                    group,
                    rows,
                    scale=scale,
                    config=config,
                    strength=strength,
                ).transpose(1, 2)  # (b, l, h, D_v)
                if not single:
                    calibrated = baskets.calibrated[group, None, None, None]
                    block = torch.where(calibrated, block.to(output.dtype), output[group, rows, heads])
                output[group, rows, heads] = block


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


class _SeenBasket(NamedTuple):
    """A basket as some rows see it.

    Attributes:
        keys: A slice where one sequence's content stands together, else positions (b, n).
        rows: Those of the rows, counted from the first one, that see any of it.
        bias: float32 (b or 1, H or 1, l or 1, n) of ``rows``, or None.
        visible: bool, likewise, or None where these rows see all of it.
        size: (b or 1, H or 1, l or 1), of all rows: how many keys each sees.
    """

    keys: slice | Tensor
    rows: slice
    bias: Tensor | None
    visible: Tensor | None
    size: Tensor


def _see_baskets(
    bias: AttentionBias, baskets: Baskets, group: slice, rows: slice, device: torch.device
) -> list[_SeenBasket]:
    """Returns the baskets that some rows of a group of sequences see."""
    seen = []
    every = slice(0, rows.stop - rows.start)
    for n, keys in enumerate(_basket_keys(baskets, group)):
        if bias.causal and isinstance(keys, slice) and keys.start >= rows.stop:
            continue  # in the future
        added, visible = bias.block(group, rows, keys, device)
        some = every
        if isinstance(keys, slice):
            size = torch.full((1, 1, 1), keys.stop - keys.start, device=device)
        else:
            filled = baskets.filled[group, n * baskets.basket_size : (n + 1) * baskets.basket_size][:, None, None]
            visible = filled if visible is None else visible & filled
        if visible is not None:
            size = visible.sum(-1)
            if device.type == "cpu":  # elsewhere looking would wait for the device
                seeing = (size > 0).any(1).any(0).nonzero().flatten()
                if not len(seeing):
                    continue  # outside of the rows' window
                if size.shape[-1] > 1:
                    some = slice(int(seeing[0]), int(seeing[-1]) + 1)
                    visible = visible[:, :, some]
                    added = added[:, :, some] if added is not None and added.shape[2] > 1 else added
                visible = None if visible.all() else visible
        seen.append(_SeenBasket(keys, some, added, visible, size))
    return seen


def _basket_keys(baskets: Baskets, group: slice) -> list[slice | Tensor]:
    """Returns the keys of each basket: slices where one sequence's content stands together, else positions (b, S)."""
    size = baskets.basket_size
    content = baskets.content[group.start]
    if group.stop - group.start == 1 and content is not None:
        first, stop = content
        return [slice(start, min(start + size, stop)) for start in range(first, stop, size)]
    return [baskets.slots[group, n * size : (n + 1) * size] for n in range(baskets.n_baskets)]


def _calibrated_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: AttentionBias,
    baskets: Baskets,
    seen: list[_SeenBasket],
    group: slice,
    rows: slice,
    *,
    scale: float,
    config: FairConfig,
    strength: float,
) -> Tensor:
    """Returns the calibrated output (b, h, l, D_v) of some rows and heads of a group of sequences.

    ``query`` holds these rows alone, ``key`` and ``value`` all positions, each these heads alone. ``bias`` and
    ``baskets`` are those of the whole batch; ``rows`` and ``group`` tell where in it, and ``seen`` which baskets count.
    """
    kernel = select_kernel(query, value)
    every = slice(0, query.shape[2])
    outputs: list[Tensor] = []
    lse: list[Tensor] = []
    for basket in seen:
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

    isolated_logits, isolated_visible = _isolated_logits(query, key, bias, baskets, group, rows, scale)
    shares = blended_shares(
        torch.stack(lse) if lse else isolated_logits[:0],
        isolated_logits,
        _stack_sizes([basket.size for basket in seen]) if seen else isolated_visible[:0].long(),
        isolated_visible,
        n_kept=baskets.n_kept,
        config=config,
        strength=strength,
    )
    isolated_value = expand_heads(_take_keys(value, baskets.isolated[group]), query.shape[1]).float()
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
    result = query.new_zeros(shape, dtype=torch.float32).transpose(1, 2)  # laid out as the kernel's outputs
    for basket, basket_output, share in zip(seen, outputs, shares.baskets, strict=True):
        result[:, :, basket.rows].addcmul_(basket_output, share[:, :, basket.rows, None])
    for i, share in enumerate(shares.isolated):
        result.addcmul_(isolated_value[:, :, i, None], share[..., None])
    return result


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


def _stack_sizes(sizes: list[Tensor]) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*sizes))  # type: ignore[no-untyped-call]


def _take_keys(tensor: Tensor, keys: slice | Tensor) -> Tensor:
    """Takes keys or values (b, H_kv, K, D) of a basket: a slice of them, or by positions (b, n)."""
    if isinstance(keys, slice):
        return tensor[:, :, keys]
    index = keys[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
    return tensor.gather(2, index)
