"""A configuration in the words of `autopar simulate` and of named configurations: `tp=2, zero=3, mbs=1`."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from autopar.advice.framework import Site
from autopar.cost_models.training_config import ALIASES, TRUTH, TrainingConfig
from autopar.errors import ArgumentError
from autopar.values.choices import near

KINDS = {f.name: f.type for f in fields(TrainingConfig)}
NAMES = (*KINDS, *ALIASES)
USUAL = ("tp", "pp", "cp", "ep", "dp", "zero", "replicate", "mbs", "recompute", "offload", "vpp", "schedule")
"""Words that a message lists; all fields of `TrainingConfig` are words."""


def read_words(keys: Mapping[str, Any], where: str, site: Site) -> dict[str, object]:
    """Fields of `TrainingConfig` by name, the degree of data parallel ranks filled in.

    Raises:
        ArgumentError: if a word is not known, or its value not of its kind.
        MeshError: if the degrees do not divide the devices.
    """
    found: dict[str, object] = {}
    for key, value in keys.items():
        field = ALIASES.get(key, key)
        if field not in KINDS:
            raise ArgumentError(f"{where}: {key} is not one of {', '.join(USUAL)} and others{near(key, NAMES)}")
        text = str(value).lower()
        try:
            kind = KINDS[field]
            found[field] = int(text) if kind is int else TRUTH[text] if kind is bool else text
        except (ValueError, KeyError) as error:
            raise ArgumentError(
                f"{where}: {key} is {value!r}, which is no {getattr(kind, '__name__', kind)}"
            ) from error
    degrees = [int(str(found.get(degree, 1))) for degree in ("tp", "pp", "cp")]
    found.setdefault("dp", site.data_ranks(*degrees))
    return found
