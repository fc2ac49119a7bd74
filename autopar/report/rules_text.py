"""Which ops does nothing split, what do they take, and whose splits were discovered by running them?"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import starmap

from torch import fx

from autopar.report.units import percent_text, seconds_text
from autopar.rules.registry import rule_of
from autopar.rules.rule import Rule
from autopar.values.graph import called_name


def rules_lines(nodes: Iterable[fx.Node], seconds: Mapping[str, float], step: float) -> list[str]:
    """Lines of a plan's text. seconds: what ops of a name that nothing splits take in a step, as far as it is known."""
    calls = [node for node in nodes if node.op == "call_function" and node.target is not operator.getitem]

    def counted(chosen: Callable[[Rule], bool]) -> dict[str, int]:
        return dict(Counter(called_name(node) for node in calls if chosen(rule_of(node))))

    whole, found = counted(lambda rule: not rule.known), counted(lambda rule: rule.known and rule.discovered)
    listed = []
    for op, count in whole.items():
        took = seconds.get(op, 0.0)
        cost = f" {seconds_text(took)}, {percent_text(took / step)} of the step" if took and step else ""
        listed.append(f"{_times(op, count)}{cost}")
    lines = [f"ops without a rule (whole on every rank): {'; '.join(listed)}"] if listed else []
    if found:
        lines.append(f"split as running them showed (discovered): {', '.join(starmap(_times, found.items()))}")
    return lines


def _times(op: str, count: int) -> str:
    return f"{op} ×{count}" if count > 1 else op
