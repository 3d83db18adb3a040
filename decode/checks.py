"""What a reader checks before it reads, and what it says to the holder. Pure."""

from collections.abc import Mapping

from ..transfer.errors import LayoutMismatchError, PeerLostError, TransferError
from ..transfer.messages import ConfirmLease, Handoff, ReleaseLease
from ..transfer.request import Request


def check_handoff(
    request: Request, handoff: Handoff, fingerprint: str, peers: Mapping[str, str]
) -> None:
    """Raise unless ``handoff`` belongs to ``request``, our layout and a connected incarnation (``peers``: name to it).

    LayoutMismatchError, PeerLostError, or TransferError for a handoff of something else.
    """
    if handoff.layout_fingerprint != fingerprint:
        raise LayoutMismatchError(
            f"{handoff.holder} offers layout {handoff.layout_fingerprint[:12]}, ours is {fingerprint[:12]}: "
            "serve the same checkpoint and the same cache settings in both pools"
        )
    if peers.get(handoff.holder) != handoff.incarnation:
        raise PeerLostError(
            f"{handoff.holder} incarnation {handoff.incarnation} is not connected: "
            "it was restarted, or never paired with this rank"
        )
    num_tokens = len(request.prompt_ids) - 1
    if (handoff.request_id, handoff.num_tokens) != (request.request_id, num_tokens):
        raise TransferError(
            f"handoff is for request {handoff.request_id!r} with {handoff.num_tokens} cached tokens; "
            f"the request is {request.request_id!r} with {num_tokens}"
        )


def confirm_lease(handoff: Handoff, nonce: int) -> ConfirmLease:
    """The question after the last byte; ``nonce`` ties the answer to it."""
    return ConfirmLease(
        lease_id=handoff.lease_id,
        incarnation=handoff.incarnation,
        request_id=handoff.request_id,
        generation=handoff.generation,
        nonce=nonce,
    )


def release_lease(handoff: Handoff) -> ReleaseLease:
    """The reader has what it needs, or wants it no more."""
    return ReleaseLease(
        lease_id=handoff.lease_id,
        incarnation=handoff.incarnation,
        request_id=handoff.request_id,
        generation=handoff.generation,
    )
