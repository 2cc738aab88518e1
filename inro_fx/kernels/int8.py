"""The library that setuptools built from int8.c, through ctypes: calls release the GIL and share torch's OpenMP threads."""

from __future__ import annotations

import ctypes
import importlib.util
import os

import torch
from torch import Tensor

__all__ = ["LEVELS", "best_level", "linear_int8", "unavailable"]

LEVELS = ("portable C", "C with AVX2", "C with AVX-512 VNNI")
OUTLIER = 350.0                # as in int8.c
MOST_COLUMNS = 65_536          # 255 * 127 * 65536 still fits int32
_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("INRO_FX_KERNELS") == "off":
        return None, "INRO_FX_KERNELS=off"
    spec = importlib.util.find_spec("inro_fx.kernels._int8")
    if spec is None or spec.origin is None:
        return None, "the library was not built: no C compiler when inro_fx was installed"
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError as error:
        return None, f"the library cannot be loaded: {error}"
    library.inro_linear.argtypes = (_P, _L, _L, _L, _P, _L, _P, _L, _P, _P, _I, _I, _I, _P, _P, _P)
    return library, ""


_library, unavailable = _load()      # ``unavailable``: why there is no library; empty if there is one


def best_level() -> int:
    """The index in `LEVELS` of what this CPU runs; -1 without the library."""
    return -1 if _library is None else _library.inro_level()


def linear_int8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, levels: int, level: int = -1,
                threads: int | None = None, fixed: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
    """x [rows, in] float32 times codes [out, in] int8 -> [rows, out] float32, with x as integers of ``levels`` x 7 bits.

    ``scale`` is float32 [out, 1] or [1, 1], ``bias`` float32 [out] or None. ``level`` is an index of `LEVELS`, -1 for the best;
    ``threads`` those of torch. ``fixed`` (one level only) is (input_scale float32 [1, 1], input_zero int32 [1, 1], sums of the
    codes int32 [out, 1]): x is then quantized with that scale and zero point, and not row by row. The integer sums are exact,
    whatever the level and the number of threads. Rows in which one number is hundreds of times the others, too wide for 15 bits,
    are computed in floats.

    >>> x, codes = torch.tensor([[1.0, 127.0]]), torch.tensor([[2, 3]], dtype=torch.int8)
    >>> linear_int8(x, codes, torch.tensor([[0.5]]), None, levels=1) if best_level() >= 0 else torch.tensor([[191.5]])
    tensor([[191.5000]])
    """
    assert _library is not None
    x = x if x.stride(1) == 1 else x.contiguous()
    codes, scale = codes.contiguous(), scale.contiguous()
    y = torch.empty(x.shape[0], codes.shape[0], dtype=torch.float32, device="cpu")
    failed = _library.inro_linear(
        x.data_ptr(), x.shape[0], x.shape[1], x.stride(0), codes.data_ptr(), codes.shape[0], scale.data_ptr(),
        int(scale.shape[0] != 1), None if bias is None else bias.data_ptr(), y.data_ptr(), levels,
        torch.get_num_threads() if threads is None else threads, level,
        *((None, None, None) if fixed is None else (part.contiguous().data_ptr() for part in fixed)))
    if failed > 0:
        _mend_wide_rows(y, x, codes, scale, bias)
    elif failed:
        raise MemoryError(f"no memory for the activations of a linear of {tuple(x.shape)} by {tuple(codes.shape)}")
    return y


def _mend_wide_rows(y: Tensor, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    """Computes the rows with outliers again, with float activations (generously: a few more rows do no harm)."""
    with torch.autocast("cpu", enabled=False):
        size = x.abs().double()
        largest, place = size.max(1, keepdim=True)
        others = size.scatter(1, place, 0.0)
        wide = largest[:, 0] * (others > 0).sum(1) > 0.99 * OUTLIER * others.sum(1)
        y[wide] = torch.nn.functional.linear(x[wide], codes.float() * scale, bias)
