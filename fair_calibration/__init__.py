"""Attention calibration for dense document encoders, so that documents are also found by what stands late in them."""

from importlib.metadata import version

from fair_calibration.config import FairConfig
from fair_calibration.even_chunks.config import EvenChunks
from fair_calibration.even_chunks.report import EvenChunksSummary
from fair_calibration.model import calibrate, uncalibrate
from fair_calibration.report import DocumentCounts, Summary
from fair_calibration.sentence_transformer import FairSentenceTransformer
from fair_calibration.settings import PRESETS

__version__ = version("fair-calibration")
__all__ = [
    "PRESETS",
    "DocumentCounts",
    "EvenChunks",
    "EvenChunksSummary",
    "FairConfig",
    "FairSentenceTransformer",
    "Summary",
    "calibrate",
    "uncalibrate",
]
