"""YAML of plain values, quoted by its library; a text of several lines stands as it is read."""

from typing import Any

import yaml

WIDTH = 10_000
"""Columns after which a text is broken: none, for commands are copied."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # of a library without types
    pass


def _text(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def yaml_text(*documents: dict[str, Any]) -> str:
    """Documents, one after another."""
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=True))
