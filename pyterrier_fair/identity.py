"""What the vectors of a `FairBiEncoder` depend on, as it stands now."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fair_calibration.fingerprint import changeable_settings
from fair_calibration.identity import EncoderIdentity

if TYPE_CHECKING:
    from pyterrier_fair.encoder import FairBiEncoder


class EncoderState:
    """The record of an encoder, made anew (the weights are hashed) only when something of it was changed."""

    def __init__(self, encoder: FairBiEncoder) -> None:
        self.encoder = encoder
        self._settings: Any = None
        self._record: EncoderIdentity

    def record(self) -> EncoderIdentity:
        """Returns the record of the encoder's settings and weights as they stand now."""
        encoder = self.encoder
        settings = settings_of(encoder)
        if settings != self._settings:
            self._record = EncoderIdentity.of(
                encoder.calibrated_model(),
                name=name_of(encoder),
                strength=encoder.fair_config.strength,
                normalize=encoder.normalize,
            )
            self._settings = settings
        return self._record


def settings_of(encoder: FairBiEncoder) -> tuple[Any, ...]:
    """Returns all that an encoder's vectors depend on, as it stands now; cheap to compare (`changeable_settings`)."""
    model = encoder.calibrated_model()
    return (encoder.model, encoder.device, encoder.normalize, encoder.fair_config, changeable_settings(model))


def name_of(encoder: FairBiEncoder) -> str | None:
    """Returns the name or path that an encoder's model was loaded by; None for a loaded model."""
    return os.fspath(encoder.model) if isinstance(encoder.model, (str, os.PathLike)) else None
