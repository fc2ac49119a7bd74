"""What does a choice mean in words? `split by batch on data, by columns on model`."""

from torch import fx

from autopar.graph import CapturedModel
from autopar.mesh import Mesh
from autopar.report.rows import Words
from autopar.search.words import describe, dim_tags


def choice_words(captured: CapturedModel, mesh: Mesh) -> Words:
    """Words for the choices of a captured model's nodes."""
    tags = dim_tags(captured)

    def words(node: fx.Node, names: tuple[str, ...]) -> str:
        said = [describe(node, name, tags) for name in names]
        if len(set(said)) == 1:
            return said[0]
        return ", ".join(f"{text} on {axis}" for text, axis in zip(said, mesh.names, strict=True) if text)

    return words
