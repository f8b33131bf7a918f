"""The position-aware tasks, one module per benchmark; `TASKS` has them by name."""

from mteb_fair.tasks.demo import PositionDemoRetrieval
from mteb_fair.tasks.fineweb_posq import FineWebPosQ
from mteb_fair.tasks.posir import PosIR, PosIRCrossLingual
from mteb_fair.tasks.position_task import PositionTask
from mteb_fair.tasks.squad_posq import SQuADPosQ

TASKS: dict[str, type[PositionTask]] = {
    task.metadata.name: task for task in (PosIR, PosIRCrossLingual, FineWebPosQ, SQuADPosQ, PositionDemoRetrieval)
}
"""The tasks of this package by name."""

__all__ = ["TASKS", "FineWebPosQ", "PosIR", "PosIRCrossLingual", "PositionDemoRetrieval", "PositionTask", "SQuADPosQ"]
