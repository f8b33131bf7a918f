from __future__ import annotations

import pytest

from mteb_fair import FairEncoder
from mteb_fair.prompt_names import check_prompt_names


def test_names_that_mteb_asks_for(caplog: pytest.LogCaptureFixture) -> None:
    check_prompt_names(["query", "document", "STS", "Retrieval-query", "NFCorpus", "FineWeb-PosQ", "PosIR-document"])
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["querry", "passage", "NFCorpus-passage", "retrieval-query", "-query", ""])
def test_other_names(name: str, caplog: pytest.LogCaptureFixture) -> None:
    check_prompt_names(["query", name])
    (message,) = caplog.messages
    assert message.startswith(f"model_prompts: {name!r} is used only if you evaluate a task of your own by that name.")


def test_the_encoder_warns_before_it_loads_the_model(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="'no/where' is not a folder"):
        FairEncoder("no/where", model_prompts={"querry": "find: "})
    assert "the nearest names are ['query'" in caplog.text
