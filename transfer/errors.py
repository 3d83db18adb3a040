"""The one exception tree of headrace.

    HeadraceError
    |-- ConfigError            a deployment file or command-line value that a user can mend (also ValueError)
    |   |-- CheckpointError    a model directory that cannot be served as it is
    |   `-- PlacementError     experts laid out over slots in a way that cannot serve
    |       `-- StalePlanError     a plan for experts that a newer one has overtaken
    |-- RequestError           one request is wrong; its neighbours go on
    |   |-- InvalidRequestError    a field has a value outside its range
    |   |   `-- GrammarError           a grammar that cannot be compiled or followed within its limits
    |   `-- PromptTooLongError     prompt plus answer do not fit the context or the cache
    |-- TransferError          a handoff could not be read; the request is prefilled again
    |   |-- LayoutMismatchError    two ranks do not describe their caches alike
    |   |-- LeaseExpiredError      the holder no longer keeps these blocks for us
    |   |-- CorruptBlockError      bytes arrived that the holder did not promise
    |   `-- PeerLostError          the peer is gone, or is another incarnation
    |-- MessageError           bytes that are not one of our messages
    |-- DeadlineError          a named phase took longer than it may
    |-- RankError              a rank or its instance cannot go on
    `-- IntegrityError         a pool's books do not balance: a bug of ours

A message names the key, the value and what is allowed, and says what to do next. Every class takes positional
arguments only, because exceptions that cross Ray are rebuilt from ``args``.
"""


class HeadraceError(Exception):
    """Root of everything headrace raises on purpose."""


class ConfigError(HeadraceError, ValueError):
    """A deployment file or command-line value that the user can mend."""


class CheckpointError(ConfigError):
    """A model directory that cannot be served as it is."""


class PlacementError(ConfigError):
    """Experts laid out over the slots of an instance in a way that cannot serve."""


class StalePlanError(PlacementError):
    """A plan for experts whose epoch is not newer than what the rank knows."""


class RequestError(HeadraceError):
    """One request is at fault; its neighbours go on."""


class InvalidRequestError(RequestError, ValueError):
    """A request field has a value outside its range."""


class GrammarError(InvalidRequestError):
    """A grammar that cannot be compiled, or not followed within its limits of time and memory."""


class PromptTooLongError(RequestError, ValueError):
    """Prompt plus answer do not fit the context or the cache."""


class TransferError(HeadraceError):
    """A handoff could not be read; the request has to be prefilled again."""


class LayoutMismatchError(TransferError):
    """Two ranks do not describe their caches alike."""


class LeaseExpiredError(TransferError):
    """The holder no longer keeps these blocks for the reader."""


class CorruptBlockError(TransferError):
    """Bytes arrived that differ from what the holder promised."""


class PeerLostError(TransferError):
    """The peer is gone, or another incarnation answers at its address."""


class MessageError(HeadraceError):
    """Bytes that are not one of our messages."""


class DeadlineError(HeadraceError, TimeoutError):
    """A named phase took longer than it may."""


class RankError(HeadraceError):
    """A rank, or the instance it belongs to, cannot go on."""


class IntegrityError(HeadraceError):
    """A pool's books do not balance: a bug of ours, never of a user."""
