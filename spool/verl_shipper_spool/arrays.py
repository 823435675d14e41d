"""Packed arrays: token ids and log-probabilities as they lie in a record, 4 bytes an element instead of up to 9.

    extension type 2    ids       int32, little endian
    extension type 3    numbers   float32, little endian

Must not know: which key holds one. On failure: `packed` gives None for what does not fit, so that the caller keeps it
as it is; bytes of a broken length are an array of what is whole in them.
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass
from typing import Any

ELEMENT_BYTES = 4
SIGNIFICANT_DIGITS = 7  # what a float32 holds, and a little more
_SWAP = sys.byteorder == "big"
_ORDER = "<" if _SWAP else "@"  # little endian either way; the machine's own has a faster road for single precision


@dataclass(frozen=True, slots=True)
class Ints:
    """Token ids. `content`: int32, little endian."""

    content: bytes

    def __len__(self) -> int:
        return len(self.content) // ELEMENT_BYTES

    def tolist(self) -> list[int]:
        return _unpacked("i", self.content)


@dataclass(frozen=True, slots=True)
class Floats:
    """Numbers at single precision. `content`: float32, little endian."""

    content: bytes

    def __len__(self) -> int:
        return len(self.content) // ELEMENT_BYTES

    def tolist(self) -> list[float]:
        """Doubles with the digits that single precision has: -0.1, not -0.10000000149011612."""
        return [float(f"{number:.{SIGNIFICANT_DIGITS}g}") for number in _unpacked("f", self.content)]


def packed(values: Any) -> Ints | Floats | None:
    """A flat list or tuple of whole numbers, or of numbers, as an array; None for anything else."""
    try:
        first = values[0]
        if isinstance(first, bool):
            return None
        if isinstance(first, int):
            return Ints(_packed("i", values))
        return Floats(_packed("f", values)) if isinstance(first, float) else None
    except (IndexError, KeyError, OverflowError, TypeError, ValueError, struct.error):
        return None


def _packed(typecode: str, values: Any) -> bytes:
    return struct.pack(f"{_ORDER}{len(values)}{typecode}", *values)  # twice as fast as an array of the same


def _unpacked(typecode: str, content: bytes) -> list[Any]:
    numbers = array(typecode)
    numbers.frombytes(content[: len(content) // ELEMENT_BYTES * ELEMENT_BYTES])
    if _SWAP:
        numbers.byteswap()
    return numbers.tolist()
