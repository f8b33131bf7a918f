from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from fair_calibration import FairConfig
from fair_evaluation.attention_profile import attention_profile
from fair_evaluation.plots import commonest_baskets, plot_attention, plot_groups, plot_reflection
from fair_evaluation.reflection import Reflection, segment_reflection
from tests.conftest import TinyModel
from tests.core.tiny_models import documents

SCORES = pd.DataFrame(
    [("plain", "beginning", 0.9, 0.8, 1.0), ("plain", "end", 0.6, 0.5, 0.65), ("fair", "beginning", 0.8, 0.7, 0.9)],
    columns=["name", "group", "mean", "low", "high"],
)


@pytest.fixture(scope="module")
def profile(tiny_model: TinyModel) -> pd.DataFrame:
    texts = documents([30, 31, 10])
    return attention_profile(tiny_model(), texts, config=FairConfig(basket_size=16, isolate="bos_eos"), per_head=True)


@pytest.fixture(scope="module")
def reflection(tiny_model: TinyModel) -> Reflection:
    return segment_reflection(tiny_model(), documents([64, 70]), show_progress_bar=False)


def saved(figure: Figure, path: Path) -> int:
    assert isinstance(figure, Figure)
    assert figure.canvas.manager is None  # it belongs to no window
    figure.savefig(path / "figure.png")
    return (path / "figure.png").stat().st_size


def test_attention(profile: pd.DataFrame, tmp_path: Path) -> None:
    figure = plot_attention(profile, n_baskets=2)
    plain, calibrated, bar = figure.axes
    assert [ax.get_title() for ax in (plain, calibrated)] == ["plain", "calibrated"]
    assert [label.get_text() for label in plain.get_xticklabels()] == ["bos", "0", "1", "eos"]
    assert [label.get_text() for label in plain.get_yticklabels()] == ["0", "1", "2", "3"]
    of_two = profile[profile["n_baskets"] == 2]
    for ax, column in ((plain, "share_plain"), (calibrated, "share_calibrated")):
        (image,) = ax.get_images()
        drawn = np.asarray(image.get_array())
        np.testing.assert_allclose(drawn.sum(1), 1, atol=1e-6)
        np.testing.assert_allclose(drawn[:, 3], of_two[of_two["segment"] == "eos"].groupby("layer")[column].mean())
        assert image.get_clim() == (
            0,
            of_two.groupby(["layer", "segment", "basket"], dropna=False)[["share_plain", "share_calibrated"]]
            .mean()
            .to_numpy()
            .max(),
        )  # one scale for both
    assert bar.get_ylabel() == "share of attention"
    assert saved(figure, tmp_path) > 5000


def test_attention_weighs_by_documents() -> None:
    rows = [
        (0, 1, calibrated, "basket", 0, documents, share, share)
        for calibrated, documents, share in [(False, 3, 0.2), (True, 1, 0.6)]
    ]
    columns = ["layer", "n_baskets", "calibrated", "segment", "basket", "documents", "share_plain", "share_calibrated"]
    (image,) = plot_attention(pd.DataFrame(rows, columns=columns)).axes[0].get_images()
    assert np.asarray(image.get_array()) == pytest.approx(np.array([[0.3]]))


def test_attention_of_the_commonest_number_of_baskets(profile: pd.DataFrame, tiny_model: TinyModel) -> None:
    (long,) = set(profile["n_baskets"][profile["documents"] == 1].tolist()) - {1, 2}
    config = FairConfig(basket_size=16, isolate="bos_eos")
    for lengths, commonest in (([10, 10, 31], 1), ([10, 31, 31], long), ([10, 31], long)):
        mixed = attention_profile(tiny_model(), documents(lengths), config=config)
        assert commonest_baskets(mixed) == commonest
        ticks = [label.get_text() for label in plot_attention(mixed).axes[0].get_xticklabels()]
        assert ticks == ["bos", *map(str, range(commonest)), "eos"]


def test_reflection(reflection: Reflection, tmp_path: Path) -> None:
    for by in ("position", "as_written", "content"):
        figure = plot_reflection({"plain": reflection, "strength .5": reflection}, by=by)
        (ax,) = figure.axes
        frame = reflection.frame[reflection.frame["by"] == by]
        assert [line.get_label() for line in ax.lines] == ["plain", "strength .5"]
        np.testing.assert_array_equal(ax.lines[0].get_xdata(), [0, 1, 2, 3])
        np.testing.assert_array_equal(ax.lines[0].get_ydata(), frame["similarity"])
        outline = ax.collections[0].get_paths()[0].vertices
        assert (outline[:, 1].min(), outline[:, 1].max()) == (frame["low"].min(), frame["high"].max())
        assert saved(figure, tmp_path) > 5000


def test_groups(tmp_path: Path) -> None:
    figure = plot_groups(SCORES, ylabel="RR@10")
    (ax,) = figure.axes
    assert ax.get_ylabel() == "RR@10"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["beginning", "end"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["plain", "fair"]
    plain, fair = ax.containers
    assert plain.lines[0].get_ydata().tolist() == [0.9, 0.6]
    assert fair.lines[0].get_ydata().tolist() == [0.8]
    ends = [segment[:, 1].tolist() for segment in plain.lines[2][0].get_segments()]
    assert ends == [pytest.approx([0.8, 1.0]), pytest.approx([0.5, 0.65])]
    assert saved(figure, tmp_path) > 5000
    (one,) = plot_groups(SCORES[:2]).axes
    assert one.containers[0].lines[0].get_xdata().tolist() == [0, 1]


def twice(frame: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([frame, frame[:1]])


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (SCORES.drop(columns=["low", "high"]), r"scores: expected the columns .*, \['low', 'high'\] are missing"),
        (SCORES[:0], "scores: expected at least one row, got none"),
        (twice(SCORES), r"scores: expected one row per name and group, got \['plain', 'beginning'\] twice"),
        (SCORES.assign(low=0.95), "scores: expected low <= mean <= high in every row"),
        (SCORES.assign(mean=np.nan), "scores: expected low <= mean <= high in every row"),
    ],
)
def test_bad_scores(scores: pd.DataFrame, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plot_groups(scores)


def test_other_errors(profile: pd.DataFrame, reflection: Reflection) -> None:
    with pytest.raises(ValueError, match=r"n_baskets: the profile has documents of \[1, 2, 3\] baskets, got 9"):
        plot_attention(profile, n_baskets=9)
    with pytest.raises(ValueError, match=r"profile: expected the columns .*\['layer'\] are missing"):
        plot_attention(profile.drop(columns="layer"))
    with pytest.raises(ValueError, match="reflections: expected at least one, got none"):
        plot_reflection({})
    with pytest.raises(ValueError, match=r"by: expected one of \['as_written', 'content', 'position'\], got 'place'"):
        plot_reflection({"plain": reflection}, by="place")


def test_without_matplotlib() -> None:
    # In a fresh interpreter: imported without it, and a clear error only when a figure is drawn.
    code = """
import sys
sys.modules["matplotlib"] = None
import pandas as pd
from fair_evaluation.plots import plot_groups
scores = pd.DataFrame([("plain", "end", .5, .4, .6)], columns=["name", "group", "mean", "low", "high"])
try:
    plot_groups(scores)
except ImportError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == 'figures need matplotlib: pip install "fair-calibration[evaluation]"\n'


def test_no_global_state() -> None:
    code = """
import sys, pandas as pd
from fair_evaluation.plots import plot_groups
plot_groups(pd.DataFrame([("plain", "end", .5, .4, .6)], columns=["name", "group", "mean", "low", "high"]))
print("matplotlib.pyplot" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
