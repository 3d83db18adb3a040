"""The floors of DESIGN.md section 3: who may import whom, what importing may do, and what the wheel holds."""

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOOR = {
    "kernels": 0,
    "transfer": 1,
    "model": 2,
    "prefill": 3,
    "decode": 3,
    "cluster": 4,
    "scripts": 5,
}
PACKAGED = [folder for folder in FLOOR if folder != "scripts"]
#: Libraries of which one place alone may know.
OWNER = {
    "ray": "cluster/",
    "nixl": "transfer/nixl",
    "triton": "kernels/",
    "numba": "kernels/_numba.py",
    "xgrammar": "decode/",
}
UNSAFE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
MAX_LINES = 400

SOURCES = sorted(
    path.relative_to(ROOT) for folder in FLOOR for path in (ROOT / folder).rglob("*.py")
)


def imports(source: Path) -> Iterator[tuple[int, int, str]]:
    """(line, level, dotted module) of every import; level 0 is absolute, a relative one comes from the root."""
    for node in ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, 0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, 0, node.module or ""
        elif isinstance(node, ast.ImportFrom):
            above = source.parts[: len(source.parts) - node.level]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((node.lineno, node.level, ".".join((*above, name))) for name in names)


def target_of(level: int, module: str) -> str:
    """The folder of this repository that an import reaches, or an empty string."""
    first, _, rest = module.partition(".")
    if level:
        return first
    return rest.partition(".")[0] if first == "headrace" else ""


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_imports_point_down(source: Path) -> None:
    folder = source.parts[0]
    for line, level, module in imports(source):
        target = target_of(level, module)
        if target in FLOOR and target != folder:
            assert FLOOR[target] < FLOOR[folder], f"{source}:{line}: {folder} imports {module}"


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_siblings_are_imported_relatively(source: Path) -> None:
    for line, level, module in imports(source):
        first = module.partition(".")[0]
        if level == 0:
            assert first not in FLOOR, (
                f"{source}:{line}: write headrace.{module} or a relative import"
            )
            inside = first == "headrace" and source.parts[0] != "scripts"
            assert not inside, f"{source}:{line}: inside the package, import {module} relatively"


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_each_library_has_one_owner(source: Path) -> None:
    for line, level, module in imports(source):
        first = module.partition(".")[0] if level == 0 else ""
        owner = OWNER.get(first)
        assert owner is None or source.as_posix().startswith(owner), (
            f"{source}:{line}: only {owner} imports {first}"
        )
        assert first not in UNSAFE, f"{source}:{line}: {first} runs what it reads"


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_a_file_has_one_subject(source: Path) -> None:
    lines = (ROOT / source).read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_LINES, f"{source} has {lines} lines: it holds two subjects"


@pytest.mark.parametrize("folder", PACKAGED)
def test_folders_do_nothing_when_imported(folder: str) -> None:
    for init in (ROOT / folder).rglob("__init__.py"):
        body = ast.parse(init.read_text(encoding="utf-8")).body
        assert all(isinstance(node, ast.Expr) for node in body), f"{init} is more than a docstring"


def test_importing_the_lower_floors_starts_nothing() -> None:
    folders = ("kernels", "transfer", "model", "prefill", "decode")
    modules = [
        "headrace." + ".".join(source.with_suffix("").parts)
        for source in SOURCES
        if source.parts[0] in folders
        and source.name != "__init__.py"
        and not source.as_posix().startswith(OWNER["nixl"])
    ]
    script = f"""
import importlib, sys, threading
for module in {modules!r}:
    importlib.import_module(module)
assert not {{"ray", "nixl"}} & set(sys.modules), "ray or nixl was imported"
assert threading.active_count() == 1, threading.enumerate()
import torch
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
"""
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd="/",
    )
    assert ran.returncode == 0, ran.stderr


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in a wheel that is built offline from a copy of the working tree."""
    tree = tmp_path_factory.mktemp("wheel") / "source"
    ignore = shutil.ignore_patterns(
        "__pycache__", ".venv", ".git", "out", "build", "dist", "*.egg-info", ".*_cache"
    )
    shutil.copytree(ROOT, tree, ignore=ignore)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tree / "dist"),
    ]
    built = subprocess.run(
        command, cwd=tree, capture_output=True, text=True, timeout=240, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_the_only_top_level_of_the_wheel_is_headrace(wheel_names: list[str]) -> None:
    tops = {name.partition("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"headrace"}
    inner = {name.split("/")[1] for name in wheel_names if name.startswith("headrace/")}
    assert inner <= {*PACKAGED, "configs", "__init__.py"}


def test_the_wheel_holds_every_module_and_configuration(wheel_names: list[str]) -> None:
    wanted = [source for source in SOURCES if source.parts[0] in PACKAGED]
    configs = (path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*") if path.is_file())
    missing = {f"headrace/{path.as_posix()}" for path in (*wanted, *configs)} - set(wheel_names)
    assert not missing
    assert "headrace/configs/checkpoints/tiny-v41/config.json" in wheel_names
    assert any(
        name.startswith("headrace/configs/checkpoints/tiny-v41/") and name.endswith(".safetensors")
        for name in wheel_names
    )
