"""inro_fx::embedding(ids, codes, scale, bits, group, columns, dtype): ids [...] -> [..., columns] rows of the table.

The rows are gathered as codes and only then dequantized: the table is never expanded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dequantize import reference as dequantize
from .library import as_shape, define

__all__ = ["embedding"]


def reference(ids: Tensor, codes: Tensor, scale: Tensor, bits: int, group: int, columns: int, dtype: torch.dtype) -> Tensor:
    flat = ids.reshape(-1)
    rows = scale if scale.shape[0] == 1 and codes.shape[0] != 1 else scale.index_select(0, flat)
    table = dequantize(codes.index_select(0, flat), rows, bits, group, columns, dtype)
    return as_shape(table, (*ids.shape, columns))


def fake(ids: Tensor, codes: Tensor, scale: Tensor, bits: int, group: int, columns: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((*ids.shape, columns), dtype=dtype)


SCHEMA = "embedding(Tensor ids, Tensor codes, Tensor scale, int bits, int group, int columns, ScalarType dtype) -> Tensor"
embedding = define(SCHEMA, reference, fake)
