"""One line of output: what is written for an answer or an error, and what is read back when a job goes on.

    {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null, "line", "timing"}
    {"id", "custom_id", "response": null, "error": {"code", "message", "line"},           "line"}

The first four keys are those of the OpenAI batch format. ``line`` (the number of the input line) is how a restart
knows what is done, ``timing`` how the closing table covers the runs before it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ...transfer.request import Completion
from .lines import BadLine

DUPLICATE = "duplicate_custom_id"


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Latencies of one answer in seconds, and its drafts; ``tpot_s`` is missing for an answer of one token."""

    ttft_s: float
    total_s: float
    tpot_s: float | None = None
    drafts_verified: int = 0
    drafts_accepted: int = 0


class PromptDetails(msgspec.Struct, frozen=True):
    """``cached_tokens`` of the prompt came from the prefix cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Tokens read and written for one request, in the shape of the OpenAI API."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()


class _Body(msgspec.Struct, frozen=True):
    usage: Usage


class _Response(msgspec.Struct, frozen=True):
    body: _Body


class _Error(msgspec.Struct, frozen=True):
    code: str


class _Line(msgspec.Struct, frozen=True):
    line: int
    custom_id: str | None
    response: _Response | None
    error: _Error | None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one output line says, as far as bookkeeping goes. ``usage`` is None for an error line."""

    line: int
    custom_id: str | None
    error_code: str | None
    usage: Usage | None = None
    timing: Timing | None = None


_DECODER = msgspec.json.Decoder(_Line)


def read_outcome(data: bytes) -> Outcome | None:
    """The outcome a complete output line tells; None for anything that is not a line of ours."""
    try:
        line = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if line.line < 1 or (line.response is None) == (line.error is None):
        return None
    return Outcome(
        line=line.line,
        custom_id=line.custom_id,
        error_code=line.error.code if line.error else None,
        usage=line.response.body.usage if line.response else None,
        timing=line.timing,
    )


def timing_of(choices: Sequence[Completion]) -> Timing:
    """The latencies of one answer, which may have several choices.

    The first token of any choice counts, and the last one; TPOT is that of the slowest choice.
    """
    arrived = min(choice.timeline.arrived for choice in choices)
    tpots = [c.timeline.tpot_s(len(c.ids)) for c in choices if len(c.ids) > 1]
    return Timing(
        ttft_s=min(choice.timeline.first_token for choice in choices) - arrived,
        total_s=max(choice.timeline.last_token for choice in choices) - arrived,
        tpot_s=max(tpots, default=None),
        drafts_verified=sum(choice.num_verified for choice in choices),
        drafts_accepted=sum(choice.num_accepted for choice in choices),
    )


def line_id(prefix: str, job_id: str, line: int) -> str:
    """An id that is unique over jobs and lines, and the same whenever this line of this job is answered."""
    return prefix + hashlib.blake2b(f"{job_id}/{line}".encode(), digest_size=12).hexdigest()


def answer_record(
    *, job_id: str, line: int, custom_id: str, body: dict[str, object], usage: Usage, timing: Timing
) -> tuple[Outcome, bytes]:
    """The outcome and the output line of an answer; ``body`` is the API's response without its usage."""
    document = {
        "id": line_id("batch_req_", job_id, line),
        "custom_id": custom_id,
        "response": {
            "status_code": 200,
            "request_id": line_id("req_", job_id, line),
            "body": {**body, "usage": usage},
        },
        "error": None,
        "line": line,
        "timing": timing,
    }
    outcome = Outcome(line=line, custom_id=custom_id, error_code=None, usage=usage, timing=timing)
    return outcome, msgspec.json.encode(document) + b"\n"


def error_record(job_id: str, bad: BadLine) -> tuple[Outcome, bytes]:
    """The outcome and the output line of a line without an answer."""
    document = {
        "id": line_id("batch_req_", job_id, bad.line),
        "custom_id": bad.custom_id,
        "response": None,
        "error": {"code": bad.code, "message": f"line {bad.line}: {bad.reason}", "line": bad.line},
        "line": bad.line,
    }
    outcome = Outcome(line=bad.line, custom_id=bad.custom_id, error_code=bad.code)
    return outcome, msgspec.json.encode(document) + b"\n"
