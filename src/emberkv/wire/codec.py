"""Bytes <-> messages. The payload never passes through here; it follows the frame, by reference.

Why it exists: one door between the wire and the typed world, the same for TCP and the local socket.
Laws: bytes cause no error but ProtocolError; what decode returns satisfies every limit of types.py; encode refuses what
decode would refuse (InvariantViolation: our own bug).
Limits: see frame.py. Hot kinds are packed by hand (codec_get, codec_put, codec_replicate, codec_vector), rare ones are
MessagePack arrays in the field order of messages.py.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from emberkv.errors import InvariantViolation, ProtocolError
from emberkv.messages import (
    AdminReply,
    AdminRequest,
    ErrorFrame,
    ExistsReply,
    ExistsRequest,
    GetReply,
    GetRequest,
    Hello,
    Kind,
    MapReply,
    MapRequest,
    Message,
    Offer,
    OfferReply,
    PutReply,
    PutRequest,
    Replicate,
    ReplicateReply,
    StatusReply,
    StatusRequest,
    Unpin,
    Vector,
    VectorReply,
    Welcome,
)
from emberkv.types import SHARDS
from emberkv.wire import codec_get, codec_put, codec_replicate, codec_vector
from emberkv.wire.codec_get import get_reply_bytes
from emberkv.wire.frame import (
    BODY_BYTES_MAX,
    FRAME_BYTES_MAX,
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    Buffer,
    Header,
    check_crc,
    decode_header,
    join_frame,
)

__all__ = [
    "encode",
    "decode_header",
    "decode",
    "decode_frame",
    "kind_of",
    "payload_bytes",
    "get_reply_bytes",
    "Header",
    "Buffer",
    "HEADER_BYTES",
    "BODY_BYTES_MAX",
    "FRAME_BYTES_MAX",
    "PAYLOAD_BYTES_MAX",
]

ADMIN_VERB_MAX: Final = 64
"""Characters of a command's name."""
ADMIN_ARGUMENTS_BYTES_MAX: Final = 64 << 10
"""A whole namespace policy takes well under 1 KiB."""
_DEADLINE_MS_MAX: Final = (1 << 32) - 1
"""As wide as the field of the hot kinds."""


class _Row(NamedTuple):
    """How one kind is written and read. Encoders get the message; decoders the body and the payload's length."""

    kind: Kind
    encode_body: Callable[[Any], bytes]
    decode_body: Callable[[bytes, int], Any]


_pack: Final = msgspec.msgpack.Encoder().encode


def _rare(kind: Kind, message_type: type[Any]) -> _Row:
    """A kind that is a MessagePack array of the message's fields."""
    unpack = msgspec.msgpack.Decoder(message_type).decode

    def decode_body(body: bytes, _payload_len: int) -> Any:
        try:
            return unpack(body)
        # Text that is not UTF-8 is a ValueError; arrays nested past the interpreter's limit end in RecursionError.
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"{kind.name} body: {error}") from None

    return _Row(kind, _pack, decode_body)


def _map_reply() -> _Row:
    row = _rare(Kind.MAP_REPLY, MapReply)

    def decode_body(body: bytes, payload_len: int) -> Any:
        reply: MapReply = row.decode_body(body, payload_len)
        if len(reply.owners) not in (0, SHARDS):
            raise ProtocolError(f"MAP_REPLY with {len(reply.owners)} shards, there are {SHARDS}")
        return reply

    return _Row(row.kind, row.encode_body, decode_body)


def _admin_fault(message: AdminRequest) -> str:
    """What is wrong with the fields of an ADMIN; empty when nothing is."""
    if len(message.verb) > ADMIN_VERB_MAX:
        return f"ADMIN with a verb of {len(message.verb)} characters, at most {ADMIN_VERB_MAX} are allowed"
    if len(message.arguments) > ADMIN_ARGUMENTS_BYTES_MAX:
        return f"ADMIN with {len(message.arguments)} bytes of arguments, {ADMIN_ARGUMENTS_BYTES_MAX} are allowed"
    if not 0 <= message.deadline_ms <= _DEADLINE_MS_MAX:
        return f"ADMIN with a deadline of {message.deadline_ms} ms"
    return ""


def _admin() -> _Row:
    row = _rare(Kind.ADMIN, AdminRequest)

    def encode_body(message: AdminRequest) -> bytes:
        fault = _admin_fault(message)
        if fault:
            raise InvariantViolation(f"{fault}; callers check that")
        return _pack(message)

    def decode_body(body: bytes, payload_len: int) -> Any:
        message: AdminRequest = row.decode_body(body, payload_len)
        fault = _admin_fault(message)
        if fault:
            raise ProtocolError(fault)
        return message

    return _Row(row.kind, encode_body, decode_body)


_DELETE: Final = _Row(Kind.DELETE, codec_put.encode_put, codec_put.decode_delete)
_ROWS: Final[dict[type[Any], _Row]] = {
    Hello: _rare(Kind.HELLO, Hello),
    Welcome: _rare(Kind.WELCOME, Welcome),
    ErrorFrame: _rare(Kind.ERROR, ErrorFrame),
    GetRequest: _Row(Kind.GET, codec_get.encode_get, codec_get.decode_get),
    GetReply: _Row(Kind.GET_REPLY, codec_get.encode_get_reply, codec_get.decode_get_reply),
    Unpin: _Row(Kind.UNPIN, codec_get.encode_unpin, codec_get.decode_unpin),
    ExistsRequest: _Row(Kind.EXISTS, codec_get.encode_exists, codec_get.decode_exists),
    ExistsReply: _Row(Kind.EXISTS_REPLY, codec_get.encode_exists_reply, codec_get.decode_exists_reply),
    PutRequest: _Row(Kind.PUT, codec_put.encode_put, codec_put.decode_put),
    PutReply: _Row(Kind.PUT_REPLY, codec_put.encode_put_reply, codec_put.decode_put_reply),
    Replicate: _Row(Kind.REPLICATE, codec_replicate.encode_replicate, codec_replicate.decode_replicate),
    ReplicateReply: _Row(
        Kind.REPLICATE_REPLY, codec_replicate.encode_replicate_reply, codec_replicate.decode_replicate_reply
    ),
    Offer: _Row(Kind.OFFER, codec_replicate.encode_offer, codec_replicate.decode_offer),
    OfferReply: _Row(Kind.OFFER_REPLY, codec_replicate.encode_offer_reply, codec_replicate.decode_offer_reply),
    Vector: _Row(Kind.VECTOR, codec_vector.encode_vector, codec_vector.decode_vector),
    VectorReply: _Row(Kind.VECTOR_REPLY, codec_vector.encode_vector_reply, codec_vector.decode_vector_reply),
    MapRequest: _rare(Kind.MAP, MapRequest),
    MapReply: _map_reply(),
    StatusRequest: _rare(Kind.STATUS, StatusRequest),
    StatusReply: _rare(Kind.STATUS_REPLY, StatusReply),
    AdminRequest: _admin(),
    AdminReply: _rare(Kind.ADMIN_REPLY, AdminReply),
}
_DECODERS: Final[dict[Kind, Callable[[bytes, int], Any]]] = {
    row.kind: row.decode_body for row in (*_ROWS.values(), _DELETE)
}


def kind_of(message: Message) -> Kind:
    """The frame kind that a message is sent as."""
    if isinstance(message, PutRequest) and message.delete:
        return Kind.DELETE
    return _ROWS[type(message)].kind


def payload_bytes(message: Message) -> int:
    """Payload bytes that belong to a message when none of it lies in shared memory: what a TCP frame must carry."""
    if isinstance(message, GetReply):
        return codec_get.reply_payload(message)
    if isinstance(message, PutRequest):
        return codec_put.put_payload(message)
    if isinstance(message, Replicate):
        return codec_replicate.replicate_payload(message)
    return 0


def encode(message: Message, request_id: int, payload_len: int = 0) -> bytes:
    """Header and body of a frame whose payload of `payload_len` bytes the caller sends behind it.

    Raises InvariantViolation when the message breaks a limit or `payload_len` is not what the message states
    (0 is also right for a pinned GetReply and for a PutRequest that points into staging).
    """
    row = _ROWS[type(message)]
    kind = kind_of(message)
    try:
        body = row.encode_body(message)
    except (struct.error, ValueError, TypeError) as error:
        raise InvariantViolation(f"{kind.name} has a field that does not fit its frame: {error}") from error
    if len(body) > BODY_BYTES_MAX:
        raise InvariantViolation(f"{kind.name} body of {len(body)} bytes is over {BODY_BYTES_MAX}")
    if (payload_len or kind is Kind.REPLICATE) and payload_len != payload_bytes(message):
        raise InvariantViolation(f"{kind.name} states {payload_bytes(message)} payload bytes, {payload_len} given")
    return join_frame(kind, request_id, body, payload_len)


def decode(header: Header, header_bytes: Buffer, body: Buffer) -> Message:
    """The message of a frame whose header `decode_header` accepted.

    Checks the CRC, that counts match the body exactly, that lengths are within BLOCK_BYTES_MAX, enum values, and that
    the header's payload length is what the body states. Raises ProtocolError.
    """
    check_crc(header, header_bytes, body)
    message: Message = _DECODERS[header.kind](bytes(body), header.payload_len)
    return message


def decode_frame(frame: Buffer) -> tuple[Header, Message]:
    """Header and message of a buffer that holds exactly one frame without payload behind it (SEQPACKET)."""
    header = decode_header(frame)
    return header, decode(header, frame[:HEADER_BYTES], frame[HEADER_BYTES:])
