"""Position-fair encoders and position-aware tasks for MTEB. Importing registers nothing: call `register` for that."""

from fair_calibration import PRESETS, EvenChunks, FairConfig
from mteb_fair.encoder import FairEncoder
from mteb_fair.model_registry import register_model
from mteb_fair.passage_search import FairPassageSearch
from mteb_fair.scores import summarize
from mteb_fair.task_registry import get_tasks, register
from mteb_fair.tasks import FineWebPosQ, PosIR, PosIRCrossLingual, PositionDemoRetrieval, SQuADPosQ
from mteb_fair.variant import Variant

__all__ = [
    "PRESETS",
    "EvenChunks",
    "FairConfig",
    "FairEncoder",
    "FairPassageSearch",
    "FineWebPosQ",
    "PosIR",
    "PosIRCrossLingual",
    "PositionDemoRetrieval",
    "SQuADPosQ",
    "Variant",
    "get_tasks",
    "register",
    "register_model",
    "summarize",
]
