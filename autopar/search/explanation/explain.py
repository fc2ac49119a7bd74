"""Why this plan? What binds, what more memory or faster links would buy, which others were near, where all goes.

Every figure is found by planning again with one thing changed: of one stage on its mesh (`explain_stage`), of several
with their schedule and what the pipeline idles beside (`explain_stages`).
"""

from collections.abc import Callable

from autopar.search.explanation.explain_stage import explain_stage
from autopar.search.explanation.explain_stages import explain_stages
from autopar.search.explanation.questions import questions
from autopar.values.cluster import Cluster
from autopar.values.explanation import Explanation
from autopar.values.graph import CapturedModel
from autopar.values.plan import Plan


def explain(
    plan: Plan,
    captured: CapturedModel,
    cluster: Cluster,
    *,
    seconds: float = 60.0,
    relative_gap: float = 5e-3,
    progress: Callable[[str], None] | None = None,
) -> Explanation:
    """The explanation of a plan of `captured` on `cluster`, questions asked until `seconds` are over.

    Raises:
        PlanMismatchError: if the plan is for another model.
    """
    plan.check(captured)
    explain_it = explain_stage if plan.num_stages == 1 else explain_stages
    return explain_it(plan, captured, cluster, questions(seconds, progress), relative_gap)
