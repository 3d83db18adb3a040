"""What stands in ``Pairing.address`` for NIXL: where the arenas begin, and what the agent says about itself."""

import msgspec
from xxhash import xxh3_64_intdigest

from .errors import MessageError
from .messages import Pairing


class NixlAddress(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """``bases`` are addresses in the peer's process, of ``plan.ARENAS`` in their order.

    NIXL parses ``metadata`` in C++, so it is checked first.
    """

    bases: tuple[int, int, int]
    metadata: bytes
    checksum: int


def encode_address(bases: tuple[int, int, int], metadata: bytes) -> bytes:
    """Bytes for ``Pairing.address``."""
    checksum = xxh3_64_intdigest(metadata)
    return msgspec.msgpack.encode(NixlAddress(bases, metadata, checksum))


def decode_address(pairing: Pairing) -> NixlAddress:
    """The address of a peer that speaks NIXL. Raises MessageError for a foreign or damaged one."""
    if pairing.transport != "nixl":
        raise MessageError(f"{pairing.name} speaks {pairing.transport}, not nixl")
    try:
        address = msgspec.msgpack.decode(pairing.address, type=NixlAddress)
    except msgspec.MsgspecError as error:
        raise MessageError(f"pairing of {pairing.name} has a malformed address") from error
    if xxh3_64_intdigest(address.metadata) != address.checksum:
        raise MessageError(f"pairing of {pairing.name} was damaged on its way")
    return address
