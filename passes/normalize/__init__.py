"""Which normal form do rules, search and the other passes rely on? The pipeline that brings an exported graph there."""

from collections.abc import Callable

from autopar.passes.graph_tools import tidy, verify
from autopar.passes.lay_out import lay_out
from autopar.passes.normalize.attention import normalize_attention
from autopar.passes.normalize.bags import normalize_bags
from autopar.passes.normalize.batch_norm import normalize_batch_norm
from autopar.passes.normalize.canonical_arguments import canonicalize_arguments
from autopar.passes.normalize.constants import fold_constants
from autopar.passes.normalize.creation import simplify_creation
from autopar.passes.normalize.cross_entropy import normalize_cross_entropy
from autopar.passes.normalize.drop_asserts import drop_asserts
from autopar.passes.normalize.drop_noops import drop_noops
from autopar.passes.normalize.experts import order_by_token
from autopar.passes.normalize.keep_checks import keep_checks
from autopar.passes.normalize.linear import fold_linear
from autopar.passes.normalize.losses import part_losses
from autopar.passes.normalize.projections import split_projections
from autopar.passes.normalize.random import normalize_random, number_sites
from autopar.passes.normalize.scatter import part_scatters
from autopar.passes.normalize.sink_expands import sink_expands
from autopar.passes.normalize.slices import normalize_slices
from autopar.passes.normalize.storage import resolve_storage
from autopar.passes.normalize.views import normalize_views
from autopar.passes.normalize.weighted_losses import part_weighted_losses
from autopar.passes.normalize.where import simplify_where
from autopar.values.graph import CapturedModel

Pass = Callable[[CapturedModel], CapturedModel]

PIPELINE: tuple[Pass, ...] = (
    keep_checks,
    drop_asserts,
    canonicalize_arguments,
    resolve_storage,
    drop_noops,
    normalize_random,
    normalize_batch_norm,
    normalize_bags,
    simplify_creation,
    normalize_slices,
    fold_constants,
    simplify_where,
    normalize_views,
    fold_linear,
    order_by_token,
    normalize_views,
    split_projections,
    part_weighted_losses,
    normalize_cross_entropy,
    part_losses,
    part_scatters,
    sink_expands,
    normalize_attention,
    fold_constants,
    drop_noops,
    number_sites,
    lay_out,
)


def normalize(captured: CapturedModel) -> CapturedModel:
    """Run the pipeline, checking the graph after each pass.

    Every pass edits `captured.graph` in place and returns the model with what else changed.

    Raises:
        PassError: if a pass left a graph that is not well formed (never the user's fault).
    """
    for transform in PIPELINE:
        captured = tidy(transform(captured))
        verify(captured)
    return captured
