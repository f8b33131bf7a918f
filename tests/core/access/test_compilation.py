"""Models compiled with torch.compile: calibrated passes run uncompiled, plain ones compiled."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo import eval_frame

from fair_calibration import FairConfig, calibrate
from fair_calibration.access.compilation import run_uncompiled
from tests.conftest import TinyModel
from tests.core.tiny_models import documents

CONFIG = FairConfig(basket_size=8, strength=0.8)
TEXTS = documents([50, 7, 30])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert eval_frame._stance.stance == "default"


class Backend:
    """Compiles nothing, but counts how often graphs run."""

    def __init__(self) -> None:
        self.n_runs = 0

    def __deepcopy__(self, _: Any) -> Backend:
        return self  # also of a model's copy

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            self.n_runs += 1
            return graph(*args)

        return run


@pytest.mark.parametrize(
    ("family", "pooling", "when"),
    [("mpnet", "mean", "before"), ("bert", "cls", "after"), ("bloom", "lasttoken", "after")],
)
def test_a_compiled_transformer(family: str, pooling: str, when: str, tiny_model: TinyModel) -> None:
    expected = calibrate(tiny_model(family, pooling), CONFIG).encode(TEXTS)
    plain, backend = tiny_model(family, pooling), Backend()
    if when == "before":
        plain[0].model = torch.compile(plain[0].model, backend=backend)
        plain.encode(TEXTS)
        assert backend.n_runs > 0
    fair = calibrate(plain, CONFIG)
    if when == "after":
        fair[0].model = torch.compile(fair[0].model, backend=backend)
    # Graphs traced in plain passes are not used for calibrated ones, nor the other way round.
    for _ in range(2):
        backend.n_runs = 0
        queries = fair.encode_query(TEXTS)
        assert backend.n_runs > 0
        assert np.allclose(queries, plain.encode_query(TEXTS), atol=1e-5)
        backend.n_runs = 0
        assert np.array_equal(fair.encode(TEXTS), expected)
        assert backend.n_runs == 0
    assert "OptimizedModule" not in str(fair.summary())


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_a_compiled_layer(family: str, tiny_model: TinyModel) -> None:
    expected = calibrate(tiny_model(family, "mean"), CONFIG).encode(TEXTS)
    fair, backend = calibrate(tiny_model(family, "mean"), CONFIG), Backend()
    fair[0].model.encoder.layer[3].compile(backend=backend)
    fair.encode_query(TEXTS)
    runs = backend.n_runs
    assert runs > 0
    assert np.array_equal(fair.encode(TEXTS), expected)
    assert backend.n_runs == runs


def test_a_model_compiled_as_a_whole_is_refused(tiny_model: TinyModel) -> None:
    plain = tiny_model("mpnet", "mean")
    fair = calibrate(plain, CONFIG)
    fair.compile(backend=Backend())
    text = "a SentenceTransformer that is compiled as a whole cannot be calibrated; compile its transformer alone"
    with pytest.raises(ValueError, match=text):
        fair.encode(TEXTS)
    assert np.allclose(fair.encode_query(TEXTS), plain.encode_query(TEXTS), atol=1e-5)
    with pytest.raises(ValueError, match=text):
        fair.encode(TEXTS)
    assert fair.counts.documents == 0


def test_it_is_left_when_the_last_pass_ends() -> None:
    compiled_runs: list[bool] = []
    function = torch.compile(
        lambda x: x + 1, backend=lambda graph, _: lambda *a: compiled_runs.append(True) or graph(*a)
    )

    def runs_compiled() -> bool:
        compiled_runs.clear()
        function(torch.zeros(2))
        return bool(compiled_runs)

    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()
    seen: list[bool] = []

    def second() -> None:
        first_is_in.wait()
        with run_uncompiled():
            second_is_in.set()
            first_is_out.wait()
            seen.append(runs_compiled())

    thread = threading.Thread(target=second)
    thread.start()
    assert runs_compiled()
    with run_uncompiled():
        first_is_in.set()
        second_is_in.wait()
        assert not runs_compiled()
    first_is_out.set()
    thread.join()
    assert seen == [False]
    assert runs_compiled()
    with pytest.raises(KeyError), run_uncompiled(), run_uncompiled():
        raise KeyError
    assert runs_compiled()
    with torch.compiler.set_stance("fail_on_recompile"):
        with run_uncompiled():
            pass
        assert eval_frame._stance.stance == "fail_on_recompile"
