"""Position-fair evaluation: whether a system finds what stands late in a document as well as what stands early.

Evaluation by position is imported from here and needs neither torch nor a model. What builds data (`probes`,
`passages`) or looks into models (`attention_profile`, `reflection`, ...) is imported from its own module.
"""

from fair_evaluation.experiments import from_experiment
from fair_evaluation.measures import harmonic_mean, position_sensitivity_index, slope
from fair_evaluation.mteb_results import from_mteb
from fair_evaluation.position_evaluation import evaluate_positions
from fair_evaluation.position_result import PositionEvaluation
from fair_evaluation.psi_difference import PsiDifference, psi_test
from fair_evaluation.runs import from_run

__all__ = [
    "PositionEvaluation",
    "PsiDifference",
    "evaluate_positions",
    "from_experiment",
    "from_mteb",
    "from_run",
    "harmonic_mean",
    "position_sensitivity_index",
    "psi_test",
    "slope",
]
