"""The house keeps its rules: who imports whom, what the wheel holds, who touches private torch, how long files are.

Each rule is a table at the top. A new module joins the table, or a test here says where to declare it.
"""

import ast
import fnmatch
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Folders of the product and the package each is imported as.
PACKAGES = {"autopar": "autopar", "passes": "autopar.passes", "cost_models": "autopar.cost_models"}

# Modules and packages right under `autopar`, from what knows nothing to what knows everything. A module imports from
# its own layer and from those before it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("values",),
    ("ops",),
    ("rules", "cost_models", "passes"),
    ("lower",),
    (
        *("advice", "search", "runtime", "capture", "models", "oracle", "export", "launch", "report", "verification"),
        "calibration",
    ),
    ("api", "__init__"),
    ("integrations",),
    ("cli",),
)

# The search's own order, from what a plan costs to why it was chosen. A folder or file under `search` imports from
# itself and from those before it.
SEARCH_ORDER = (
    *(
        "compiled",
        "costs",
        "graph",
        "exact",
        "pairwise",
        "warm",
        "recursion",
        "fitting",
        "following",
        "meshes",
        "pipeline_parts",
        "search_options",
    ),
    "alike_meshes",
    *("graph_file", "solve"),
    *(
        "staged",
        "known",
        "asked_mesh",
        "timeline",
        "microbatches",
        "find_exactly",
        "mixing",
        "planner",
        "one_device",
        "in_buckets",
        "woven",
        "joint",
        "explanation",
        "overlapped",
        "__init__",
    ),
)

# Beyond layers: passes know what is legal, cost models what is dear, search what is wise; report reads values, and
# whoever calls joins it with the search.
FORBIDDEN = {
    "passes": ("search", "cost_models"),
    "cost_models": ("search", "passes", "rules", "ops"),
    "report": ("search", "runtime"),
    "search": ("report", "runtime"),
}

# Private parts of torch, and the files (globs) that may touch each; a dot in front means an attribute of any object.
# One file each, so that a new torch is one file's work. The type of an ATen op is the exception: it has no other name.
_C_FILES = ("runtime/private_torch", "capture/real_values", "capture/inner_gradients")
_MODE_FILES = [f"capture/{n}" for n in ("layer_traces", "real_values", "own_functions", "python_state")]
PRIVATE_TORCH: dict[str, tuple[str, ...]] = {
    "torch._C": tuple(f"autopar/{n}.py" for n in _C_FILES),
    "torch.Tensor._make_wrapper_subclass": ("autopar/runtime/deferred.py",),
    "torch._assert": ("autopar/capture/real_values.py",),
    "torch._assert_async": ("autopar/capture/real_values.py", "autopar/ops/checked.py"),
    "torch._ops": ("*",),
    "torch._dynamo": ("autopar/runtime/backends.py",),
    "torch._inductor": ("autopar/runtime/inductor.py", "autopar/capture/decompose.py"),
    "torch.ops._c10d_functional": ("autopar/ops/functional.py",),
    "torch._library": ("autopar/values/custom_ops.py",),
    "torch._subclasses": ("autopar/capture/fake_twin.py",),
    "torch.export._trace": ("autopar/capture/quiet.py",),
    "torch.autograd.function._SingleLevelFunction": ("autopar/capture/own_functions.py",),
    "torch.nn.utils.clip_grad._clip_grads_with_norm_": ("autopar/runtime/private_torch.py",),
    "torch.nn.Module._apply": ("autopar/capture/moved_modules.py",),
    "torch.nn.modules.module._global_backward_hooks": ("autopar/capture/gradient_hooks.py",),
    "torch.nn.modules.module._global_is_full_backward_hook": ("autopar/capture/gradient_hooks.py",),
    "torch.utils._python_dispatch": tuple(f"autopar/{n}.py" for n in (*_MODE_FILES, "runtime/peak_memory")),
    "torch.utils._pytree": ("autopar/values/inputs.py",),
    "torch.distributed.tensor.placement_types._StridedShard": ("autopar/runtime/private_torch.py",),
    "torch.distributed.distributed_c10d._get_default_store": ("autopar/runtime/private_torch.py",),
    "torch.distributed.checkpoint.filesystem._StorageInfo": ("autopar/runtime/private_torch.py",),
    "torch.autograd.Variable._execution_engine": ("autopar/runtime/private_torch.py",),
    "._local_tensor": ("autopar/runtime/private_torch.py",),
    "._spec": ("autopar/runtime/private_torch.py",),
    "._get_init_p2p_neighbors_ops": ("autopar/runtime/private_torch.py", "tests/test_runtime_private_torch.py"),
}

MAX_LINES = 400
MAX_PARAMETERS = 8

# Functions whose parameters are somebody else's: a user's keywords, an ATen op's schema, arrays of a compiled kernel.
MANY_PARAMETERS = (
    "autopar.api.planning.plan",
    "autopar.capture.inner_gradients.inner_gradients",
    "autopar.cli.*",
    "autopar.ops.*",
    "autopar.search.*kernel.*",
)

# Imports inside functions are what saves a user seconds, and why.
LAZY = {
    "autopar.__init__": "import autopar without torch",
    "autopar.api.*": "a plan is read, printed and compared without the search or the runtime",
    "autopar.cli.*": "autopar --help without torch",
    "autopar.capture.seeds": "itself, as torch calls it",
    "autopar.models.spec": "transformers is optional",
    "autopar.runtime.backends": "inductor",
    "autopar.runtime.module": "functorch",
    "autopar.search.solve": "kernels that only pairwise graphs need",
}


def walk(folder: Path) -> Iterator[Path]:
    """Files below `folder`, links not followed, caches left out."""
    for base, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f != "__pycache__" and not f.endswith(".egg-info"))
        folders[:] = [f for f in folders if not (Path(base) / f).is_symlink()]
        yield from (Path(base) / file for file in sorted(files) if not file.endswith(".pyc"))


@cache
def product() -> dict[str, Path]:
    """Module name -> file, for every module of the product."""
    modules = {}
    for folder, package in PACKAGES.items():
        for file in walk(ROOT / folder):
            if file.suffix == ".py":
                parts = [package, *file.relative_to(ROOT / folder).with_suffix("").parts]
                modules[".".join(parts).removesuffix(".__init__")] = file
    return modules


def unit(module: str) -> str:
    """`autopar.passes.x.y` -> `passes`; the package itself is `__init__`."""
    return module.split(".")[1] if "." in module else "__init__"


def part(module: str) -> str:
    """`autopar.search.graph.build` -> `graph`; the package itself is `__init__`."""
    return module.split(".")[2] if module.count(".") > 1 else "__init__"


def imported_modules(source: str, known: set[str]) -> set[str]:
    """Modules of autopar that `source` imports, at any depth: in functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"relative import on line {node.lineno}; write it from autopar"
            children = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= children & known
            if children - known:
                found.add(node.module or "")
    return {name for name in found if name.split(".")[0] == "autopar"}


def breaks(module: str, target: str) -> str | None:
    """Why `module` may not import `target`, or None if it may."""
    layer = {name: index for index, names in enumerate(LAYERS) for name in names}
    source, dependency = unit(module), unit(target)
    for name in (source, dependency):
        if name not in layer:
            return f"autopar.{name} has no layer; declare it in LAYERS of tests/test_house.py"
    if layer[dependency] > layer[source]:
        return f"{module} (layer {layer[source]}) imports {target} (layer {layer[dependency]}), which stands above it"
    if (source, dependency) == ("search", "search"):
        for name in (module, target):
            if part(name) not in SEARCH_ORDER:
                return f"{name} has no place in the search; declare it in SEARCH_ORDER of tests/test_house.py"
        if SEARCH_ORDER.index(part(target)) > SEARCH_ORDER.index(part(module)):
            return f"{module} imports {target}, which comes after it in SEARCH_ORDER of tests/test_house.py"
    if dependency in FORBIDDEN.get(source, ()):
        return f"{module} imports {target}, and {source} never import {dependency}"
    return None


@pytest.mark.parametrize("module", sorted(product()))
def test_imports_point_downwards(module: str) -> None:
    targets = imported_modules(product()[module].read_text(), set(product()))
    assert [reason for target in sorted(targets | {module}) if (reason := breaks(module, target))] == []


def test_the_direction_rule_itself() -> None:
    assert breaks("autopar.passes.x", "autopar.errors") is None
    assert breaks("autopar.search.planner", "autopar.cost_models.y") is None
    assert breaks("autopar.cli", "autopar.api.planning") is None
    assert breaks("autopar.search.planner", "autopar.search.costs.y") is None
    assert "SEARCH_ORDER" in (breaks("autopar.search.costs.x", "autopar.search.planner") or "")
    assert "above" in (breaks("autopar.rules.x", "autopar.search.planner") or "")
    assert "above" in (breaks("autopar.errors", "autopar") or "")
    assert "never" in (breaks("autopar.passes.x", "autopar.cost_models") or "")
    assert "declare" in (breaks("autopar.novelty", "autopar.errors") or "")
    known = {"autopar", "autopar.api.planning", "autopar.search", "autopar.search.exact.ilp"}
    lazy = "def f():\n    from autopar.search.exact import ilp\n    from autopar import plan\n    import torch"
    assert imported_modules(lazy, known) == {"autopar.search.exact.ilp", "autopar"}
    with pytest.raises(AssertionError, match="relative"):
        imported_modules("from . import x", known)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of names that lead back to themselves."""
    left = {name: {other for other in others if other in graph and other != name} for name, others in graph.items()}
    while leaves := {name for name, others in left.items() if not others}:
        left = {name: others - leaves for name, others in left.items() if name not in leaves}
    while heads := set(left) - {other for others in left.values() for other in others}:
        left = {name: others for name, others in left.items() if name not in heads}
    return [set(left)] if left else []


def test_no_circle_of_files_or_folders() -> None:
    """Whether or not an import is in a function, or for types alone."""
    known = set(product())
    files = {name: imported_modules(file.read_text(), known) for name, file in product().items()}
    assert circles(files) == []
    for depth in (2, 3):
        folders: dict[str, set[str]] = {}
        for name, targets in files.items():
            own = ".".join(name.split(".")[:depth])
            folders.setdefault(own, set()).update(".".join(target.split(".")[:depth]) for target in targets)
        del folders["autopar"]  # its names are those of the layers below
        assert circles(folders) == []


def test_the_rule_of_circles_itself() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def lazy_imports(source: str) -> list[int]:
    """Lines of imports of autopar inside functions."""
    inside = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = [n for function in inside for n in ast.walk(function) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = [(n.lineno, n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name) for n in found]
    return sorted({line for line, name in names if name.split(".")[0] == "autopar"})


def test_imports_inside_functions_are_those_that_save_time() -> None:
    found = {name: lazy_imports(file.read_text()) for name, file in product().items()}
    assert {
        name: lines for name, lines in found.items() if lines and not any(fnmatch.fnmatch(name, g) for g in LAZY)
    } == {}, "import at the top, or list the module in LAZY with what it saves"
    assert lazy_imports("def f():\n    import torch\n    from autopar import plan") == [3]


def long_signatures(source: str) -> list[str]:
    """Functions with more parameters than `MAX_PARAMETERS`, `self` not counted."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if len([name for name in names if name not in ("self", "cls")]) > MAX_PARAMETERS:
                found.append(node.name)
    return found


def test_functions_have_few_parameters() -> None:
    found = [f"{name}.{one}" for name, file in product().items() for one in long_signatures(file.read_text())]
    assert [name for name in found if not any(fnmatch.fnmatch(name, glob) for glob in MANY_PARAMETERS)] == []
    assert long_signatures("def f(self, a, b, c, d, e, f, g, *, h): ...\ndef g(a, b, c, d, e, f, g, h, i): ...") == [
        "g"
    ]


def test_a_class_name_has_one_meaning() -> None:
    named: dict[str, list[str]] = {}
    for module, file in product().items():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in named.items() if len(modules) > 1} == {}


def private_torch(source: str) -> set[str]:
    """Keys of PRIVATE_TORCH style that `source` touches: `torch.a._b` up to its first private part, `._listed`."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    dotted: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted |= {alias.name for alias in node.names}
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            dotted |= {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    listed = {key for key in PRIVATE_TORCH if key.startswith(".")}
    touched = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            touched |= {f".{node.attr}"} & listed
            chain = [node.attr]
            value = node.value
            while isinstance(value, ast.Attribute):
                chain.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in names:
                dotted.add(".".join([names[value.id], *reversed(chain)]))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            touched |= {f".{node.value}"} & listed  # getattr(tensor, "_local_tensor")
    for name in dotted:
        if match := re.match(r"torch\.(?!ops\.aten\.)(?:[A-Za-z]\w*\.)*_(?!_)\w+", name):
            touched.add(match.group())
    return touched


@pytest.mark.parametrize("file", sorted(f.relative_to(ROOT).as_posix() for f in product().values()))
def test_private_torch_stays_behind_its_file(file: str) -> None:
    touched = private_torch((ROOT / file).read_text())
    astray = sorted(
        name for name in touched if not any(fnmatch.fnmatch(file, allowed) for allowed in PRIVATE_TORCH.get(name, ()))
    )
    assert astray == [], (
        f"{file} touches private parts of torch that PRIVATE_TORCH of tests/test_house.py keeps elsewhere"
    )


def test_private_torch_is_recognised() -> None:
    assert private_torch("import torch\ntorch._ops.OpOverload") == {"torch._ops"}
    assert private_torch("import torch.fx._x as y\ny.z") == {"torch.fx._x"}
    assert private_torch("from torch.ops import _c10d_functional as f\nf.wait") == {"torch.ops._c10d_functional"}
    strided = "torch.distributed.tensor.placement_types._StridedShard"
    assert private_torch("from torch.distributed.tensor.placement_types import _StridedShard") == {strided}
    assert private_torch("x._local_tensor; getattr(x, '_spec')") == {"._local_tensor", "._spec"}
    assert private_torch("import torch\ntorch.ops.aten._softmax.default") == set(), "a name of ATen, not of Python"
    assert private_torch("import torch\ntorch.nn.Module.__init__\nself._mine") == set()


def sources() -> list[str]:
    folders = (*PACKAGES, "tests", "examples", "benchmarks")
    return [f.relative_to(ROOT).as_posix() for folder in folders for f in walk(ROOT / folder) if f.suffix == ".py"]


def test_no_file_is_longer_than_a_head_can_hold() -> None:
    lengths = {file: len((ROOT / file).read_text().splitlines()) for file in sources()}
    assert {file: length for file, length in lengths.items() if length > MAX_LINES} == {}


def test_the_first_two_commands_of_the_readme_are_the_two_that_work() -> None:
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    commands = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]
    assert commands[:2] == ["make demo", "make test"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    for command in commands[:2]:
        result = subprocess.run(
            [*command.split(), "-n"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        assert ".venv/bin/python" in result.stdout


def test_continuous_integration_runs_what_a_person_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert "set -euo pipefail" in lines
    assert [line.split()[-1] for line in lines if line.startswith("make ")] == ["check", "test"]
