"""The published JSON schemas are the types that files are read by: REWRITE=1 writes them anew."""

import json
import os
from pathlib import Path

import pytest

from autopar.values.cluster_tables import ClusterTable
from autopar.values.pins_file import PinsFile
from autopar.values.plan_file import PlanFile
from autopar.values.schema import json_schema
from autopar.values.specs_file import SpecsFile
from tests.fuzzed_formats import FORMATS

SCHEMAS = Path(__file__).parents[1] / "docs/schemas"
KINDS = {"plan": PlanFile, "specs": SpecsFile, "cluster": ClusterTable, "pins": PinsFile}
PARTIAL = ("cluster", "pins")
"""Files that people write, which need not say everything."""


@pytest.mark.parametrize("name", KINDS)
def test_the_published_schema_is_the_one_that_is_read(name: str) -> None:
    schema = json_schema(KINDS[name], partial=name in PARTIAL)
    path = SCHEMAS / f"{name}.json"
    if os.environ.get("REWRITE"):
        path.write_text(json.dumps(schema, indent=1) + "\n")
    assert json.loads(path.read_text()) == schema


@pytest.mark.parametrize("name", KINDS)
def test_a_schema_names_every_key_of_a_file(name: str) -> None:
    body, *_ = FORMATS[name]()
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    assert set(body) <= set(schema["properties"]) and not schema["additionalProperties"]
    assert set(schema.get("required", [])) == set(body) or name in PARTIAL
