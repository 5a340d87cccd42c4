"""The wire format of protobuf, as far as Chakra's messages need it: unsigned numbers, doubles, texts, lists and messages.

A message is a sequence of fields; a field is a tag (number << 3 | wire type) and its value. Values that are zero or empty are
left out, as proto3 does. A parser of the protobuf package reads the same messages (a test compares them).

Source: protobuf.dev, "Encoding".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

VARINT, FIXED64, LENGTH = 0, 1, 2


def varint(number: int) -> bytes:
    """A number of at most 64 bits, seven bits a byte; negative ones as two's complement.

    Args:
        number: from -2^63 to 2^64 - 1.
    """
    number &= 2**64 - 1
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def number_field(field: int, number: int) -> bytes:
    """An integer, enum or bool; nothing for 0."""
    return varint(field << 3 | VARINT) + varint(number) if number else b""


def chosen_number(field: int, number: int) -> bytes:
    """As `number_field`, of a `oneof`: written even if it is 0."""
    return varint(field << 3 | VARINT) + varint(number)


def chosen_double(field: int, number: float) -> bytes:
    """A double of a `oneof`."""
    return varint(field << 3 | FIXED64) + struct.pack("<d", number)


def bytes_field(field: int, content: bytes) -> bytes:
    """A text in UTF-8, or a message; nothing if it is empty."""
    return varint(field << 3 | LENGTH) + varint(len(content)) + content if content else b""


def packed_field(field: int, numbers: Iterable[int]) -> bytes:
    """A repeated integer field."""
    return bytes_field(field, b"".join(varint(number) for number in numbers))


def delimited(message: bytes) -> bytes:
    """A message with its length before it, as files of several messages have them."""
    return varint(len(message)) + message
