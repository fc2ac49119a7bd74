"""What a helper of the joint search runs: `python -m autopar.search.joint.helper` answers as `Joint` does."""

from autopar.graph import CapturedModel
from autopar.search.joint.helpers import serve
from autopar.search.joint.joint import Joint
from autopar.search.joint.questions import Question, Setup
from autopar.serialize import load

Request = tuple[Setup | None, dict[int, bytes], Question]
"""A new search or None, graphs of micro-batches by their number that were not sent yet, and what is asked."""


def main() -> None:
    graphs: dict[int, CapturedModel] = {}
    joint: list[Joint] = []

    def answer(request: Request) -> object:
        setup, new, question = request
        if setup is not None:
            graphs.clear()
            joint[:] = [Joint(graph=graphs.__getitem__, setup=setup)]
        graphs.update({count: load(graph) for count, graph in new.items()})
        return joint[0].answer(question)

    serve(answer)


if __name__ == "__main__":
    main()
