"""Which collective can begin before any other? The count of the labels that count: it reads nothing but labels.

A mean over rows that ranks share divides by it, and where it began with the loss, backward would wait for every rank.
"""

from torch import fx

from autopar.ops.cross_entropy import cross_entropy, start_count


def start_early(graph: fx.Graph) -> fx.Graph:
    """A copy of the graph (itself, where nothing is counted) that begins to count before its first call."""
    counting = [node for node in graph.nodes if counts_labels(node)]
    if not counting:
        return graph
    copy, made = fx.Graph(), dict[fx.Node, fx.Node]()

    def emit(node: fx.Node) -> None:
        if node not in made:
            for source in node.all_input_nodes:
                emit(source)
            made[node] = copy.node_copy(node, made.__getitem__)

    for node in graph.nodes:
        if node.op == "placeholder":
            emit(node)
    started = {}
    for node in counting:
        target = node.args[1]
        assert isinstance(target, fx.Node)
        emit(target)
        keywords = {name: node.kwargs[name] for name in ("ignore_index", "row_axes") if name in node.kwargs}
        started[node] = copy.call_function(start_count, (made[target],), keywords)
    for node in graph.nodes:
        emit(node)
        if node in started:
            made[node].kwargs = {**made[node].kwargs, "counted": started[node]}
    copy.lint()
    return copy


def counts_labels(node: fx.Node) -> bool:
    """Whether a call counts labels over ranks, by itself."""
    if node.target is not cross_entropy or node.kwargs.get("count") is not None or not node.kwargs.get("row_axes"):
        return False
    return node.kwargs.get("reduction", "mean") == "mean" and len(node.args) > 1
