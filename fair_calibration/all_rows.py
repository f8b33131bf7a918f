"""The fast path for mean pooling: every row calibrated in one pass over the keys, basket by basket.

Attention restricted to basket b gives an output and a log-sum-exp; the plain output is the baskets' outputs weighted by
the softmax of the log-sum-exps. With other weights the same sum is the calibrated output, and no L x L matrix exists.
"""

from __future__ import annotations

from collections.abc import Iterator

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
        for heads, kv_heads, rows in _blocks(group_query, group_value, range(first, stop), baskets.n_baskets):
            block = _calibrated_block(
                group_query[:, heads, rows],
                group_key[:, kv_heads],
                group_value[:, kv_heads],
                bias.of_heads(heads),
                baskets,
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


def _blocks(query: Tensor, value: Tensor, rows: range, n_baskets: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yields heads, their key-value heads and rows, such that the outputs of all baskets stay in bounds at once."""
    n_sequences, n_heads = query.shape[:2]
    n_kv, dim = value.shape[1], value.shape[-1]
    n_groups = n_heads // n_kv
    bytes_per_row = n_sequences * n_groups * n_baskets * dim * 4  # of one key-value head
    if query.device.type == "cpu":
        n_rows = min(len(rows), _ROWS_PER_BLOCK)
        n_kv_heads = max(1, _CPU_BYTES // (bytes_per_row * n_rows))
    else:
        n_rows = max(1, _DEVICE_BYTES // (bytes_per_row * n_kv))
        n_kv_heads = n_kv
    for start in range(rows.start, rows.stop, n_rows):
        for kv in range(0, n_kv, n_kv_heads):
            kv_stop = min(kv + n_kv_heads, n_kv)
            yield (
                slice(kv * n_groups, kv_stop * n_groups),
                slice(kv, kv_stop),
                slice(start, min(start + n_rows, rows.stop)),
            )


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
    group: slice,
    rows: slice,
    *,
    scale: float,
    config: FairConfig,
    strength: float,
) -> Tensor:
    """Returns the calibrated output (b, h, l, D_v) of some rows and heads of a group of sequences.

    ``query`` holds these rows alone, ``key`` and ``value`` all positions, each these heads alone. ``bias`` and
    ``baskets`` are those of the whole batch; ``rows`` and ``group`` tell where in it.
    """
    device, kernel = query.device, select_kernel(query, value)
    outputs: list[Tensor] = []
    lse: list[Tensor] = []
    sizes: list[Tensor] = []  # (b or 1, H or 1, l or 1): the keys of the basket that each row sees
    for n, keys in enumerate(_basket_keys(baskets, group)):
        added, visible = bias.block(group, rows, keys, device)
        if isinstance(keys, slice):
            size = torch.full((1, 1, 1), keys.stop - keys.start, device=device)
        else:
            filled = baskets.filled[group, n * baskets.basket_size : (n + 1) * baskets.basket_size][:, None, None]
            visible = filled if visible is None else visible & filled
        if visible is not None:
            size = visible.sum(-1)
            if device.type == "cpu":  # elsewhere looking would wait for the device
                if not visible.any():
                    continue  # outside of the rows' window or in their future
                visible = None if visible.all() else visible
        basket_output, basket_lse = attend_with_lse(
            query,
            _take_keys(key, keys),
            _take_keys(value, keys),
            bias=added,
            visible=visible,
            scale=scale,
            kernel=kernel,
        )
        outputs.append(basket_output)
        lse.append(basket_lse)
        sizes.append(size)

    isolated_logits, isolated_visible = _isolated_logits(query, key, bias, baskets, group, rows, scale)
    shares = blended_shares(
        torch.stack(lse) if lse else isolated_logits[:0],
        isolated_logits,
        _stack_sizes(sizes) if sizes else isolated_visible[:0].long(),
        isolated_visible,
        n_kept=baskets.n_kept,
        config=config,
        strength=strength,
    )
    isolated_value = expand_heads(_take_keys(value, baskets.isolated[group]), query.shape[1]).float()
    if outputs:
        result = outputs[0] * shares.baskets[0, ..., None]
    else:  # rows that see isolated tokens alone
        result = query.new_zeros((*query.shape[:3], value.shape[-1]), dtype=torch.float32)
    for basket_output, share in zip(outputs[1:], shares.baskets[1:], strict=True):
        result.addcmul_(basket_output, share[..., None])
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
