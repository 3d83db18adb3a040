"""Runs a cluster of fake ranks on a Ray of its own and waits for an answer that never comes."""

import asyncio
import sys

from headrace.cluster.cluster import Cluster
from headrace.cluster.config import load_cluster_config
from headrace.cluster.fake_rank import FakeBuilder, Faults
from headrace.cluster.progress import stderr_progress
from headrace.transfer.request import Request


def main() -> None:
    config = load_cluster_config(
        "local", [f"model.checkpoint={sys.argv[1]}", "decode.ranks=1", "ray.address=local"]
    )
    builder = FakeBuilder(Faults(silent=frozenset({"silent"})))
    with Cluster.start(config, stderr_progress(config.num_ranks), builder) as cluster:
        sys.stdout.write("waiting\n")
        sys.stdout.flush()
        try:
            asyncio.run(cluster.generate(Request(request_id="silent", prompt_ids=(1, 2))))
        except KeyboardInterrupt:
            sys.stdout.write("interrupted\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
