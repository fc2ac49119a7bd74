"""What a checkpoint's manifest and index become when they are changed: `python -m tests.fuzz_manifest`.

Mutants of the text (bytes changed, cut, doubled) and of its values (keys left out, added, doubled, values of other
types, numbers without bounds, names that lead elsewhere, depth without end), half of them sealed with a right checksum.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from autopar.errors import CheckpointError
from autopar.runtime.manifest import Manifest, StoredFile, checksum_of, manifest_from
from autopar.runtime.tensor_index import index_from

LATEST_SECONDS = 10.0

ODD = (
    *(None, True, False, 0, -1, 1, 2**63, 10**30, "", "x" * 5000, "\ud800", "nan", [], {}, [[]], {"a": {"b": []}}),
    *("../../etc/passwd", "/etc/passwd", "a/b", ".", "..", "a\x00b", "C:\\x", "manifest.json", ".metadata"),
)
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "0.5", "9" * 5000, "[" * 100_000, '{"a":' * 100_000, "\x00", "/*", "'")
"""Texts put where a value was."""


def a_manifest() -> Manifest:
    names = (
        "tensors.json",
        "run.pt",
        "__0_0.distcp",
        "__1_0.distcp",
        "random-00000.pt",
        "random-00001.pt",
        ".metadata",
    )
    files = {name: StoredFile(nbytes=100 + i, sha256=f"{i:064x}") for i, name in enumerate(names)}
    version = str(torch.__version__)
    kinds = {"model": "m", "fingerprint": "0123abcd", "torch": version, "autopar": "0.1.0"}
    return Manifest(step=120, world=2, holds=("optimizer",), files=files, **kinds)


def an_index() -> str:
    def piece(offset: int, file: int) -> dict[str, Any]:
        return {"offsets": [offset, 0], "shape": [2, 3], "file": f"__{file}_0.distcp", "start": 10, "nbytes": 40}

    tensors = {"model.w": {"dtype": "float32", "shape": [4, 3], "pieces": [piece(0, 0), piece(2, 1)]}}
    values = {"optimizer.param_groups.w.lr": {"file": "__0_0.distcp", "start": 50, "nbytes": 20}}
    return json.dumps({"tensors": tensors, "values": values})


def mutant(text: str, rng: random.Random, seal: Callable[[Any], Any]) -> str:
    if rng.random() < 0.25:
        return changed_bytes(text, rng)
    body = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        change(body, rng)
    marks = {}
    if rng.random() < 0.25:
        put(body, rng, "\u2603")
        marks = {json.dumps("\u2603"): rng.choice(RAW)}
    result = json.dumps(seal(body) if rng.random() < 0.5 else body)
    for mark, raw in marks.items():
        result = result.replace(mark, raw)
    return doubled(result, rng) if rng.random() < 0.1 else result


def changed_bytes(text: str, rng: random.Random) -> str:
    at, length = rng.randrange(len(text)), rng.randrange(1, 20)
    kinds = (
        text[:at],
        text[:at] + chr(rng.randrange(1, 256)) + text[at + 1 :],
        text[:at] + text[at + length :],
        text[:at] + text[at : at + length] + text[at:],
        text + text,
        text[:at] + " " + text[at:],
    )
    return rng.choice(kinds)


def doubled(text: str, rng: random.Random) -> str:
    """A key given twice, with the value of some other."""
    keys = [part for part in text.split('"')[1::2] if part]
    key = rng.choice(keys)
    return text.replace(f'"{key}"', f'"{key}": {rng.randrange(9)}, "{key}"', 1)


def containers(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [*([value] if isinstance(value, dict | list) and value else []), *(c for v in inner for c in containers(v))]


def place(body: Any, rng: random.Random) -> tuple[Any, Any]:
    """A container in the body, and a key or index of it."""
    container = rng.choice(containers(body) or [{"none": 0}])
    return container, rng.choice(list(container) if isinstance(container, dict) else range(len(container)))


def put(body: Any, rng: random.Random, value: Any) -> None:
    container, key = place(body, rng)
    container[key] = value


def change(body: Any, rng: random.Random) -> None:
    container, key = place(body, rng)
    kind = rng.randrange(6)
    if kind == 0:
        del container[key]
    elif kind == 1:
        container[key] = rng.choice(ODD)
    elif kind == 2 and isinstance(container, dict):
        container[str(rng.choice(ODD))] = container.pop(key)
    elif kind == 3 and isinstance(container, dict):
        container[f"new{rng.randrange(9)}"] = rng.choice(ODD)
    elif kind == 4 and type(container[key]) is int:
        container[key] += rng.choice((-1, 1, 7, -(10**6)))
    else:
        other, name = place(body, rng)
        container[key] = json.loads(json.dumps(other[name]))


def sealed(body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    rest = {name: value for name, value in body.items() if name != "checksum"}
    return {**rest, "checksum": checksum_of(rest)}


def sound_manifest(found: Manifest, text: str) -> str:
    """What is wrong with what a mutant was read as, empty if nothing is."""
    first = a_manifest()
    if found != first and json.loads(text)["checksum"] == json.loads(first.to_json())["checksum"]:
        return "another manifest under the same checksum"
    bad = [name for name in found.files if "/" in name or "\\" in name or "\x00" in name or name in (".", "..", "")]
    return f"names {bad}" if bad else "" if manifest_from(found.to_json()) == found else "does not read what it writes"


def sound_index(found: Metadata, text: str) -> str:
    files = a_manifest().files
    inside = all(p.offset + p.length <= files[p.relative_path].nbytes for p in found.storage_data.values())
    return "" if inside else "a piece outside of its file"


def fuzz(count: int, seed: int) -> dict[str, Any]:
    """Outcomes of `count` mutants, and which were wrong."""
    rng, outcomes = random.Random(seed), Counter[str]()
    wrong: list[str] = []
    longest = 0.0
    manifest, index, files = a_manifest().to_json(), an_index(), a_manifest().files
    for number in range(count):
        is_manifest = number % 2 == 0
        text = mutant(manifest, rng, sealed) if is_manifest else mutant(index, rng, lambda body: body)
        start = time.monotonic()
        try:
            if is_manifest:
                problem = sound_manifest(manifest_from(text), text)
            else:
                problem = sound_index(index_from(text, files), text)
            outcomes["read"] += 1
        except CheckpointError:
            problem = ""
            outcomes["CheckpointError"] += 1
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - start
        longest = max(longest, seconds)
        if seconds > LATEST_SECONDS:
            problem = f"took {seconds:.1f} s"
        if problem:
            wrong.append(f"mutant {number}: {problem[:200]}: {text[:200]}")
    return {"mutants": count, **outcomes, "longest seconds": round(longest, 3), "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = fuzz(given.count, given.seed)
    print(json.dumps(found, indent=1))
    raise SystemExit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
