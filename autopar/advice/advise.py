"""What should a user of a framework set? Its ranking, the user's own configuration, and what its limits cost.

How many GPUs: the same question for several sizes of one cluster, with the time and price of a number of tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.advice.config_file import Keys, flat_keys
from autopar.advice.framework import Fields, Framework, Site, TransformerJob
from autopar.advice.frameworks import FRAMEWORKS
from autopar.advice.rank import FrameworkRanking, Priced, price, rank
from autopar.advice.words import read_words
from autopar.errors import ArgumentError, AutoparError, MeshError
from autopar.values.cluster import Cluster, load_cluster, resized

DAY = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The answer for one job.

    own: the user's configuration, None without one. unlimited: of all frameworks here the fastest that fits, None if
    none does.
    """

    job: TransformerJob
    ranking: FrameworkRanking
    own: Priced | None
    unlimited: Priced | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSize:
    """One number of GPUs. best: None where nothing fits, `reason` says why. days, cost: of all tokens, None without."""

    cluster: Cluster
    best: Priced | None
    reason: str
    days: float | None
    cost: float | None

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices


def advise(
    framework: Framework, job: TransformerJob, *, own: Fields | None = None, where: str = "", count: int = 5
) -> Advice:
    """Rank a framework's configurations for a job.

    Args:
        framework: whose.
        job: what is trained where.
        own: fields of the user's configuration.
        where: the file that they come from, for messages.
        count: how many configurations of each kind the answer has.

    Raises:
        AutoparError: if nothing can be expressed, or the user's configuration is none of this model and cluster.
    """
    priced = None if own is None else _own(framework, job, own, where)
    found = rank(framework, job, count)
    others = [
        rank(other, job, 1).best
        for other in FRAMEWORKS.values()
        if other is not framework and other.space.schedules and job.precision in other.space.precisions
    ]
    fastest = [each for best in (found.best[:1], *others) for each in best]
    return Advice(
        job=job, ranking=found, own=priced, unlimited=min(fastest, key=lambda each: each.seconds, default=None)
    )


def read_own(framework: Framework, text: str, name: str, site: Site) -> tuple[Fields, tuple[str, ...]]:
    """What a user's own configuration says, and its keys on which no price depends.

    Args:
        framework: whose file it is.
        text: its content, or words as `tp=2,mbs=1`, which mean the same for every framework.
        name: of the file, whose ending says the format; "" for words.
        site: the model and where it runs.

    Raises:
        ArgumentError: if it cannot be read, says nothing known, has a misspelt key or a value that is not priced.
        MeshError: if its degrees do not divide the devices.
    """
    if name.endswith(".py"):
        raise ArgumentError(f"{name} is Python, which is not run; give words as tp=2,mbs=1")
    if not name or framework.read is None:
        where = name or "--config"
        return read_words(flat_keys(text, where), where, site), ()
    keys = Keys(text, name)
    found = framework.read(keys, site)
    return found, keys.unread()


def _own(framework: Framework, job: TransformerJob, own: Fields, where: str) -> Priced:
    given = {
        "global_batch": job.global_batch,
        "seq": job.seq,
        "precision": job.precision,
        "optimizer_states": job.optimizer_states,
        "micro_batch": 1,
        **own,
    }
    try:
        config = framework.config(**given)
        same = replace(job, global_batch=config.global_batch, seq=config.seq)
        return price(framework, same, config)
    except AutoparError as error:
        raise type(error)(f"{where}: {error}") from error


def sizes(
    framework: Framework,
    job: TransformerJob,
    counts: Sequence[int],
    *,
    tokens: float | None = None,
    price_per_hour: float | None = None,
) -> tuple[ClusterSize, ...]:
    """The best configuration on each number of GPUs of the job's cluster.

    Args:
        framework: whose configurations.
        job: with the cluster whose devices and links are taken.
        counts: numbers of GPUs, each a part of a node or whole nodes.
        tokens: of the whole training.
        price_per_hour: of one GPU, in any currency.

    Raises:
        ArgumentError: if a count is not a part of a node or whole nodes.
    """
    found = []
    for count in counts:
        own = replace(job, cluster=cluster_of(job.cluster, count))
        best: Priced | None = None
        reason = ""
        try:
            ranking = rank(framework, own, 1)
            best = ranking.best[0] if ranking.best else None
            if best is None:
                reason = f"the least needs {ranking.too_large[0].nbytes / 1e9:.1f} GB a GPU"
        except ArgumentError as error:
            reason = str(error)
        days = tokens / best.time.tokens_per_second / DAY if tokens and best else None
        cost = days * 24 * count * price_per_hour if days is not None and price_per_hour is not None else None
        found.append(ClusterSize(cluster=own.cluster, best=best, reason=reason, days=days, cost=cost))
    return tuple(found)


def cluster_of(machine: Cluster, count: int) -> Cluster:
    """The same machine with another number of GPUs.

    Raises:
        ArgumentError: if it is neither a part of a node nor whole nodes.
    """
    per_node = machine.levels[-1].size
    if count <= per_node:
        return resized(machine, 1, count)
    if count % per_node:
        raise ArgumentError(f"{count} GPUs are no whole number of nodes of {per_node}; give a multiple of {per_node}")
    try:
        return resized(machine, count // per_node, per_node)
    except MeshError:
        return load_cluster(f"{count // per_node}x{per_node}x{machine.device.name}")


def settings_of(priced: Priced) -> dict[str, Any]:
    """A configuration as plain values, in the words of `autopar simulate`."""
    config = priced.config
    names = ("tp", "pp", "dp", "cp", "ep", "replicate", "virtual_stages", "schedule", "micro_batch", "recompute")
    return {name: getattr(config, name) for name in names} | {
        "framework": priced.framework,
        "sharding": priced.sharding.name,
        "zero": config.zero,
        "offload": config.offload,
        "accumulate": config.num_microbatches,
        "global_batch": config.global_batch,
        "seq": config.seq,
        "step_seconds": priced.seconds,
        "tokens_per_second": priced.time.tokens_per_second,
        "mfu": priced.time.mfu,
        "gigabytes": priced.nbytes / 1e9,
        "fits": priced.fits,
        "memory_gb": _gigabytes(dict(priced.memory.kinds)),
    }


def size_values(size: ClusterSize) -> dict[str, Any]:
    """One number of GPUs as plain values."""
    found: dict[str, Any] = {
        "gpus": size.num_devices,
        "cluster": str(size.cluster),
        "days": size.days,
        "cost": size.cost,
        "reason": size.reason,
    }
    return found | ({} if size.best is None else {"best": settings_of(size.best)})


def _gigabytes(kinds: Mapping[str, int]) -> dict[str, float]:
    return {kind: nbytes / 1e9 for kind, nbytes in kinds.items()}
