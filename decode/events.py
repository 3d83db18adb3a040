"""What a decode rank reports. Apart from the rank, so that whoever only listens needs no torch."""

from dataclasses import dataclass

from ..transfer.errors import HeadraceError
from ..transfer.request import TopLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New tokens of a request; the last event of a request has a ``finish_reason`` (``stop`` or ``length``).

    ``logprobs`` and ``top_logprobs`` have an entry for each id if they were asked for, and are empty otherwise.
    ``num_verified`` drafts were verified for this answer so far and ``num_accepted`` of them accepted. An event
    without ids says that a request which waits for memory is still here.
    ``admitted``, ``first_token`` and ``last_token`` (this event) are instants of its timeline.
    """

    request_id: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    finish_reason: str | None
    admitted: float
    first_token: float
    last_token: float
    num_verified: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFailed:
    """A request is given up and owns nothing here. A TransferError is mended by prefilling it again."""

    request_id: str
    error: HeadraceError


DecodeEvent = Tokens | DecodeFailed
