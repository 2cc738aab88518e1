"""The library that setuptools built from the C files here: registered with torch's dispatcher, and open to tests through ctypes."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["CELLS", "LEVELS", "best_level", "convolve", "linear_int8", "recurrent_steps", "refuse", "register", "unavailable"]

LEVELS = ("portable C", "C with AVX2", "C with AVX-512 VNNI", "C with AMX")
SETTINGS = {"portable": 0, "avx2": 1, "vnni": 2}          # of the environment variable INRO_FX_KERNELS, beside "off"
DTYPES = ("float32", "bfloat16", "float16")    # in the order of kernels.h
OPERATORS = ("linear", "linear_dynamic", "linear_static", "embedding", "dequantize")
CONVOLUTIONS = {"conv": 2, "conv_dynamic": 1, "conv_static": 0}            # levels of 7 bits that x is quantized to; 0: of a fixed format

CELLS = ("lstm", "gru", "tanh", "relu")        # in the order of recurrent.c

# torch's C interface for extensions, in the order of the struct ``torch`` in operators.c; of the alternatives the first there is
TORCH_FUNCTIONS = (
    "aoti_torch_delete_tensor_object", "aoti_torch_get_data_ptr", "aoti_torch_get_dim", "aoti_torch_get_sizes",
    "aoti_torch_get_strides", "aoti_torch_get_dtype", "aoti_torch_get_device_type", "aoti_torch_get_layout",
    "aoti_torch_empty_strided", "aoti_torch_library_init_impl", "torch_library_impl", "torch_call_dispatcher",
    "torch_get_num_threads", "aoti_torch_check",
    "torch_delete_stable_ivalue|_ZdlPv",       # since 2.13; before, C++'s operator delete
    "aoti_torch_dtype_float32", "aoti_torch_dtype_bfloat16", "aoti_torch_dtype_float16", "aoti_torch_dtype_float64",
    "aoti_torch_dtype_int8", "aoti_torch_dtype_uint8", "aoti_torch_dtype_int32", "aoti_torch_dtype_int64",
    "aoti_torch_device_type_cpu", "aoti_torch_layout_strided", "aoti_torch_memory_format_contiguous_format",
    "torch_list_size", "torch_list_get_item", "torch_delete_list")
_P, _L, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class Layer(ctypes.Structure):
    """The struct ``layer`` of kernels.h."""

    _fields_ = [*((name, _P) for name in ("x", "codes", "scale", "bias", "y")),
                *((name, _L) for name in ("rows", "columns", "stride", "out", "group", "scale_step")),
                *((name, _I) for name in ("bits", "dtype", "scale_dtype", "levels", "threads", "level")),
                *((name, _P) for name in ("fixed", "zero", "column_sums")), ("backwards", _I)]


class Recurrence(ctypes.Structure):
    """The struct ``recurrence`` of kernels.h."""

    _fields_ = [*((name, _P) for name in ("gates", "codes", "scale", "bias", "h", "c", "y")),
                *((name, _L) for name in ("steps", "batch", "hidden", "scale_step")),
                *((name, _I) for name in ("cell", "reverse", "levels", "threads", "level"))]


class Format(ctypes.Structure):
    """The struct ``format`` of kernels.h."""

    _fields_ = [("scale", ctypes.c_float), ("zero", ctypes.c_int32)]


class Convolution(ctypes.Structure):
    """The struct ``convolution`` of kernels.h."""

    _fields_ = [*((name, _P) for name in ("x", "codes", "scale", "bias", "residual", "y")),
                *((name, _L) for name in ("n", "in", "out", "groups", "scale_step")),
                *((name, _L * 3) for name in ("size", "kernel", "stride", "pad", "dilation", "result")),
                *((name, Format) for name in ("input", "added", "output")), ("low", ctypes.c_float), ("high", ctypes.c_float),
                *((name, _I) for name in ("x_form", "y_form", "r_form", "transposed", "fixed", "levels", "activation", "threads", "level"))]


CODES, PLANES, CHANNELS_LAST = range(3)        # forms of images, in the order of kernels.h


@functools.cache
def _torch_cpu() -> ctypes.CDLL:
    names = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / names.get(sys.platform, "libtorch_cpu.so")))


def _load() -> tuple[ctypes.CDLL | None, str]:
    setting = os.environ.get("INRO_FX_KERNELS")
    if setting == "off":
        return None, "INRO_FX_KERNELS=off"
    spec = importlib.util.find_spec("inro_fx.kernels._native")
    if spec is None or spec.origin is None:
        return None, "the library was not built: no C compiler when inro_fx was installed"
    try:
        library, _ = ctypes.CDLL(spec.origin), _torch_cpu()
    except OSError as error:
        return None, f"the library cannot be loaded: {error}"
    missing = [names for names in TORCH_FUNCTIONS if not any(hasattr(_torch_cpu(), name) for name in names.split("|"))]
    if missing:
        return None, f"torch {torch.__version__} has no {missing[0].partition('|')[0]}"
    library.inro_covers.argtypes = (_I, _I, _L, _L, _L, _L, _P)
    library.inro_covers_conv.argtypes = (_I, _L, _L, _L, _I, ctypes.c_double, _P)
    if setting in SETTINGS:
        library.inro_limit_level(SETTINGS[setting])
    return library, ""


_library, unavailable = _load()      # ``unavailable``: why there is no library; empty if there is one


def register() -> None:
    """Makes the kernels the CPU implementations of ``torch.ops.inro_fx.*``, whose schemas must be defined by now."""
    if _library is None:
        return
    torch_cpu = _torch_cpu()
    found = [next(getattr(torch_cpu, name) for name in names.split("|") if hasattr(torch_cpu, name)) for names in TORCH_FUNCTIONS]
    found.append(getattr(torch_cpu, "torch_exception_get_what_without_backtrace", None))        # since 2.13
    addresses = (ctypes.c_void_p * len(found))(*(f and ctypes.cast(f, ctypes.c_void_p).value for f in found))
    if _library.inro_register(addresses):
        raise ImportError("torch refused the kernels of inro_fx: set INRO_FX_KERNELS=off to do without them")


def best_level() -> int:
    """The index in `LEVELS` of what this CPU runs; -1 without the library."""
    return -1 if _library is None else _library.inro_level()


def refuse(op: str, dtype: str, bits: int, group: int, columns: int, rows: int, density: float) -> str | None:
    """Why no C kernel runs the case, or None. The limits stand in operators.c and conv_operators.c, where they are used."""
    if _library is None:
        return unavailable
    number, why = DTYPES.index(dtype) if dtype in DTYPES else -1, ctypes.c_char_p()
    if op in CONVOLUTIONS:
        _library.inro_covers_conv(number, bits, group, columns, CONVOLUTIONS[op], density, ctypes.byref(why))
    else:
        _library.inro_covers(OPERATORS.index(op), number, bits, group, columns, rows, ctypes.byref(why))
    return why.value.decode() if why.value else None


def linear_int8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, levels: int, level: int = -1,
                threads: int | None = None, fixed: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
    """x [rows, in] times codes [out, in] int8 -> [rows, out] of x's dtype, with x as integers of ``levels`` x 7 bits.

    x and ``bias`` (or None) are float32, bfloat16 or float16, ``scale`` is float32 [out, 1] or [1, 1]. ``level`` is an index of
    `LEVELS`, -1 for the best; ``threads`` those of torch. ``fixed`` (one level only) is (input_scale float32 [1, 1], input_zero
    int32 [1, 1], sums of the codes int32 [out, 1]): x is then quantized with that scale and zero point, and not row by row. The
    integer sums are exact, whatever the level and the number of threads. Rows in which one number is hundreds of times the others,
    too wide for 15 bits, are computed in floats.

    >>> x, codes = torch.tensor([[1.0, 127.0]]), torch.tensor([[2, 3]], dtype=torch.int8)
    >>> linear_int8(x, codes, torch.tensor([[0.5]]), None, levels=1) if best_level() >= 0 else torch.tensor([[191.5]])
    tensor([[191.5000]])
    """
    assert _library is not None
    x = x if x.stride(1) == 1 else x.contiguous()
    codes, scale = codes.contiguous(), scale.contiguous()
    parts = () if fixed is None else tuple(part.contiguous() for part in fixed)
    y = torch.empty(x.shape[0], codes.shape[0], dtype=x.dtype, device="cpu")
    layer = Layer(x.data_ptr(), codes.data_ptr(), scale.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
                  x.shape[0], x.shape[1], x.stride(0), codes.shape[0], 0, int(scale.shape[0] != 1),
                  8, DTYPES.index(str(x.dtype).removeprefix("torch.")), 0, levels,
                  torch.get_num_threads() if threads is None else threads, level,
                  *(part.data_ptr() for part in parts))
    if _library.inro_linear(ctypes.byref(layer)):
        raise MemoryError(f"no memory for the activations of a linear of {tuple(x.shape)} by {tuple(codes.shape)}")
    return y


def recurrent_steps(gates: Tensor, h: Tensor, c: Tensor | None, codes: Tensor, scale: Tensor, bias: Tensor | None, cell: str, reverse: bool,
                    levels: int, level: int = -1, threads: int | None = None) -> Tensor | None:
    """All steps of a layer in one direction: y [steps, batch, hidden]; ``h``, and ``c`` of an LSTM, become the last states.

    ``gates`` float32 [steps, batch, gates * hidden] are the products of x with their biases; ``codes`` int8 [gates * hidden, hidden],
    ``scale`` float32 [gates * hidden, 1] or [1, 1]. h is quantized to ``levels`` x 7 bits at each step. None where no kernel runs this:
    without the library, without AVX2 for many rows, and for tensors of other dtypes, devices, layouts or sizes.
    """
    tensors = [t for t in (gates, h, c, codes, scale, bias) if t is not None]
    floats = [t for t in tensors if t is not codes]
    plain = all(t.device.type == "cpu" and t.is_contiguous() for t in tensors) and all(t.dtype == torch.float32 for t in floats)
    batch, hidden = h.shape
    rows = gates.shape[-1]
    fits = rows == (4, 3, 1, 1)[CELLS.index(cell)] * hidden and codes.shape == (rows, hidden) and scale.shape in ((1, 1), (rows, 1)) \
        and gates.shape[1] == batch and (c is None) == (cell != "lstm") and (c is None or c.shape == h.shape) \
        and (bias is None or bias.shape == (rows,))
    if _library is None or not plain or not fits or codes.dtype != torch.int8 or not 1 <= hidden <= 65536 \
            or (best_level() < 1 and batch > 2):
        return None
    y = gates.new_empty((*gates.shape[:2], hidden))
    steps = Recurrence(gates.data_ptr(), codes.data_ptr(), scale.data_ptr(), None if bias is None else bias.data_ptr(), h.data_ptr(),
                       None if c is None else c.data_ptr(), y.data_ptr(), gates.shape[0], gates.shape[1], hidden, int(scale.shape[0] != 1),
                       CELLS.index(cell), int(reverse), levels, torch.get_num_threads() if threads is None else threads, level)
    if _library.inro_recurrent(ctypes.byref(steps)):
        raise MemoryError(f"no memory for the gates of a recurrent layer of {hidden} units")
    return y


def convolve(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, geometry: tuple[Any, ...], result: Sequence[int], *,
             x_format: tuple[Tensor, Tensor] | None = None, residual: Tensor | None = None, r_format: tuple[Tensor, Tensor] | None = None,
             y_format: tuple[Tensor, Tensor] | None = None, channels_last: bool = False,
             activation: tuple[int, float, float] = (0, 0.0, 0.0), levels: int = 1, level: int = -1,
             threads: int | None = None) -> Tensor | None:
    """The convolution of ops/conv_static.py where there is an ``x_format``, else that of ops/conv.py, with x of ``levels`` x 7 bits.

    x is float32 or uint8 codes, which have their channels side by side; ``geometry`` is (kernel, stride, padding, output_padding, dilation,
    groups, transposed), ``result`` the sizes of y behind its channels. None where a sample has to be computed in floats.
    """
    assert _library is not None
    dims = len(geometry[0])

    def three(values: Sequence[int], otherwise: int) -> Any:
        return (_L * 3)(*(otherwise,) * (3 - dims), *values)

    def form(t: Tensor, last: bool) -> int:
        return CODES if t.dtype == torch.uint8 else CHANNELS_LAST if last else PLANES

    def format_(given: tuple[Tensor, Tensor] | None) -> Format:
        return Format(1.0, 128) if given is None else Format(given[0].item(), given[1].item() + 128)
    y = torch.empty(x.shape[0], *result, codes.shape[0], dtype=torch.float32 if y_format is None else torch.uint8).movedim(-1, 1)
    y = y if channels_last or y_format is not None else y.contiguous()
    call = Convolution(
        x.data_ptr(), codes.data_ptr(), scale.data_ptr(), None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(), y.data_ptr(), x.shape[0], x.shape[1], codes.shape[0], geometry[5],
        int(scale.shape[0] != 1), three(x.shape[2:], 1), three(geometry[0], 1), three(geometry[1], 1), three(geometry[2], 0),
        three(geometry[4], 1), three(result, 1), format_(x_format), format_(r_format), format_(y_format), *activation[1:],
        form(x, not x.is_contiguous()), form(y, channels_last), CHANNELS_LAST if residual is None else form(residual, True),
        int(geometry[6]), int(x_format is not None), levels, activation[0], torch.get_num_threads() if threads is None else threads, level)
    outcome = _library.inro_convolution(ctypes.byref(call))
    if outcome < 0:
        raise MemoryError(f"no memory for a convolution of {tuple(x.shape)}")
    return None if outcome else y
