"""The border: what NIXL raises becomes ours here and nowhere else.

A test fails when NIXL grows an error that has no row here.
"""

from collections.abc import Generator
from contextlib import contextmanager

from .errors import HeadraceError, PeerLostError, RankError, TransferError

TRANSLATION: dict[str, type[HeadraceError]] = {
    "nixlBackendError": PeerLostError,
    "nixlCancelledError": PeerLostError,
    "nixlInvalidParamError": TransferError,
    "nixlMismatchError": TransferError,
    "nixlNoTelemetryError": TransferError,
    "nixlNotAllowedError": TransferError,
    "nixlNotFoundError": PeerLostError,
    "nixlNotPostedError": TransferError,
    "nixlNotSupportedError": TransferError,
    "nixlRemoteDisconnectError": PeerLostError,
    "nixlRepostActiveError": TransferError,
    "nixlUnknownError": TransferError,
}


@contextmanager
def translated(doing: str, otherwise: type[HeadraceError] | None = None) -> Generator[None]:
    """The border: errors of NIXL become ours, as ``TRANSLATION`` says or all as ``otherwise``."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        known = TRANSLATION.get(type(error).__name__)
        if known is None and otherwise is None:
            raise
        raise (otherwise or known or RankError)(f"{doing}: NIXL says {error}") from error
