"""What a job takes along to a cluster: the package, and a working folder with its configuration and input.

    shipment/headrace/          a `py_modules` entry: the unpacked wheel, packaged configurations included
    shipment/work/              `working_dir`: config.yaml, checkpoint/ if it is small, the input

Ray hands a `py_modules` wheel to pip, which would fetch PyTorch and everything else anew on every node; the wheel's
content as a folder is put on the import path as it is. The libraries it needs have to be in the cluster's image.
"""

import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import yaml

from ..transfer.errors import ConfigError, HeadraceError
from .config import PACKAGE_ROOT, ClusterConfig, checkpoint_dir
from .strict import plain

MAX_STAGED_BYTES = 200 << 20
_BUILD_TIMEOUT_S = 300.0
_NOT_SOURCE = (
    ".*",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
    "out",
    "tests",
    "docs",
    "node_modules",
)


def stage_package(folder: Path) -> Path:
    """The package as a folder of its own: from a wheel built of a checkout, or from the installed files."""
    target = folder / "headrace"
    if not (PACKAGE_ROOT / "pyproject.toml").is_file():
        shutil.copytree(PACKAGE_ROOT, target, ignore=shutil.ignore_patterns("__pycache__"))
        return target
    wheel = build_wheel(folder / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("headrace/")]
        archive.extractall(folder, names)
    return target


def build_wheel(folder: Path) -> Path:
    """Builds the checkout's wheel in a copy, so that no earlier build leaks in. Raises HeadraceError."""
    source = folder / "source"
    shutil.copytree(PACKAGE_ROOT, source, ignore=shutil.ignore_patterns(*_NOT_SOURCE))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    try:
        subprocess.run(
            [*command, "--wheel-dir", str(folder), str(source)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        raise HeadraceError(
            f"the wheel cannot be built (setuptools and wheel are needed: pip install 'headrace[dev]'): {error.stderr}"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise HeadraceError(
            f"phase build: the wheel took longer than {_BUILD_TIMEOUT_S:g} s"
        ) from error
    (wheel,) = folder.glob("headrace-*.whl")
    return wheel


def stage_config(folder: Path, config: ClusterConfig) -> str:
    """Writes the resolved configuration into ``folder``; returns the name to call it by on the cluster.

    A checkpoint of the package goes with the package; another one comes along if it is small, and has to lie at the
    same absolute path on the cluster's nodes if it is not.
    """
    place, checkpoint = config.model.checkpoint, checkpoint_dir(config)
    if (
        Path(place).is_absolute()
        and checkpoint.is_dir()
        and folder_bytes(checkpoint) <= MAX_STAGED_BYTES
    ):
        place = "checkpoint"
        shutil.copytree(checkpoint, folder / place)
    document = plain(replace(config, model=replace(config.model, checkpoint=place)))
    (folder / "config.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return "config.yaml"


def stage_input(folder: Path, written: str) -> str:
    """Puts a local input into ``folder``; returns the name to call it by on the cluster. A URI stays what it is.

    Raises ConfigError for a local file that is not there or is too large to be sent.
    """
    if "://" in written:
        return written
    path = Path(written).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"input {written} is not a file here; name one on the cluster as file:///its/path"
        )
    if path.stat().st_size > MAX_STAGED_BYTES:
        raise ConfigError(
            f"input {written} has {path.stat().st_size} bytes, and a job takes {MAX_STAGED_BYTES} along: put it "
            "where the cluster can read it and name it by a URI (s3://..., or file:///its/path on a shared file system)"
        )
    shutil.copy(path, folder / path.name)
    return path.name


def folder_bytes(folder: Path) -> int:
    """Size of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
