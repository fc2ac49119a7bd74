"""What is installed is what stands in the tree: packages, data files, a wheel from a copy without links."""

import fnmatch
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from benchmarks import install_matrix
from tests.test_house import PACKAGES, ROOT, product, walk


def test_passes_and_cost_models_are_reached_through_links() -> None:
    for folder in ("passes", "cost_models"):
        link = ROOT / "autopar" / folder
        assert link.is_symlink() and link.readlink() == Path("..") / folder


def settings() -> dict[str, dict[str, object]]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert isinstance(table, dict)
    return table


def test_the_page_of_installs_keeps_the_rows_that_were_not_run_again() -> None:
    rows = install_matrix.rows_on((ROOT / "docs/results/install.md").read_text())
    again = install_matrix.page(rows)
    assert len(rows) > 1 and install_matrix.rows_on(again) == rows
    cell = install_matrix.Cell(torch="2.9", transformers="5.0", source="sdist", verify="ok, 4 collectives a step")
    assert install_matrix.rows_on(install_matrix.page([*rows, install_matrix.row_of(cell)]))[0][0] == "2.9"


def test_the_package_list_is_the_tree() -> None:
    folders = {name if file.name == "__init__.py" else name.rpartition(".")[0] for name, file in product().items()}
    missing = [name for name in folders if name not in product() or product()[name].name != "__init__.py"]
    assert missing == [], "folders with modules but no __init__.py"
    assert settings()["packages"] == sorted(folders), "tool.setuptools.packages of pyproject.toml, sorted"
    assert settings()["package-dir"] == {package: folder for folder, package in PACKAGES.items()}


def data_files() -> dict[str, Path]:
    """`package-relative path in the wheel` -> file, for what is not Python source."""
    return {
        f"{package.replace('.', '/')}/{file.relative_to(ROOT / folder).as_posix()}": file
        for folder, package in PACKAGES.items()
        for file in walk(ROOT / folder)
        if file.suffix != ".py"
    }


def test_package_data_covers_every_data_file() -> None:
    patterns = [
        f"{package.replace('.', '/')}/{pattern}"
        for package, globs in settings()["package-data"].items()
        for pattern in globs
    ]
    left_out = [path for path in data_files() if not any(fnmatch.fnmatch(path, pattern) for pattern in patterns)]
    assert left_out == [], "add them to tool.setuptools.package-data of pyproject.toml"


def test_the_wheel_is_complete(tmp_path: Path) -> None:
    """Built without network, from a copy without the links (as a checkout on Windows would be)."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in PACKAGES:
        for file in walk(ROOT / folder):
            target = source / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
    ]
    command += ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    [wheel] = tmp_path.glob("*.whl")
    expected = set(data_files())
    for name, file in product().items():
        expected.add(name.replace(".", "/") + ("/__init__.py" if file.name == "__init__.py" else ".py"))
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert held == expected
