"""Position-fair encoders and position-aware tasks for MTEB. Importing registers nothing: call `register()` for that."""

from fair_calibration import PRESETS, FairConfig
from mteb_fair.demo import PositionDemoRetrieval
from mteb_fair.encoder import FairEncoder
from mteb_fair.fineweb_posq import FineWebPosQ
from mteb_fair.identity import Variant
from mteb_fair.posir import PosIR, PosIRCrossLingual
from mteb_fair.registry import build_benchmark, get_tasks, register, register_model
from mteb_fair.squad_posq import SQuADPosQ
from mteb_fair.summary import summarize

__all__ = [
    "PRESETS",
    "FairConfig",
    "FairEncoder",
    "FineWebPosQ",
    "PosIR",
    "PosIRCrossLingual",
    "PositionDemoRetrieval",
    "SQuADPosQ",
    "Variant",
    "build_benchmark",
    "get_tasks",
    "register",
    "register_model",
    "summarize",
]
