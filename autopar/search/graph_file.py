"""How does a strategy graph travel as a file? The contest's format where it has no groups, else one of our own.

Ours, gzipped where the name ends in .gz: `{"strategy_graph": {"version": 1, "nodes": [...], ...}}` with the fields of
`StrategyGraph`, arrays as nested lists, and null for inf. The contest's: `search.pairwise.contest`.
"""

import gzip
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from autopar.errors import ContestFileError
from autopar.search.graph.strategy_graph import StrategyGraph
from autopar.search.pairwise import contest
from autopar.search.pairwise.convert import flatten
from autopar.search.pairwise.problem import Pairwise
from autopar.values.whole_file import write_whole

VERSION = 1


def dump(graph: StrategyGraph, path: str | Path, *, name: str = "strategy graph") -> None:
    """Write a graph; without groups in the contest's format, which other solvers read."""
    if not graph.groups:
        contest.dump(flatten(graph), path, name=name)
        return
    value = {"strategy_graph": {"version": VERSION, "name": name, **_plain(graph)}}
    data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    write_whole(path, gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data)


def load(path: str | Path) -> StrategyGraph | Pairwise:
    """A graph of either format.

    Raises:
        ContestFileError: if the file is neither, or a field is missing or of another kind.
    """
    path = Path(path)
    data = path.read_bytes()
    try:
        value = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (ValueError, EOFError, OSError) as error:
        raise ContestFileError(f"{path.name} is not {'gzipped ' * (path.suffix == '.gz')}JSON: {error}") from error
    if isinstance(value, dict) and isinstance(value.get("problem"), dict):
        return contest.parse(value["problem"])
    own = value.get("strategy_graph") if isinstance(value, dict) else None
    if not isinstance(own, dict):
        raise ContestFileError(f'{path.name} has neither an object under "strategy_graph" nor one under "problem"')
    if own.get("version") != VERSION:
        raise ContestFileError(f"{path.name} is of version {own.get('version')}; this autopar reads version {VERSION}")
    graph: StrategyGraph = _read(StrategyGraph, own, "strategy_graph")
    return graph


def _plain(value: Any) -> Any:
    """A value of dataclasses, tuples and arrays as JSON has it."""
    if isinstance(value, np.generic):
        value = value.item()
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.ndarray):
        return _plain(tuple(value.tolist()))
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return None if value == np.inf else int(value) if value.is_integer() else value
    return value


def _read(kind: Any, value: Any, where: str) -> Any:
    """What `_plain` wrote, as the type that the dataclass names."""
    if get_origin(kind) in (Union, UnionType):
        if value is None:
            return None
        kind = next(part for part in get_args(kind) if part is not type(None))
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise ContestFileError(f"{where} must be an object, not {type(value).__name__}")
        hints = get_type_hints(kind)
        missing = [field.name for field in fields(kind) if field.name not in value]
        if missing:
            raise ContestFileError(f"{where} lacks {', '.join(missing)}")
        return kind(**{f.name: _read(hints[f.name], value[f.name], f"{where}.{f.name}") for f in fields(kind)})
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ContestFileError(f"{where} must be a list, not {type(value).__name__}")
        return tuple(_read(get_args(kind)[0], part, f"{where}[{i}]") for i, part in enumerate(value))
    if "ndarray" in str(kind).lower():  # NumPy's NDArray: a generic alias, or from 2.5 on a name for one
        dtype = np.int64 if "int64" in str(kind) else np.float64
        try:
            return np.array(_with_inf(value), dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise ContestFileError(f"{where} must be numbers: {error}") from error
    if kind is float and value is None:
        return np.inf
    if not isinstance(value, (int, float) if kind is float else kind):
        raise ContestFileError(f"{where} must be {kind.__name__}, not {value!r}")
    return kind(value)


def _with_inf(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_inf(part) for part in value]
    return np.inf if value is None else value
