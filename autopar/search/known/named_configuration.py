"""Which recipe is asked for, in the words of those who use it? `megatron:tp=8,mbs=1,recompute=selective,zero=1,sp=on`.

A kind of plan (`search.baselines`) and what is fixed of it; what no key says is left to the search among the plans of
that kind, recompute apart, which is none unless asked for. Keys and values are those of `cost_models.training_config`.

    dp, tp, cp, pp     ranks of each; dp is the rest. Ranks lie as in Megatron-LM, tp (or cp) on the fastest links, pp
                       on the slowest
    virtual_stages     stages of each pipeline rank (vpp): above 1 the schedule 1f1b is interleaved
    schedule           of the pipeline: gpipe, 1f1b, interleaved-1f1b or zbv (two stages a rank)
    micro_batch        samples of one data-parallel rank's micro-batch (mbs): global batch / (dp · mbs) micro-batches
    zero               0: parameters, gradients and state whole on the data-parallel ranks; 1: all sharded, gathered
                       once a step and gradients reduced once a step; 2: gathered for each micro-batch and kept to its
                       backward, gradients sharded (FSDP's SHARD_GRAD_OP); 3: gathered for each use (FULL_SHARD)
    sequence_parallel  Megatron's (sp): what lies between tensor-parallel regions is split by sequence
    recompute          none; full: a block keeps what enters it; selective: attention's scores and softmax are run again
                       (a fused kernel keeps none of them anyway: there it is the same as none)
"""

from dataclasses import dataclass, fields
from typing import Literal

from autopar.cost_models.training_config import ALIASES, TRUTH
from autopar.errors import ArgumentError, BatchError, MeshError
from autopar.search.pipeline_parts import devices_text, part_of
from autopar.values.choices import near
from autopar.values.cluster import Cluster
from autopar.values.mesh import Mesh, make_mesh
from autopar.values.schedules import SCHEDULES, check_microbatches, stage_ranks

KINDS = {
    "ddp": ("dp",),
    "fsdp": ("dp",),
    "megatron": ("dp", "tp", "sequence_parallel"),
    "ulysses": ("dp", "cp"),
}
"""Kinds, and the keys that each knows beside `COMMON`."""

COMMON = ("pp", "virtual_stages", "schedule", "micro_batch", "zero", "recompute")
RECOMPUTE = ("none", "selective", "full")
ZERO = {"ddp": 0, "fsdp": 3, "megatron": 0, "ulysses": 3}
"""The ZeRO stage of each kind, unless another is asked for."""
TECHNIQUE = {
    "ddp": "data parallel",
    "fsdp": "data parallel",
    "megatron": "tensor parallel",
    "ulysses": "sequence parallel",
}
"""What each kind is, as pins forbid it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedConfiguration:
    """None where nothing is said."""

    kind: str
    dp: int | None = None
    tp: int | None = None
    cp: int | None = None
    pp: int = 1
    virtual_stages: int = 1
    schedule: str | None = None
    micro_batch: int | None = None
    zero: int | None = None
    sequence_parallel: bool | None = None
    recompute: str = "none"

    def __str__(self) -> str:
        said = [
            f"{f.name}={_spoken(getattr(self, f.name))}"
            for f in fields(self)
            if f.name != "kind" and getattr(self, f.name) != f.default
        ]
        return f"{self.kind}:{','.join(said)}" if said else self.kind

    @property
    def inner(self) -> int | None:
        """Ranks of the last axis, that of tensor or context parallelism; 1 for kinds without, None if unsaid."""
        if self.kind in ("ddp", "fsdp"):
            return 1
        return self.tp if self.kind == "megatron" else self.cp

    @property
    def zero_stage(self) -> int:
        return ZERO[self.kind] if self.zero is None else self.zero

    @property
    def techniques(self) -> tuple[str, ...]:
        """What it cannot be without, in the words of pins."""
        gathered = ("fsdp",) if self.zero_stage == 3 else ()
        return (TECHNIQUE[self.kind], *gathered, *(("recompute",) if self.recompute != "none" else ()))

    @property
    def pipeline_schedule(self) -> str:
        """Of its pipeline, in the words of `schedules`."""
        if self.virtual_stages > 1 and self.schedule in (None, "1f1b"):
            return "interleaved-1f1b"
        return self.schedule or "1f1b"

    @property
    def num_stages(self) -> int:
        chunks = 2 if self.schedule == "zbv" and self.virtual_stages == 1 else self.virtual_stages
        return self.pp * chunks

    def check_pipeline(self, microbatches: int | None = None) -> None:
        """Raises ArgumentError if its pipeline keys contradict each other or, if given, the number of micro-batches."""
        if self.pp == 1:
            if self.virtual_stages > 1 or self.schedule is not None:
                raise ArgumentError(
                    f"{self}: virtual_stages and schedule are of a pipeline; add pp of 2 or more, or leave them out"
                )
            return
        try:
            stage_ranks(self.pipeline_schedule, self.pp, self.num_stages)
            if microbatches is not None:
                check_microbatches(self.pipeline_schedule, self.pp, microbatches)
        except ArgumentError as error:
            raise ArgumentError(f"{self}: {error}") from error

    def mesh_on(self, cluster: Cluster, given: Mesh | None) -> Mesh | None:
        """The mesh of the degrees on a cluster, of each pipeline rank if there are several; `given` if that is one of
        theirs; None where nothing is said.

        Raises:
            MeshError: if the degrees do not multiply to the cluster's devices, or `given` is another mesh.
            ArgumentError: if keys of the pipeline contradict each other.
        """
        self.check_pipeline()
        n, inner = part_of(cluster, self.pp).num_devices, self.inner
        if self.kind in ("ddp", "fsdp"):
            self._check_dp(n, "", cluster)
            return given
        key = "tp" if self.kind == "megatron" else "cp"
        if given is not None:
            if inner not in (None, given.shape[-1]):
                raise MeshError(
                    f"{self}: the last axis of mesh {given} has {given.shape[-1]} ranks, {key} says {inner}; "
                    f"leave --mesh out, or choose one whose last axis has {inner}"
                )
            inner = given.shape[-1]
        elif inner is None and self.dp is not None:
            inner = max(n // self.dp, 1)
        if inner is None:
            return None
        if n % inner:
            degrees = [d for d in range(1, n + 1) if n % d == 0]
            found = devices_text(cluster, self.pp)
            raise MeshError(f"{self}: {key} {inner} does not divide {found}; use one of {degrees}")
        self._check_dp(n // inner, f" x {key} {inner}", cluster)
        return given or make_mesh((n // inner, inner))

    def _check_dp(self, ranks: int, rest: str, cluster: Cluster) -> None:
        if self.dp not in (None, ranks):
            raise MeshError(
                f"{self}: dp {self.dp}{rest} is not {devices_text(cluster, self.pp)}; use dp={ranks}, or leave it out"
            )

    def num_microbatches(self, global_batch: int | None, mesh: Mesh) -> int | None:
        """In how many micro-batches a step runs `global_batch` samples; None if nothing is said.

        Raises:
            BatchError: if data-parallel ranks x micro-batch do not divide it.
        """
        if self.micro_batch is None:
            return None
        dp = mesh.size if self.kind in ("ddp", "fsdp") else mesh.size // mesh.shape[-1]
        each = dp * self.micro_batch
        if global_batch is None or global_batch % each:
            found = "is not known: the inputs have no batch in common" if global_batch is None else f"{global_batch}"
            raise BatchError(
                f"{self}: global batch {found} is not divisible by {dp} data-parallel ranks x micro-batch "
                f"{self.micro_batch}; use a multiple of {each}"
            )
        return global_batch // each


def parse_configuration(text: str) -> NamedConfiguration:
    """`kind` or `kind:key=value,...` as a value.

    Raises:
        ArgumentError: for an unknown kind, key or value; names it, and what there is.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ArgumentError(
            f"unknown baseline {kind!r}; choose one of {', '.join(KINDS)}, each with keys as in fsdp:zero=2"
            f"{near(kind, KINDS)}"
        )
    known = (*KINDS[kind], *COMMON)
    given: dict[str, object] = {}
    for pair in filter(None, rest.split(",")):
        name, sign, value = (part.strip() for part in pair.partition("="))
        key = ALIASES.get(name, name)
        if not sign or key not in known:
            raise ArgumentError(
                f"baseline {text}: {pair!r} is no key of {kind} with its value; write key=value with {', '.join(known)}"
                f" (short: {', '.join(f'{a} for {k}' for a, k in ALIASES.items() if k in known and a != 'microbatch')})"
            )
        if key in given:
            raise ArgumentError(f"baseline {text}: {key} is given twice")
        given[key] = _value(text, key, value)
    return NamedConfiguration(kind=kind, **given)  # type: ignore[arg-type]


def configured(
    text: str,
    cluster: Cluster,
    mesh: Mesh,
    is_given: bool,
    batch: int | None,
    microbatches: int | Literal["auto"] | None = None,
) -> tuple[Mesh, int | Literal["auto"]]:
    """Mesh (of a pipeline rank) and number of micro-batches of a configuration; `mesh` and `microbatches` where it says
    nothing; where neither does, one, or auto for a pipeline.

    is_given: the mesh was asked for, so that the configuration's must be that one. batch: samples a step.

    Raises:
        ArgumentError, MeshError, BatchError: if it is none, or contradicts itself, `mesh` or `microbatches`.
    """
    said = parse_configuration(text)
    mesh = said.mesh_on(cluster, mesh if is_given else None) or mesh
    count = said.num_microbatches(batch, mesh)
    if count is not None and microbatches not in (None, 1, count):
        raise ArgumentError(
            f"{said} runs {count} micro-batches a step, microbatches says {microbatches}; leave one of the two out"
        )
    chosen = count or microbatches or ("auto" if said.pp > 1 else 1)
    said.check_pipeline(None if chosen == "auto" else chosen)
    return mesh, chosen


def _value(text: str, key: str, value: str) -> object:
    choices: dict[str, tuple[str, ...]] = {
        "recompute": RECOMPUTE,
        "schedule": SCHEDULES,
        "zero": ("0", "1", "2", "3"),
        "sequence_parallel": tuple(TRUTH),
    }
    if key in choices:
        if value not in choices[key]:
            known = choices[key]
            raise ArgumentError(f"baseline {text}: {key} {value!r} is none of {', '.join(known)}{near(value, known)}")
        return TRUTH[value] if key == "sequence_parallel" else int(value) if key == "zero" else value
    if not value.isdecimal() or int(value) < 1:
        raise ArgumentError(f"baseline {text}: {key} {value!r} is not a whole number from 1 on")
    return int(value)


def _spoken(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
