"""Position-fair dense encoders for PyTerrier."""

from fair_calibration import PRESETS, EvenChunks, FairConfig
from pyterrier_fair.biencoder import FairBiEncoder
from pyterrier_fair.cache import FairDocCache, cache_path
from pyterrier_fair.datasets import PositionDataset
from pyterrier_fair.index import FairIndex
from pyterrier_fair.passages import FairPassages

__all__ = [
    "PRESETS",
    "EvenChunks",
    "FairBiEncoder",
    "FairConfig",
    "FairDocCache",
    "FairIndex",
    "FairPassages",
    "PositionDataset",
    "cache_path",
]
