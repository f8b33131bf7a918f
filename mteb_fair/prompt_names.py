"""The names under which MTEB looks for the prompt of a task."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from typing import get_args

from mteb.abstasks.task_metadata import TaskType
from mteb.types import PromptType

from fair_calibration.nearest_names import nearest_names
from mteb_fair.tasks import TASKS

logger = logging.getLogger("mteb_fair")


def check_prompt_names(names: Iterable[str]) -> None:
    """Warns of names by which MTEB asks for no prompt of any task that it knows.

    MTEB asks by the name of the task or its type, alone or followed by "-query" or "-document", and by "query" and
    "document". A name may still be that of a task of the user's own, so it is no error.
    """
    prompt_types = [prompt_type.value for prompt_type in PromptType]
    tasks = {*get_args(TaskType), *TASKS, *importlib.import_module("mteb.get_tasks")._TASKS_REGISTRY}
    for name in names:
        task, _, ending = name.rpartition("-")
        if name in prompt_types or name in tasks or (ending in prompt_types and task in tasks):
            continue
        logger.warning(
            "model_prompts: %r is used only if you evaluate a task of your own by that name. MTEB asks for 'query', "
            "'document', and names and types of tasks, alone or as in 'Retrieval-query'; the nearest names are %s",
            name,
            nearest_names(name, [*prompt_types, *sorted(tasks)]),
        )
