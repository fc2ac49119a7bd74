"""A manifest or index of a checkpoint is read as it was written, or refused with what was found and expected."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import CheckpointError
from autopar.runtime.manifest import StoredFile, manifest_from
from autopar.runtime.tensor_index import index_from
from tests.fuzz_manifest import a_manifest, an_index, fuzz, sealed


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert manifest_from(a_manifest().to_json()) == a_manifest()


def changed(**entries: Any) -> str:
    return json.dumps(sealed({**json.loads(a_manifest().to_json()), **entries}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "values inside values"),
        ('{"step": NaN}', "NaN"),
        ('{"step": 1, "step": 2}', "step: found it twice"),
        (a_manifest().to_json()[:-20], "no JSON"),
        (a_manifest().to_json().replace('"step": 120', '"step": 121'), "checksum: found"),
        (changed(step=-1), "step: found -1, expected a number from 0"),
        (changed(step=True), "step: found True"),
        (changed(step="120"), "step: found '120'"),
        (changed(format=2), "another version of autopar"),
        (changed(more=1), "with unknown ['more']"),
        (changed(world=0), "world: found 0"),
        (changed(files={"../x": {"nbytes": 1, "sha256": "0" * 64}}), "files: found '../x'"),
        (changed(files={"/etc/passwd": {"nbytes": 1, "sha256": "0" * 64}}), "names of files beside"),
        (changed(files={"x": {"nbytes": 1, "sha256": "0"}}), "files/x/sha256"),
        (changed(files={"x": {"nbytes": 1}}), "files/x: found an object without ['sha256']"),
    ],
)
def test_what_is_no_manifest_is_refused(text: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        manifest_from(text)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"file": "__1_0.distcp"', '"file": "../x"', "one of the files of the manifest"),
        ('"nbytes": 40', '"nbytes": 4000', "one within 100 bytes"),
        ('"offsets": [2, 0]', '"offsets": [0, 0]', "two pieces"),
        ('"offsets": [2, 0]', '"offsets": [3, 0]', "one inside"),
        ('"shape": [4, 3]', '"shape": [5, 3]', "15, for its shape"),
        ('"float32"', '"load"', "a dtype of torch"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(old: str, new: str, said: str) -> None:
    assert old in an_index()
    files = {name: replace(file, nbytes=100) for name, file in a_manifest().files.items()}
    index_from(an_index(), files)
    with pytest.raises(CheckpointError, match=said):
        index_from(an_index().replace(old, new), files)


def test_names_are_no_paths() -> None:
    for name in ("a/b", "a\\b", "..", ".", "", "a\nb", "é", "x" * 121, "manifest.json"):
        files = {name: StoredFile(nbytes=0, sha256="0" * 64)}
        with pytest.raises(CheckpointError):
            manifest_from(replace(a_manifest(), files=files).to_json())


def test_mutants_are_refused_or_mean_the_same() -> None:
    found = fuzz(400, seed=1)
    assert found["wrong"] == []
    assert found["CheckpointError"] > 300
