"""What is a value called in exported code? By the module that made it: `w_q_proj`, `h_input_layernorm`, `mlp_mul`."""

import builtins
import keyword
import re
import unicodedata
from collections.abc import Iterable

USED = {"F", "torch", "aten", "w", "i", "block", "forward", "sites", *keyword.kwlist}
"""Names that generated code has a use for."""
RESERVED = USED | set(dir(builtins))
PREFIX = {"weight": "w_", "bias": "b_"}


def identifier(text: str) -> str:
    """`text` as a Python name, in the one form (NFKC) in which Python reads it."""
    text = unicodedata.normalize("NFKC", text)
    name = re.sub("\0+", "_", "".join(c if f"a{c}".isidentifier() else "\0" for c in text)).strip("_") or "x"
    return name if name.isidentifier() else f"_{name}"


def quoted(text: str) -> str:
    """`text` as a Python literal in double quotes, whatever it holds."""
    return '"' + in_words(text) + '"'


def in_words(text: str) -> str:
    """`text` as it may stand in a docstring, a comment or between double quotes: on one line, nothing ends it."""
    return "".join(
        character if character.isprintable() and character not in '"\\' else _escaped(character) for character in text
    )


def _escaped(character: str) -> str:
    return '\\"' if character == '"' else character.encode("unicode_escape").decode("ascii")


class SourceNames:
    """Names of one scope, each given once; a taken one gets a number."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = RESERVED | set(taken)

    def take(self, wish: str) -> str:
        base = identifier(wish)
        name, number = base, 1
        while name in self.taken:
            number += 1
            name = f"{base}_{number}"
        self.taken.add(name)
        return name


def parameter_names(relative: Iterable[str], names: SourceNames) -> dict[str, str]:
    """`self_attn.q_proj.weight` -> `w_q_proj`; where that is ambiguous, more of the path."""
    out = {}
    paths = list(relative)
    for path in paths:
        *modules, leaf = path.split(".")
        prefix = PREFIX.get(leaf, f"{leaf}_" if modules else leaf)
        named = [m for m in modules if not m.isdigit()]
        short = prefix + (named[-1] if named else "_".join(modules))
        alike = [p for p in paths if p != path and p.split(".")[-1] == leaf and _last(p) == _last(path)]
        out[path] = names.take(prefix + "_".join(modules) if alike else short)
    return out


def _last(path: str) -> str:
    named = [m for m in path.split(".")[:-1] if not m.isdigit()]
    return named[-1] if named else ""


def last_component(module: str) -> str:
    """`self_attn.q_proj` -> `q_proj`, `layer.0` -> `layer_0`."""
    parts = module.split(".")
    named = [i for i, part in enumerate(parts) if not part.isdigit()]
    return "_".join(parts[named[-1] :]) if named else "_".join(parts)
