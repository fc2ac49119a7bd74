"""An exported program in functional ATen, in which also what nothing reads is drawn.

torch drops a random call that nothing reads, unless its compiler is told to draw as eager code does; what is drawn
after it would differ from the model's.
"""

from torch._inductor import config as inductor
from torch.export import ExportedProgram


def decompose(program: ExportedProgram) -> ExportedProgram:
    """The program without in-place calls and composite random ones."""
    with inductor.patch(fallback_random=True):
        functional: ExportedProgram = program.run_decompositions({})
    return functional
