"""Runs a deployment on the Ray cluster at argv[1], and prints as JSON where each rank ran and what it answered."""

import asyncio
import json
import sys

import ray

from headrace.cluster.cluster import Cluster
from headrace.cluster.config import load_cluster_config
from headrace.tests.cluster.ray_support import SMALL, request_of


def main() -> None:
    config = load_cluster_config(
        "local",
        [
            *SMALL,
            f"ray.address={sys.argv[1]}",
            "prefill.placement.resources={prefill: 1}",
            "decode.placement.resources={decode: 1}",
        ],
    )
    with Cluster.start(config) as cluster:
        offers = {
            node["NodeID"]: sorted({"prefill", "decode"} & node["Resources"].keys())
            for node in ray.nodes()
        }
        where = {name: offers[node_id] for name, node_id in cluster.nodes().items()}

        async def ask_all() -> list[tuple[int, ...]]:
            completions = await asyncio.gather(
                *(cluster.generate(request_of(f"r{n}", n)) for n in (5, 33, 60))
            )
            return [completion.ids for completion in completions]

        answers = asyncio.run(ask_all())
    sys.stdout.write(json.dumps({"where": where, "answers": answers}) + "\n")


if __name__ == "__main__":
    main()
