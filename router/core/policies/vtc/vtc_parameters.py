"""The parameters of the VTC family. The settings read them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OracleParameters:
    """VTC that predicts the output limit that a request states."""

    error: float = 0.0
    """The largest relative error of the prediction: the limit is multiplied by a random number from 1 - error to 1 +
    error."""

    def __post_init__(self) -> None:
        if self.error < 0:
            raise ValueError("error must not be negative")
