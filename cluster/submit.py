"""``headrace submit``: run a batch as a job of a Ray cluster, with this package, and follow it.

    headrace submit --address http://head:8265 -- batch CONFIG --input IN --output OUT

The driver runs on the cluster's head node. Exit status: that of the job.
"""

import argparse
import asyncio
import logging
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..transfer.errors import ConfigError, HeadraceError
from .batch import command as batch
from .config import ClusterConfig, load_cluster_config
from .shipping import stage_config, stage_input, stage_package

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.Command."""
    parser.add_argument(
        "--address",
        required=True,
        metavar="URL",
        help="the cluster's dashboard, e.g. http://head:8265",
    )
    parser.add_argument(
        "--working-dir",
        type=Path,
        metavar="DIR",
        help="files that the job finds in its working folder, too",
    )
    parser.add_argument("--no-wait", action="store_true", help="return when the job is accepted")
    parser.add_argument(
        "--json", action="store_true", help="print how the job ended as a JSON document"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- batch ...", help="what to run there"
    )


def run(args: argparse.Namespace) -> int | dict[str, object]:
    """See cli.Command."""
    asked = parse_command(args.command)
    config = load_cluster_config(asked.config, asked.overrides)
    with tempfile.TemporaryDirectory(prefix="headrace-submit-") as folder:
        command, work = stage_job(asked, config, Path(folder), args.working_dir)
        client = _connect(args.address)
        package = stage_package(Path(folder) / "package")
        job = _submit(client, command, work, package)
    _say(f"job {job} runs: {command}")
    if args.no_wait:
        return {"submission_id": job} if args.json else 0
    status, exit_status = _follow(client, job, args.address)
    if args.json:
        return {
            "submission_id": job,
            "status": status,
            "job_exit_status": exit_status,
            "exit_status": exit_status,
        }
    _say(f"job {job}: {status}")
    return exit_status


def parse_command(words: list[str]) -> argparse.Namespace:
    """The batch command line that is to run as a job, checked here so that a mistake shows before anything is sent."""
    words = words[1:] if words[:1] == ["--"] else words
    if words[:1] != ["batch"]:
        raise ConfigError(
            "give the command after --, for example: -- batch CONFIG --input IN --output OUT"
        )
    parser = argparse.ArgumentParser(prog="headrace submit ... -- batch")
    batch.add_arguments(parser)
    parser.add_argument("--debug", action="store_true")
    asked = parser.parse_args(words[1:])
    if "://" not in asked.output and not Path(asked.output).is_absolute():
        raise ConfigError(
            f"output {asked.output} is not allowed: a job's own folder vanishes with it; give an absolute path on the "
            "head node (best on a shared file system) or a URI"
        )
    return asked


def stage_job(
    asked: argparse.Namespace, config: ClusterConfig, folder: Path, extra: Path | None
) -> tuple[str, Path]:
    """The job's command line and its working folder, filled with what the command names."""
    work = folder / "work"
    if extra is None:
        work.mkdir(parents=True)
    elif extra.is_dir():
        shutil.copytree(extra, work)
    else:
        raise ConfigError(f"--working-dir {extra} is not a directory")
    words = ["python", "-m", "headrace.cluster.cli", "batch", stage_config(work, config)]
    words += ["--input", stage_input(work, asked.input), "--output", asked.output]
    words += ["--ordered"] if asked.ordered else []
    words += ["--concurrency", str(asked.concurrency)] if asked.concurrency is not None else []
    words += ["--work-dir", str(asked.work_dir)] if asked.work_dir.is_absolute() else []
    words += ["--json"] if asked.json else []
    words += ["--debug"] if asked.debug else []
    return shlex.join(words), work


def _connect(address: str) -> "JobSubmissionClient":
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    logging.getLogger("ray").setLevel(logging.ERROR)  # it tells at length what it packs
    try:
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        raise ConfigError(
            f"{address} refuses the token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH "
            "as that cluster has them"
        ) from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"no job can be submitted to {address}: {error} Give the address of the dashboard (http://HEAD:8265)"
        ) from error


def _submit(client: "JobSubmissionClient", command: str, work: Path, package: Path) -> str:
    runtime_env = {"working_dir": str(work), "py_modules": [str(package)]}
    try:
        return client.submit_job(entrypoint=command, runtime_env=runtime_env)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise HeadraceError(f"the job was not accepted: {error}") from error


def _follow(client: "JobSubmissionClient", job: str, address: str) -> tuple[str, int]:
    """Prints the job's log to standard error until it ends; returns its last status and its exit status."""
    try:
        asyncio.run(_print_log(client, job))
        info = client.get_job_info(job)
    except KeyboardInterrupt:
        _say(f"the job goes on; end it with: ray job stop --address {address} {job}")
        raise
    except (ConnectionError, RuntimeError) as error:
        raise HeadraceError(f"job {job} is out of sight, it may still run: {error}") from error
    failed = 0 if str(info.status) == "SUCCEEDED" else 1
    if info.message and failed and info.driver_exit_code is None:
        _say(info.message)
    return str(info.status), info.driver_exit_code if info.driver_exit_code is not None else failed


async def _print_log(client: "JobSubmissionClient", job: str) -> None:
    async for text in client.tail_job_logs(job):
        sys.stderr.write(text)
        sys.stderr.flush()


def _say(text: str) -> None:
    sys.stderr.write(f"submit: {text}\n")
    sys.stderr.flush()
