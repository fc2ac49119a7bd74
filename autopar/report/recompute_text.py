"""What does a plan run again in backward, and what does that trade? Block by block, in words."""

from autopar.export.body import is_collective
from autopar.export.expressions import short_name
from autopar.lower.emit import is_replayed
from autopar.report.units import nbytes_text, seconds_text
from autopar.values.blocks import block_of, relative
from autopar.values.local_model import LocalModel
from autopar.values.stage_plan import StagePlan


def recompute_text(plan: StagePlan, local: LocalModel) -> str:
    """One line a kind of block, and one for the trade; empty if nothing is run again."""
    kinds: dict[str, dict[str, dict[str, None]]] = {}
    blocks: dict[str, set[str]] = {}
    for node in local.graph.nodes:
        if node.op != "call_function" or not is_replayed(node):
            continue
        module = node.meta.get("module", "")
        block = block_of(module)
        kind = block.rpartition(".")[0] or ("blocks" if block else "outside of blocks")
        blocks.setdefault(kind, set()).add(block)
        inside = relative(module, block) or "the block itself"
        name = short_name(node).replace("_", "-") if is_collective(node) else short_name(node)
        kinds.setdefault(kind, {}).setdefault(inside, {})[name] = None
    lines = []
    for kind, modules in kinds.items():
        listed = "; ".join(f"{module}: {', '.join(names)}" for module, names in modules.items())
        count = len(blocks[kind])
        lines.append(f"run again in backward, {kind}{f' ×{count}' if count > 1 else ''}: {listed}")
    trade = plan.estimate.search.recompute
    if lines and trade:
        lines.append(
            f"that takes {seconds_text(trade.seconds)} a step, and {nbytes_text(trade.nbytes)} a device less "
            "than keeping everything under this sharding"
        )
    return "\n".join(lines)
