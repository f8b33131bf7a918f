"""Position-fair dense encoders for PyTerrier."""

from fair_calibration import PRESETS, FairConfig
from pyterrier_fair.datasets import PositionDataset
from pyterrier_fair.encoder import FairBiEncoder

__all__ = ["PRESETS", "FairBiEncoder", "FairConfig", "PositionDataset"]
