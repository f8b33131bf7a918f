"""The calibrated model of the tests of builds."""

from __future__ import annotations

import pytest

from fair_calibration import FairSentenceTransformer, calibrate
from tests.conftest import TinyModel
from tests.indexing.ray_workers import CONFIG


@pytest.fixture
def model(tiny_model: TinyModel) -> FairSentenceTransformer:
    """Returns a tiny calibrated model."""
    return calibrate(tiny_model(), CONFIG)
