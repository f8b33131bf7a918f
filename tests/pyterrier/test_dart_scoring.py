from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyterrier_fair import DartSettings, DartState
from pyterrier_fair.dart_scoring import Array, adapt, adapted_scores, score

SETTINGS = DartSettings(n_pos=2, n_neg=4, temperature=0.3, alpha_mar=0.4, beta_mar=0.5, learning_rate=0.2)


def unit(rows: int, *, seed: int = 0, dimension: int = 6) -> Array:
    vectors = np.random.default_rng(seed).normal(size=(rows, dimension)) + 0.7
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def adapt_full_matrix(query: Array, documents: Array, start: Array, settings: DartSettings) -> tuple[Array, int]:
    """Adapts the whole matrix W with torch: its loss, its gradients and its optimizer.

    Returns W and the number of pairs within the margin, over all steps.
    """
    q, d = torch.from_numpy(query), torch.from_numpy(documents)
    similarities = d @ q
    order = torch.argsort(similarities, descending=True, stable=True)
    top, bottom = order[: settings.n_pos], order[-settings.n_neg :]
    positive_weights = torch.softmax(similarities[top] / settings.temperature, 0)
    negative_weights = torch.softmax(-similarities[bottom] / settings.temperature, 0)
    margin = settings.alpha_mar + settings.beta_mar * (1 - similarities.max())
    matrix = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.SGD([matrix], lr=settings.learning_rate, momentum=settings.momentum)
    active = 0
    for _ in range(settings.steps):
        loss = torch.zeros((), dtype=torch.float64)
        for i, positive in zip(positive_weights, top, strict=True):
            for j, negative in zip(negative_weights, bottom, strict=True):
                hinge = torch.relu(margin - q @ matrix @ d[positive] + q @ matrix @ d[negative])
                active += int(hinge > 0)
                loss = loss + i * j * hinge
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return matrix.detach().numpy(), active


@pytest.mark.parametrize("changes", [{}, {"steps": 1}, {"momentum": 0.0}, {"learning_rate": 2.0}, {"beta_mar": 0.0}])
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_gradient_steps_are_those_of_autograd_with_the_full_matrix(changes: dict[str, Any], scale: float) -> None:
    settings = replace(SETTINGS, **changes)
    query, documents = scale * unit(1, seed=3)[0], unit(9)
    start = np.eye(6) + 0.1 * np.random.default_rng(5).normal(size=(6, 6))
    expected, active = adapt_full_matrix(query, documents, start, settings)
    found = start + np.outer(query, adapt(query, documents, query @ start, settings))
    assert 0 < active < settings.steps * settings.n_pos * settings.n_neg or settings.steps == 1
    assert np.abs(expected - start).max() > 1e-3
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_the_state_follows_the_equations_with_full_matrices() -> None:
    settings = replace(SETTINGS, beta_meta=0.3, alpha_ema=0.8)
    state, w_meta, w_ema = DartState(), np.eye(6), np.eye(6)
    for seed in range(4):
        query, documents = unit(1, seed=10 + seed)[0], unit(9, seed=seed)
        found = adapted_scores(query, documents, settings, state)
        adapted, _ = adapt_full_matrix(query, documents, w_meta, settings)
        w_meta = w_meta + 0.3 * (adapted - w_meta)
        w_ema = 0.8 * w_ema + 0.2 * adapted
        np.testing.assert_allclose(state.w_meta, w_meta, atol=1e-12)
        np.testing.assert_allclose(state.w_ema, w_ema, atol=1e-12)
        np.testing.assert_allclose(found, documents @ (query @ w_ema), atol=1e-12)
    assert state.n_queries == 4
    assert np.abs(w_meta - w_ema).max() > 1e-3


def test_stateless_scores_are_those_of_the_matrix_adapted_to_the_query_alone() -> None:
    query, documents = unit(1, seed=3)[0], unit(9)
    adapted, _ = adapt_full_matrix(query, documents, np.eye(6), SETTINGS)
    np.testing.assert_allclose(
        adapted_scores(query, documents, SETTINGS, None), documents @ (query @ adapted), atol=1e-12
    )


def test_the_defaults_make_the_two_matrices_equal() -> None:
    state, settings = DartState(), DartSettings(alpha_mar=2.0)
    for seed in range(3):
        adapted_scores(unit(1, seed=10 + seed)[0], unit(40, seed=seed), settings, state)
    assert np.abs(state.w_meta - np.eye(6)).max() > 1e-3
    np.testing.assert_allclose(state.w_meta, state.w_ema, atol=1e-12)


@pytest.mark.parametrize("state", [True, False])
def test_a_confident_ranking_is_not_adapted(state: bool) -> None:
    query = np.array([1.0, 0.0])
    documents = np.array([[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 20)
    scores = adapted_scores(query, documents, DartSettings(), DartState() if state else None)
    assert np.array_equal(scores, documents[:, 0])


def test_the_order_of_dot_products_survives_scaling() -> None:
    """Vectors of any length: a common factor of the query or of all documents scales the scores, and nothing else."""
    query, documents = unit(1, seed=3)[0], unit(9) * np.linspace(1, 2, 9)[:, None]
    scores = adapted_scores(query, documents, SETTINGS, None)
    scaled = adapted_scores(7 * query, 0.25 * documents, SETTINGS, None)
    np.testing.assert_allclose(scaled, 7 * 0.25 * scores, rtol=1e-12)
    assert not np.allclose(scores, documents @ query)
    without = adapted_scores(query, documents, replace(SETTINGS, learning_rate=0), None)
    np.testing.assert_allclose(without, documents @ query, rtol=1e-12)


@pytest.mark.parametrize("factors", [(0, 1), (1, 0), (0, 0)])
def test_zero_vectors_score_zero(factors: tuple[int, int]) -> None:
    state = DartState()
    for _ in range(2):
        scores = adapted_scores(factors[0] * unit(1)[0], factors[1] * unit(9), SETTINGS, state)
        assert np.array_equal(scores, np.zeros(9))
    assert np.isfinite(state.w_ema).all()


def test_equal_documents_get_equal_scores() -> None:
    rng = np.random.default_rng(0)
    documents = np.repeat(rng.normal(size=(1, 387)), 101, axis=0)
    assert len(set(score(rng.normal(size=387), documents))) == 1


# State


def test_a_saved_state_goes_on_exactly(tmp_path: Path) -> None:
    state = DartState()
    for seed in range(3):
        adapted_scores(unit(1, seed=10 + seed)[0], unit(9, seed=seed), SETTINGS, state)
    state.save(tmp_path / "state.npz")
    loaded = DartState.load(tmp_path / "state.npz")
    assert (loaded.n_queries, repr(loaded)) == (3, "DartState(n_queries=3, dimension=6)")
    assert np.array_equal(loaded.w_meta, state.w_meta)
    assert np.array_equal(loaded.w_ema, state.w_ema)
    again = [adapted_scores(unit(1, seed=20)[0], unit(9, seed=9), SETTINGS, s) for s in (state, loaded)]
    assert np.array_equal(*again)
    assert np.array_equal(loaded.w_ema, state.w_ema)


def test_a_new_state_can_be_saved(tmp_path: Path) -> None:
    DartState().save(tmp_path / "state")  # the name stays as given
    assert repr(DartState.load(tmp_path / "state")) == "DartState(n_queries=0, dimension=0)"


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    with pytest.raises(FileNotFoundError):
        DartState.load(path)
    DartState(np.eye(3), np.eye(3), 1).save(path)
    whole = path.read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"path: .*state\.npz is not a state that DartState\.save wrote"):
            DartState.load(path)
    np.savez(path, w_meta=np.eye(3))
    with pytest.raises(ValueError, match="is not a state"):
        DartState.load(path)
    np.save(tmp_path / "array.npy", np.eye(3))
    with pytest.raises(ValueError, match="is not a state"):
        DartState.load(tmp_path / "array.npy")


def test_given_matrices_are_copied_and_used() -> None:
    """One array for both would else be changed twice, and matrices without queries would be replaced."""
    matrix = np.diag([1.0, 2, 3, 4, 5, 6])
    both = DartState(matrix, matrix)
    scores = adapted_scores(unit(1)[0], unit(9), SETTINGS, both)
    assert np.array_equal(matrix, np.diag([1.0, 2, 3, 4, 5, 6]))
    assert scores.tolist() == adapted_scores(unit(1)[0], unit(9), SETTINGS, DartState(matrix, matrix, 7)).tolist()
    assert not np.allclose(scores, adapted_scores(unit(1)[0], unit(9), SETTINGS, DartState()))


@pytest.mark.parametrize(
    ("w_meta", "w_ema", "n_queries", "text"),
    [
        (np.ones((5, 3)), np.ones((5, 3)), 1, r"expected two square matrices of one shape, got \(5, 3\)"),
        (np.eye(3), np.eye(2), 1, "expected two square matrices"),
        (np.array(1.0), np.array(1.0), 1, "expected two square matrices"),
        (np.eye(3) * np.nan, np.eye(3), 1, "expected finite numbers"),
        (np.eye(3), np.eye(3), -1, "n_queries: expected at least 0, got -1"),
    ],
)
def test_what_is_no_state_is_refused(w_meta: Array, w_ema: Array, n_queries: int, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        DartState(w_meta, w_ema, n_queries)
    np.savez(tmp_path / "state.npz", w_meta=w_meta, w_ema=w_ema, n_queries=n_queries)
    with pytest.raises(ValueError, match=f"is not a state that DartState.save wrote: .*{text}"):
        DartState.load(tmp_path / "state.npz")


def test_a_state_of_another_dimension_is_refused() -> None:
    state = DartState()
    adapted_scores(unit(1)[0], unit(9), SETTINGS, state)
    with pytest.raises(ValueError, match="state: it was adapted to vectors of 6 dimensions, these have 5"):
        adapted_scores(unit(1, dimension=5)[0], unit(9, dimension=5), SETTINGS, state)


# Settings


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"n_pos": 0}, ValueError, "n_pos: expected an integer of at least 1, got 0"),
        ({"n_neg": 2.0}, TypeError, "n_neg: expected an integer"),
        ({"steps": True}, TypeError, "steps: expected an integer"),
        ({"temperature": 0}, ValueError, "temperature: expected a number above 0"),
        ({"temperature": -1.0}, ValueError, "temperature: expected a finite number of at least 0, got -1.0"),
        ({"learning_rate": float("nan")}, ValueError, "learning_rate: expected a finite number"),
        ({"learning_rate": float("inf")}, ValueError, "learning_rate: expected a finite number"),
        ({"alpha_mar": "1"}, TypeError, "alpha_mar: expected a finite number of at least 0, got '1' \\(str\\)"),
        ({"momentum": 1.5}, ValueError, "momentum: expected a number in \\[0, 1\\], got 1.5"),
        ({"beta_meta": -0.1}, ValueError, "beta_meta: expected a number in \\[0, 1\\]"),
        ({"alpha_ema": None}, TypeError, "alpha_ema: expected a number in \\[0, 1\\], got None"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DartSettings(**changes)


def test_settings_are_values() -> None:
    assert DartSettings(n_pos=np.int64(5), momentum=1) == DartSettings(n_pos=5, momentum=1.0)
    assert hash(DartSettings(steps=2)) == hash(DartSettings(steps=2))
    assert DartSettings() != DartSettings(steps=2)
