"""Position-fair dense encoders for PyTerrier."""

from fair_calibration import PRESETS, EvenChunks, FairConfig
from pyterrier_fair.biencoder import FairBiEncoder
from pyterrier_fair.cache import FairDocCache, cache_path
from pyterrier_fair.dart import Dart
from pyterrier_fair.dart_scoring import DartSettings, DartState
from pyterrier_fair.datasets import PositionDataset
from pyterrier_fair.index import FairIndex
from pyterrier_fair.passages import FairPassages

__all__ = [
    "PRESETS",
    "Dart",
    "DartSettings",
    "DartState",
    "EvenChunks",
    "FairBiEncoder",
    "FairConfig",
    "FairDocCache",
    "FairIndex",
    "FairPassages",
    "PositionDataset",
    "cache_path",
]
