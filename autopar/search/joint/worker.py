"""What a worker of the joint search runs: `python -m autopar.search.joint.worker` answers as `Joint` does."""

from autopar.passes.batch_line import BatchLine
from autopar.search.joint.joint import Joint
from autopar.search.joint.questions import Question, Setup
from autopar.search.joint.workers import serve
from autopar.values.graph import CapturedModel
from autopar.values.serialize import load

Ends = tuple[bytes, bytes, tuple[int, int]]
Request = tuple[Setup | None, Ends | None, dict[int, bytes], Question]
"""A new search or None, both ends of a line that gives graphs of micro-batches or those that were not sent yet, by
their number, and what is asked."""


def main() -> None:
    graphs: dict[int, CapturedModel] = {}
    lines: list[BatchLine] = []
    joint: list[Joint] = []

    def graph(count: int) -> CapturedModel:
        return graphs[count] if count in graphs else lines[0].microbatch(count)

    def answer(request: Request) -> object:
        setup, ends, new, question = request
        if setup is not None:
            graphs.clear()
            lines.clear()
            joint[:] = [Joint(graph=graph, line=lambda: lines[0] if lines else None, setup=setup)]
        if ends is not None:
            small, large, sizes = ends
            lines[:] = [BatchLine(small=load(small), large=load(large), sizes=sizes)]
        graphs.update({count: load(graph) for count, graph in new.items()})
        return joint[0].answer(question)

    serve(answer)


if __name__ == "__main__":
    main()
