"""Where are tensors of a kind read? Looked up once a program: all of its strategy graphs ask again."""

from collections.abc import Container, Mapping

from autopar.lower.program import Program
from autopar.search.costs.folding import Folding
from autopar.search.graph.clusters import OpCluster


def reading_positions(
    program: Program, folding: Folding, names: tuple[str, ...], number: int, slot: int
) -> Mapping[str, list[int]]:
    """Of each tensor those ops of class `number` that read it as operand `slot`."""
    key = ("reading positions", folding, names, number, slot)
    if key not in program.form:
        program.form[key] = {
            name: [p for p, s in program.readers[name] if s == slot and folding.class_of[p] == number] for name in names
        }
    found: Mapping[str, list[int]] = program.form[key]
    return found


def leave_as_views(program: Program, clusters: tuple[OpCluster, ...], names: tuple[str, ...]) -> bool:
    """Whether a view of any of these parameters is read by other clusters, or by an op inside the view's own."""
    if not clusters:
        return False
    grown = clusters[0].grown
    key = ("leave as views", grown, names)
    if key not in program.form:
        if ("roots", grown) not in program.form:
            program.form["roots", grown] = {row[-1] for instances in grown.instances for row in instances}
        roots, every = program.form["roots", grown], (p for name in names for p, _ in program.readers[name])
        program.form[key] = any(_leaves_as_view(position, program, roots) for position in every)
    return bool(program.form[key])


def _leaves_as_view(position: int, program: Program, roots: Container[int]) -> bool:
    op = program.ops[position]
    if op.rule.alias is None:
        return False
    if position in roots:
        return True
    return any(_leaves_as_view(p, program, roots) for r in op.results if r is not None for p, _ in program.readers[r])
