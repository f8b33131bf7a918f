"""Position-fair dense encoders for PyTerrier."""

from fair_calibration import PRESETS, FairConfig
from pyterrier_fair.caching import FairDocCache, cache_path
from pyterrier_fair.datasets import PositionDataset
from pyterrier_fair.encoder import FairBiEncoder
from pyterrier_fair.index import FairIndex

__all__ = ["PRESETS", "FairBiEncoder", "FairConfig", "FairDocCache", "FairIndex", "PositionDataset", "cache_path"]
