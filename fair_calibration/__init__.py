"""Attention calibration: dense encoders that find what stands late in a document."""

from fair_calibration.config import PRESETS, FairConfig
from fair_calibration.model import FairSentenceTransformer, calibrate, uncalibrate
from fair_calibration.report import DocumentCounts, Summary

__all__ = [
    "PRESETS",
    "DocumentCounts",
    "FairConfig",
    "FairSentenceTransformer",
    "Summary",
    "calibrate",
    "uncalibrate",
]
