"""Where does a choice waste most? What a bound leaves over says, option by option and pair by pair.

    cost(x) = bound + leftover(x) + sum over times of prices * (limit - usage of x),      every part at least zero

so that what a choice costs above the bound lies in those options and pairs of it that have something left over, and
usually in a few of them: regions around these are worth solving. And a better choice in a region cannot use any single
option or pair whose leftover alone exceeds what the region wastes now.
"""

from dataclasses import dataclass

import numpy as np

from autopar.search.compiled import State, uniform
from autopar.search.pairwise.bound import Remainder
from autopar.search.pairwise.problem import Floats, Ints, Pairwise, usage

MOST_SEEDS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Guide:
    """What a dual bound leaves of a problem."""

    problem: Pairwise
    remainder: Remainder

    def unit(self) -> float:
        """Of temperature: the bound, a node."""
        return max(abs(self.remainder.bound) / max(self.problem.num_nodes, 1), 1e-9)

    def waste(self, choice: Ints) -> tuple[Floats, Floats]:
        """Left over at the options of a choice (a node) and at its pairs (an edge); inf for what is ruled out."""
        problem = self.problem
        pairs = problem.first_pair[:-1] + choice[problem.edge_a] * problem.num_options()[problem.edge_b]
        pairs = pairs + choice[problem.edge_b]
        return self.remainder.option[problem.first_option[:-1] + choice], self.remainder.pair[pairs]

    def idle(self, choice: Ints) -> float:
        """The price of what the choice leaves of the limit."""
        if not len(self.remainder.prices) or self.problem.limit == np.inf:
            return 0.0
        return float((self.remainder.prices * (self.problem.limit - usage(self.problem, choice))).sum())

    def seeds(self, choice: Ints, state: State) -> Ints:
        """One to three nodes or ends of edges, drawn as what they waste."""
        option, pair = self.waste(choice)
        weights = np.concatenate([option, pair])
        finite = weights[np.isfinite(weights)]
        weights = np.where(np.isfinite(weights), weights, 2.0 * finite.max(initial=1.0))
        before = np.cumsum(weights)
        if before[-1] <= 0.0:
            return np.zeros(0, np.int64)
        count = 1 + int(MOST_SEEDS * uniform(state))
        drawn = np.searchsorted(before, [uniform(state) * before[-1] for _ in range(count)], side="right")
        nodes = self.problem.num_nodes
        edges = drawn[drawn >= nodes] - nodes
        return np.concatenate([drawn[drawn < nodes], self.problem.edge_a[edges], self.problem.edge_b[edges]])
