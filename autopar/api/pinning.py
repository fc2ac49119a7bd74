"""Which pins did a user give, and what do they say of the plan as a whole?"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from autopar.errors import PinError
from autopar.values.pins import PIPELINE, Pins, pins_of
from autopar.values.pins_file import load_pins


def pins_given(pins: Pins | Mapping[str, Any] | str | Path | None) -> Pins:
    """Pins as a value, read from a file if one is named.

    Raises:
        PinError: if they are none.
    """
    return load_pins(pins) if isinstance(pins, str | Path) else pins_of(pins)


def asked_pipelines(
    pins: Pins, pipeline: int | Literal["auto"] | None, searched: bool
) -> tuple[tuple[int, ...] | None, int]:
    """Numbers of pipeline ranks that are searched, None for all that the cluster's levels allow; and the least.

    searched: meshes are.

    Raises:
        PinError: if a pipeline is forbidden or demanded otherwise than it was asked for.
    """
    number = pipeline if isinstance(pipeline, int) else None
    if PIPELINE in pins.forbid:
        if number is not None and number > 1:
            raise PinError(f"pins forbid a pipeline, and {number} pipeline ranks are asked for; leave one out")
        number = 1
    if PIPELINE in pins.demand and (number == 1 or (number is None and not searched)):
        raise PinError("pins demand a pipeline; give 2 pipeline ranks or more, or mesh auto")
    return None if number is None else (number,), 2 if PIPELINE in pins.demand else 1
