"""Times the C++ engine ftllm on the prompts of `headrace bench engine`, for the comparison in docs/performance.md.

`python -m headrace.scripts.bench_ftllm ids IDS.json` writes the prompts. `python scripts/bench_ftllm.py run
IDS.json MODEL BATCH` runs in an environment that has ftllm and need not have headrace; give it a copy of the
checkpoint, for ftllm writes into it. Prints one JSON document: prompt and output tokens/s, medians of two rounds
after a warm-up.
"""

import argparse
import ctypes
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS, OUTPUT_TOKENS, ROUNDS = 128, 64, 3
BATCHES = (1, 4, 8, 16, 32, 64)


def write_ids(path: Path) -> None:
    """The prompts of every batch size."""
    from headrace.cluster.bench.engine import code_prompts
    from headrace.cluster.config import load_cluster_config

    config = load_cluster_config("local", [])
    prompts = {str(batch): code_prompts(config, batch, PROMPT_TOKENS) for batch in BATCHES}
    path.write_text(json.dumps(prompts), encoding="utf-8")


def measure(ids: list[list[int]], directory: Path) -> dict[str, float]:
    """One thread, greedy, all prompts at once."""
    from ftllm import llm  # type: ignore[import-not-found]

    llm.set_cpu_threads(1)
    llm.set_device_map("cpu", False)
    llm.set_device_map("cpu", True)
    model = llm.model(str(directory))
    library = llm.fastllm_lib
    library.fetch_response_llm_model.restype = ctypes.c_int
    rounds = [_round(library, model, ids) for _ in range(ROUNDS)][1:]
    return {
        "batch": len(ids),
        "prompt_tokens_per_s": round(statistics.median(prompt for prompt, _ in rounds), 1),
        "output_tokens_per_s": round(statistics.median(output for _, output in rounds), 1),
    }


def _round(library: Any, model: Any, ids: list[list[int]]) -> tuple[float, float]:
    num_stops, stops = model.stop_token_ctypes(None)
    began = time.perf_counter()
    handles = [
        library.launch_response_llm_model(
            model.model,
            len(prompt),
            (ctypes.c_int * len(prompt))(*prompt),
            ctypes.c_int(OUTPUT_TOKENS),
            ctypes.c_int(OUTPUT_TOKENS),
            ctypes.c_bool(False),
            ctypes.c_float(1.0),
            ctypes.c_int(1),
            ctypes.c_float(1.0),
            ctypes.c_float(1.0),
            ctypes.c_bool(False),
            num_stops,
            stops,
        )
        for prompt in ids
    ]
    for handle in handles:
        library.fetch_response_llm_model(model.model, handle)
    first_s = time.perf_counter() - began
    count = 0
    for handle in handles:
        while library.fetch_response_llm_model(model.model, handle) > -1:
            count += 1
    output_s = time.perf_counter() - began - first_s
    return sum(map(len, ids)) / first_s, count / output_s


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("ids").add_argument("ids", type=Path)
    run = commands.add_parser("run")
    run.add_argument("ids", type=Path)
    run.add_argument("model", type=Path)
    run.add_argument("batch", choices=[str(batch) for batch in BATCHES])
    args = parser.parse_args()
    if args.command == "ids":
        write_ids(args.ids)
        return
    stdout = os.dup(1)
    os.dup2(2, 1)  # ftllm writes its own lines to standard output
    found = measure(json.loads(args.ids.read_text(encoding="utf-8"))[args.batch], args.model)
    os.dup2(stdout, 1)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
