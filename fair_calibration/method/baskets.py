"""Cuts the content of documents into baskets, and finds their isolated tokens and pooled rows.

All of it depends on the attention mask and the settings alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fair_calibration.config import FairConfig


@dataclass(frozen=True)
class Baskets:
    """The roles of the tokens in a batch of B sequences padded to K keys.

    There are at most N baskets of up to S tokens in a sequence, and I tokens outside the baskets. The last ``n_kept``
    of these are the tokens of a prompt that pooling excludes. They keep their own attention mass, whatever the settings
    of isolated tokens are.
    """

    slots: Tensor  # int64 (B, N * S), the key position of each token in each basket; 0 for empty slots at its end
    filled: Tensor  # bool (B, N * S), which slots are not empty
    isolated: Tensor  # int64 (B, I), the positions of the tokens outside the baskets; 0 for one that a sequence lacks
    isolated_filled: Tensor  # bool (B, I), which of them the sequence has
    n_kept: int
    segment_of_key: Tensor  # int64 (B, K): n for basket n, N + i for isolated token i, N + I for padding
    pooled: Tensor  # int64 (B,), the row that cls or last-token pooling takes
    calibrated: Tensor  # bool (B,), False for a sequence with too little content, which stays as it is
    is_calibrated: tuple[bool, ...]  # the same; reading it does not wait for the device
    valid: tuple[tuple[int, int], ...]  # of every sequence, the range (first, last + 1) of its tokens
    content: tuple[tuple[int, int] | None, ...]  # the same of the tokens in baskets; None if others are among them
    basket_size: int  # S
    sizes: tuple[int, ...]  # of every sequence, the number of tokens in a basket: S or, of two halves, less

    @property
    def n_baskets(self) -> int:
        """N, the largest number of baskets in a sequence of the batch."""
        return self.slots.shape[1] // self.basket_size

    def to(self, device: torch.device) -> Baskets:
        """Returns the baskets with their tensors on ``device``."""
        tensors: dict[str, Any] = {
            f.name: value.to(device) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)


def build_baskets(attention_mask: Tensor, config: FairConfig, *, prompt_length: int = 0) -> Baskets:
    """Cuts the content of every sequence into consecutive baskets of one size; the last one takes the remainder.

    Args:
        attention_mask: (B, K), nonzero for tokens and 0 for padding, which may stand on either side.
        config: The settings, with "auto" resolved (`FairConfig.resolve`).
        prompt_length: The number of leading tokens, BOS included, that pooling excludes. They are in no basket.

    Returns:
        The baskets, on the CPU.

    Raises:
        ValueError: ``attention_mask`` is not (B, K), or ``config`` has settings on "auto".
    """
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask: expected shape (batch, length), got {tuple(attention_mask.shape)}")
    if config.pooling == "auto" or config.isolate == "auto":
        raise ValueError("config: 'auto' settings must be resolved first, with FairConfig.resolve(pooling)")
    valid = attention_mask.detach().to("cpu").bool()
    n_sequences, length = valid.shape
    rank = valid.cumsum(1) - 1  # the index of a token among the tokens of its sequence, not counting padding
    n_valid = valid.sum(1)
    first_rank = 0
    if config.pooling == "cls" and prompt_length:
        first_rank = prompt_length  # pooling takes the first token after the prompt
    is_bos = valid & (rank == first_rank)
    is_eos = valid & (rank == n_valid[:, None] - 1) & (rank > first_rank)
    outside = {"none": [], "bos": [is_bos], "bos_eos": [is_bos, is_eos]}[config.isolate]  # I masks (B, K)
    content = valid.clone()
    for mask in outside:
        content &= ~mask
    outside += [content & (rank == i) for i in range(prompt_length)]
    content &= rank >= prompt_length

    n_content = content.sum(1)
    size = config.basket_size
    n_baskets = max(1, -(-int(n_content.max()) // size)) if n_sequences else 1
    slots = torch.zeros(n_sequences, n_baskets * size, dtype=torch.int64)
    filled = torch.zeros(n_sequences, n_baskets * size, dtype=torch.bool)
    sequence, position = content.nonzero(as_tuple=True)
    sizes = torch.full_like(n_content, size)
    if config.last_basket == "halves":
        sizes = torch.where((n_content > size) & (n_content <= 2 * size), (n_content + 1) // 2, size)
    index = (content.cumsum(1) - 1)[sequence, position]  # of a token among the content of its sequence
    basket = index // sizes[sequence]
    slot = basket * size + index % sizes[sequence]
    slots[sequence, slot] = position
    filled[sequence, slot] = True

    stacked = torch.stack(outside, dim=1) if outside else valid.new_zeros(n_sequences, 0, length)  # (B, I, K)
    segment = torch.full((n_sequences, length), n_baskets + len(outside), dtype=torch.int64)
    segment[sequence, position] = basket
    for i, mask in enumerate(outside):
        segment[mask] = n_baskets + i

    valid_ranges, content_ranges = _ranges(valid), _ranges(content)
    last = torch.tensor([stop - 1 for _, stop in valid_ranges], dtype=torch.int64).clamp(min=0)
    calibrated = n_content >= config.min_content_tokens
    return Baskets(
        slots=slots,
        filled=filled,
        isolated=stacked.to(torch.uint8).argmax(-1),
        isolated_filled=stacked.any(-1),
        n_kept=prompt_length,
        segment_of_key=segment,
        pooled=is_bos.to(torch.uint8).argmax(1) if config.pooling == "cls" else last,
        calibrated=calibrated,
        is_calibrated=tuple(calibrated.tolist()),
        valid=valid_ranges,
        content=tuple(
            (start, stop) if stop - start == n else None
            for (start, stop), n in zip(content_ranges, n_content.tolist(), strict=True)
        ),
        basket_size=size,
        sizes=tuple(sizes.tolist()),
    )


def _ranges(mask: Tensor) -> tuple[tuple[int, int], ...]:
    """Returns (first, last + 1) of the positions of True in every row; (0, 0) if there is none."""
    positions = torch.arange(mask.shape[1])
    first = torch.where(mask, positions, mask.shape[1]).amin(1)
    stop = torch.where(mask, positions + 1, 0).amax(1)
    return tuple((min(a, b), b) for a, b in zip(first.tolist(), stop.tolist(), strict=True))
