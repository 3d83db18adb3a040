"""``headrace batch``: answer every line of a file with a cluster of its own.

Exit status 0: every line of the input has its line of output, an answer or an error. 1: the cluster died or the disk
was full; the same command goes on where this run ended. 2: there is something to mend first.
"""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ...transfer.errors import ConfigError, HeadraceError
from ..config import ClusterConfig, checkpoint_dir, load_cluster_config
from ..eplb.report import check_writable, save_report, without_series
from ..eplb.show import render_report
from ..eplb.watch import ExpertWatch, shares_experts
from ..show_config import add_config_arguments
from .report import Totals, Value, render, summarize

if TYPE_CHECKING:
    from ...model.checkpoint import Checkpoint
    from .job import BatchJob
    from .runner import Runner


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See cli.Command."""
    add_config_arguments(parser)
    parser.add_argument(
        "--input", required=True, metavar="IN", help="JSONL or Parquet, a path or a URI"
    )
    parser.add_argument("--output", required=True, metavar="OUT", help="JSONL, a path or a URI")
    parser.add_argument(
        "--ordered", action="store_true", help="sort the finished output like the input"
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="requests in flight (default: what decode holds)",
    )
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path(".headrace-batch"),
        metavar="DIR",
        help="where the output is built when OUT is an object store (default: %(default)s)",
    )
    parser.add_argument(
        "--eplb-report",
        type=Path,
        metavar="FILE.json",
        help="where to save where experts lay and how even their load was; `headrace eplb show` reads it",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the closing report as a JSON document"
    )


def run(args: argparse.Namespace) -> int | dict[str, object]:
    """See cli.Command."""
    if args.concurrency is not None and args.concurrency < 1:
        raise ConfigError(
            f"--concurrency = {args.concurrency} is not allowed: an integer of at least 1"
        )
    config = load_cluster_config(args.config, args.overrides)
    if args.eplb_report is not None:
        check_writable(args.eplb_report, "--eplb-report")
        if not shares_experts(config):
            raise ConfigError(
                "--eplb-report has nothing to report: no pool of this deployment has ranks > 1"
            )
    # what the user can mend is found before the network's libraries are loaded: that takes seconds
    from .source import Source
    from .target import Target

    source = Source(args.input)
    target = Target.of(args.output, args.work_dir)
    from ...model.checkpoint import Checkpoint
    from .job import BatchJob

    checkpoint = Checkpoint(checkpoint_dir(config))
    identity: dict[str, bool | int | str | None] = {
        "model": checkpoint.fingerprint(),
        "numerics": config.model.numerics,
        "deterministic": config.model.deterministic,
        "keep": config.model.keep,
        "split": config.split,
    }
    watch = ExpertWatch() if shares_experts(config) else None
    with BatchJob(source, target, identity) as job:
        document = drive(
            job,
            lambda: answer(job, config, checkpoint, args.concurrency, watch),
            ordered=args.ordered,
        )
    experts = {} if watch is None else watch.report
    if args.eplb_report is not None:
        save_report(args.eplb_report, experts)
    if args.json:
        return {**document, "eplb": without_series(experts)} if experts else {**document}
    console = Console()
    console.print(render(document, args.output))
    if args.eplb_report is not None:
        console.print(render_report(experts, placement=False))
    return 0


def drive(
    job: "BatchJob", answer_rest: Callable[[], "Runner"], *, ordered: bool
) -> dict[str, Value]:
    """Takes a job to its end; ``answer_rest`` answers what is left. Returns the report."""
    if job.bytes_cut:
        _say(f"{job.bytes_cut} bytes of torn or doubled lines were cut out of the output")
    if job.journal.resumed:
        _say(f"going on with a job that has {job.totals.lines} lines done")
    begun, run_totals, run_s = time.monotonic(), Totals(), 0.0
    if not job.is_complete():
        try:
            runner = answer_rest()
        except (KeyboardInterrupt, HeadraceError):
            _say(f"{job.totals.lines} lines are done; the same command goes on from there")
            raise
        run_totals, run_s = runner.run_totals, runner.run_s
    job.deliver(ordered=ordered)
    return summarize(job.totals, run_totals, time.monotonic() - begun, run_s)


def _say(text: str) -> None:
    sys.stderr.write(f"batch: {text}\n")
    sys.stderr.flush()


def answer(
    job: "BatchJob",
    config: ClusterConfig,
    checkpoint: "Checkpoint",
    concurrency: int | None,
    watch: ExpertWatch | None,
) -> "Runner":
    """Starts the cluster, answers what is left, and takes the cluster down whatever happens.

    ``watch`` looks at the experts meanwhile, and once more at the end.
    """
    from ...model.tokenizer import Tokenizer
    from ..cluster import Cluster
    from ..progress import stderr_progress
    from .codec import TokenizerCodec
    from .runner import RunnerConfig

    codec = TokenizerCodec.of(Tokenizer(checkpoint.directory, checkpoint.config))
    runner_config = RunnerConfig(
        concurrency=concurrency or _places(config),
        model=checkpoint.directory.name,
    )
    context_tokens = min(checkpoint.config.max_position_embeddings, _cache_tokens(config))
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with Cluster.start(config, progress=stderr_progress(config.num_ranks)) as cluster:
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own would end us without a teardown
        runner = job.runner(runner_config, cluster, codec)
        if watch is not None:
            watch.begin(cluster)
        asyncio.run(job.answer(runner, codec, context_tokens, watch))
        if watch is not None:
            watch.look()
    return runner


def _places(config: ClusterConfig) -> int:
    """Requests that can be decoded at a time, and one waiting per prefill rank so that none of them idles."""
    decode, prefill = config.decode, config.prefill
    places = min(decode.num_slots - 1, decode.max_batch)
    return decode.instances * decode.ranks * places + prefill.instances * prefill.ranks


def _cache_tokens(config: ClusterConfig) -> int:
    """The longest request that fits the cache of one rank; block 0 is reserved."""
    num_blocks = min(config.prefill.num_blocks, config.decode.num_blocks) - 1
    return num_blocks * config.model.block_tokens
