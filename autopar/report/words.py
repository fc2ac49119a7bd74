"""What does a choice mean in words? `split by batch on data, by columns on model`."""

from torch import fx

from autopar.report.rows import Words
from autopar.rules.words import SUMMANDS, WHOLE, describe, dim_tags
from autopar.values.graph import CapturedModel
from autopar.values.mesh import Mesh


def choice_words(captured: CapturedModel, mesh: Mesh) -> Words:
    """Words for the choices of a captured model's nodes, axis by axis; axes of one rank are left out."""
    tags = dim_tags(captured)
    axes = [i for i, n in enumerate(mesh.shape) if n > 1] or [0]

    def words(node: fx.Node, names: tuple[str, ...]) -> str:
        said: dict[str, list[str]] = {}
        for axis in axes:
            said.setdefault(describe(node, names[axis], tags), []).append(mesh.names[axis])
        if len(said) == 1:
            return next(iter(said))
        split = [
            f"{text.removeprefix('split ')} on {' and '.join(over)}"
            for text, over in said.items()
            if text.startswith("split")
        ]
        rest = [(said[text], short) for text, short in ((SUMMANDS, "summands"), (WHOLE, "whole")) if text in said]
        return ", ".join(
            [
                *(["split " + ", ".join(split)] if split else []),
                *(f"{short} on {' and '.join(over)}" for over, short in rest),
            ]
        )

    return words
