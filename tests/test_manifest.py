"""A manifest or index of a checkpoint is read as it was written, or refused with what was found and expected."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import CheckpointError
from autopar.runtime.manifest import checksum_of, manifest_from
from autopar.runtime.tensor_index import index_from
from tests.fuzzed_checkpoints import a_manifest, an_index

FILE = {"nbytes": 1, "sha256": "0" * 64}


def test_a_manifest_is_read_as_it_was_written() -> None:
    text = a_manifest().to_json()
    assert replace(manifest_from(text), checksum="") == a_manifest()
    assert manifest_from(text).to_json() == text


def changed(**entries: Any) -> str:
    body = {**json.loads(a_manifest().to_json()), **entries}
    return json.dumps({**body, "checksum": checksum_of(body)})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "this is no JSON"),
        ("[" * 100_000, "nested too deep"),
        ('{"step": NaN}', "NaN is no number"),
        ('{"step": 1, "step": 2}', "'step' stands twice"),
        (a_manifest().to_json()[:-20], "this is no JSON"),
        (a_manifest().to_json().replace('"step": 120', '"step": 121'), "checksum: it is not that of the other"),
        (changed(step=-1), "step: expected greater than or equal to 0, found -1"),
        (changed(step=True), "step: expected a valid integer, found True"),
        (changed(step="120"), "step: expected a valid integer, found '120'"),
        (changed(format=2), "format: expected 1, found 2"),
        (changed(more=1), "more: unknown key"),
        (changed(world=8), "8 ranks wrote 7 files"),
        (changed(world=0), "world: expected greater than or equal to 1"),
        *((changed(files={name: FILE}), "should match pattern") for name in ("../x", "/x", "a\\b", "..", "")),
        (changed(files={"a\nb": FILE}), "control characters"),
        (changed(files={"manifest.json": FILE}), "lists itself"),
        (changed(files={"x": {**FILE, "sha256": "0"}}), "files.x.sha256"),
        (changed(files={"x": {"nbytes": 1}}), "files.x.sha256: missing"),
    ],
)
def test_what_is_no_manifest_is_refused(text: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        manifest_from(text)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"file": "__1_0.distcp"', '"file": "other"', "model.w is in other, which the manifest does not list"),
        ('"file": "__1_0.distcp"', '"file": "../x"', "should match pattern"),
        ('"nbytes": 40', '"nbytes": 4000', "ends at byte 4010 of __0_0.distcp"),
        ('"offsets": [2, 0]', '"offsets": [0, 0]', "two pieces at one place"),
        ('"offsets": [2, 0]', '"offsets": [3, 0]', "outside of its shape (4, 3)"),
        ('"shape": [4, 3]', '"shape": [5, 3]', "12 elements, and 15 of its shape"),
        ('"float32"', '"load"', "dtype 'load', which torch has not"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(old: str, new: str, said: str) -> None:
    text, files = json.dumps(an_index()), a_manifest().files
    assert old in text
    index_from(text, files)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        index_from(text.replace(old, new), files)
