"""Which part of a model repeats? `model.layers.3.mlp` belongs to block `model.layers.3`, of kind `model.layers.*`.

A block is named by a numbered component of the module path. Where paths hold several numbers (ResNet's
`stages.0.layers.1`), the outermost one names the block, unless its kinds have one member only or none alike.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

NUMBER = re.compile(r"^\d+$")


@lru_cache(maxsize=1 << 14)
def block_of(module: str, depth: int = 1) -> str:
    """Path up to and with the `depth`-th number (the last one there is), "" for a module in no block."""
    parts = module.split(".")
    numbered = [i for i, part in enumerate(parts) if NUMBER.match(part)]
    return ".".join(parts[: numbered[min(depth, len(numbered)) - 1] + 1]) if numbered else ""


def kind_of(block: str) -> str:
    """`model.layers.3` -> `model.layers.*`; every number becomes a star."""
    return ".".join("*" if NUMBER.match(part) else part for part in block.split("."))


def relative(name: str, block: str) -> str:
    """A module or parameter name as seen from its block."""
    return name[len(block) + 1 :] if block and name.startswith(block + ".") else ("" if name == block else name)


def ranges(numbers: Iterable[int]) -> str:
    """`0-2, 5`: whole numbers in a few characters."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def title(members: Iterable[str]) -> str:
    """Blocks of one kind and structure as a heading: `model.layers.0-31`, or `model.layers.*` where numbers nest."""
    blocks = list(members)
    kind = kind_of(blocks[0])
    if kind.count("*") == 1 and kind.endswith("*"):
        return kind[:-1] + ranges(int(block.rpartition(".")[2]) for block in blocks)
    return blocks[0] if len(blocks) == 1 else kind


def blocks_text(modules: Iterable[str]) -> str:
    """The blocks that calls of these modules belong to as a heading, `-` where they belong to none."""
    blocks = dict.fromkeys(block for module in modules if (block := block_of(module)))
    return title(blocks) if blocks else "-"


def choose_depth(keys_at: Mapping[int, Mapping[str, object]]) -> int:
    """Of `{depth: {block: structure}}` the shallowest depth at which some two blocks are alike, 1 if there is none."""
    for depth in sorted(keys_at):
        keys = [str(key) for key in keys_at[depth].values()]
        if len(set(keys)) < len(keys):
            return depth
    return 1
