"""Position-fair evaluation: whether a system finds what stands late in a document as well as what stands early.

Evaluation by position is imported from here and needs neither torch nor a model. What builds test data (`probes`,
`passages`, `position_collections`) or looks into models (`attention_profile`, `reflection`, ...) is imported from its
own module.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fair_evaluation.experiments import from_experiment as from_experiment
    from fair_evaluation.measures import harmonic_mean as harmonic_mean
    from fair_evaluation.measures import position_sensitivity_index as position_sensitivity_index
    from fair_evaluation.measures import slope as slope
    from fair_evaluation.mteb_results import from_mteb as from_mteb
    from fair_evaluation.position_evaluation import evaluate_positions as evaluate_positions
    from fair_evaluation.position_result import PositionEvaluation as PositionEvaluation
    from fair_evaluation.psi_difference import PsiDifference as PsiDifference
    from fair_evaluation.psi_difference import psi_test as psi_test
    from fair_evaluation.runs import from_run as from_run

# The command line imports this package also where pandas and SciPy are not installed, so names are imported when used.
_MODULES = {
    "PositionEvaluation": "position_result",
    "PsiDifference": "psi_difference",
    "evaluate_positions": "position_evaluation",
    "from_experiment": "experiments",
    "from_mteb": "mteb_results",
    "from_run": "runs",
    "harmonic_mean": "measures",
    "position_sensitivity_index": "measures",
    "psi_test": "psi_difference",
    "slope": "measures",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
