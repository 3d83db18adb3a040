"""What the Ray tests share: a small checkpoint, requests, the one-process answer, and looking for leftovers."""

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from headrace.cluster.generate import continue_prompt, open_for_one, prompt_logits
from headrace.transfer.request import Request, SamplingParams

CHECKPOINT = Path(__file__).parents[1] / "data" / "golden" / "v41-spec-micro" / "checkpoint"
BLOCK_TOKENS = 16
SMALL = (
    f"model.checkpoint={CHECKPOINT}",
    f"model.block_tokens={BLOCK_TOKENS}",
    "prefill.num_blocks=64",
    "decode.num_blocks=64",
    "prefill.chunk_tokens=64",
    "timeouts.shutdown_s=5",
)
GONE_S = 20.0


def request_of(
    request_id: str, num_prompt: int = 10, max_tokens: int = 8, temperature: float = 0.0
) -> Request:
    """A request whose prompt depends on its length alone."""
    return Request(
        request_id=request_id,
        prompt_ids=tuple((11 * position + num_prompt) % 500 for position in range(num_prompt)),
        sampling=SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=num_prompt, ignore_eos=True
        ),
    )


def answers_of_one_process(requests: Iterable[Request]) -> list[tuple[int, ...]]:
    """What the network answers without a cluster, each request alone."""
    network = open_for_one(CHECKPOINT, 512, numerics="released", block_tokens=BLOCK_TOKENS)
    answers: list[tuple[int, ...]] = []
    for request in requests:
        network.cache.clear_slot(1)
        *_, logits = prompt_logits(network, request.prompt_ids, exact=False, score=False)
        steps = continue_prompt(
            network, request.prompt_ids, logits[-1:], request.sampling, exact=False, num_logprobs=0
        )
        answers.append(tuple(step.token_id for step in steps))
    return answers


def alive(pids: Iterable[int]) -> list[int]:
    """Those processes that run and are no zombies."""
    running: list[int] = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            running.append(pid)
    return running


def descendants(pid: int) -> set[int]:
    """Processes that descend from ``pid``."""
    parent_of: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent_of[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {pid}
    while True:
        more = {child for child, parent in parent_of.items() if parent in found} - found
        if not more:
            return found - {pid}
        found |= more


def shared_memory() -> set[str]:
    """Names under /dev/shm that Ray, UCX or torch make."""
    names = (path.name for path in Path("/dev/shm").iterdir())
    return {name for name in names if name.startswith(("plasma", "ray", "ucx", "torch", "sem."))}


def wait_until(condition: Callable[[], bool], timeout_s: float = GONE_S) -> bool:
    """Whether ``condition`` holds before the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


async def settle() -> None:
    """Let deliveries that are under way arrive."""
    await asyncio.sleep(0.3)
