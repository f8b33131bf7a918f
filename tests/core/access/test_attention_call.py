from __future__ import annotations

import torch

from fair_calibration.access.attention_call import expand_heads


def test_expand_heads() -> None:
    key = torch.randn(2, 2, 9, 8)
    assert expand_heads(key, 2) is key
    expanded = expand_heads(key, 4)
    assert torch.equal(expanded[:, 0], expanded[:, 1])
    assert torch.equal(expanded[:, 2], key[:, 1])
    one = expand_heads(key[:, :1], 4)
    assert one.shape == (2, 4, 9, 8)
    assert one.data_ptr() == key.data_ptr()
