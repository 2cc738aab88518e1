"""Integers of 2 to 7 bits in bytes.

A code of b bits is stored as the unsigned number code + 2**(b-1), split into fields of 4, 2 and 1 bits (5 = 4 + 1). A
field of f bits of 8/f neighbouring columns makes one byte, the first column in the lowest bits; the bytes of the
4-bit fields come first in a row, then those of the 2-bit and 1-bit fields. Rows are packed independently of each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fields_of", "pack_bits", "storage_bits", "unpack_bits"]


def storage_bits(low: int, high: int) -> int:
    """The bits that a code in low..high takes: 2 to 8, 16, 32 or 64.

    >>> storage_bits(-7, 7), storage_bits(-100, 100), storage_bits(-1000, 1000)
    (4, 8, 16)
    """
    bits = max(2, max(high, -low - 1).bit_length() + 1)
    return bits if bits <= 8 else next(b for b in (16, 32, 64) if bits <= b)


def fields_of(bits: int) -> list[tuple[int, int]]:
    """(width, shift) of each field, widest first: 7 bits are [(4, 0), (2, 4), (1, 6)]."""
    fields, shift = [], 0
    for width in (4, 2, 1):
        if bits & width:
            fields.append((width, shift))
            shift += width
    return fields


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """[out, in] int8 codes of ``bits`` < 8 bits -> [out, bytes] uint8.

    >>> pack_bits(torch.tensor([[-8, 7, 1]], dtype=torch.int8), 4)
    tensor([[240,   9]], dtype=torch.uint8)
    """
    unsigned = (codes.to(torch.int16) + (1 << bits - 1)).to(torch.uint8)
    columns = codes.shape[1]
    packed = []
    for width, shift in fields_of(bits):
        per_byte = 8 // width
        field = (unsigned >> shift) & ((1 << width) - 1)
        field = torch.nn.functional.pad(field, (0, -columns % per_byte))
        byte = field[:, 0::per_byte].clone()
        for i in range(1, per_byte):
            byte |= field[:, i::per_byte] << (width * i)
        packed.append(byte)
    return torch.cat(packed, 1)


def unpack_bits(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of `pack_bits`: [out, bytes] uint8 -> [out, columns] int8.

    >>> unpack_bits(torch.tensor([[240, 9]], dtype=torch.uint8), 4, 3)
    tensor([[-8,  7,  1]], dtype=torch.int8)
    """
    start, unsigned = 0, None
    for width, shift in fields_of(bits):
        per_byte = 8 // width
        count = -(-columns // per_byte)
        byte = packed[:, start:start + count]
        start += count
        parts = [(byte >> (width * i)) & ((1 << width) - 1) for i in range(per_byte)]
        field = torch.stack(parts, 2).reshape(packed.shape[0], count * per_byte)[:, :columns]
        unsigned = field if unsigned is None else unsigned | (field << shift)
    assert unsigned is not None
    return (unsigned.to(torch.int16) - (1 << bits - 1)).to(torch.int8)
