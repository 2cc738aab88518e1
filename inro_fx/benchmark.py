"""Speed on this machine: the float and the quantized model in turns, in one process, as medians and ratios.

Turns matter: a shared machine drifts, and only what ran in the same moment can be compared. A ratio above 1 means that the
quantized side is faster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from .kernels import kernels
from .passes.capture.example import Example
from .report import report
from .schemes import find_scheme

__all__ = ["Benchmark", "Timing", "benchmark", "benchmark_linear"]

SHAPES = ((64, 64), (384, 384), (384, 1536), (768, 768), (768, 3072), (3072, 768), (4096, 4096), (1000, 777))     # (in, out)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 4096)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Medians in milliseconds of ``name``, float and quantized; ``ratio`` is the median of the turns' ratios."""

    name: str
    float_ms: float
    quantized_ms: float
    ratio: float


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """The timing of the whole model and of each layer by itself, with the number of threads and the kernels in use."""

    total: Timing
    layers: list[Timing]
    threads: int
    library: str

    def __str__(self) -> str:
        body = [[t.name, f"{t.float_ms:.3f}", f"{t.quantized_ms:.3f}", f"{t.ratio:.2f}"] for t in (*self.layers, self.total)]
        table = tabulate(body, ["", "float ms", "quantized ms", "ratio"], disable_numparse=True,
                         colalign=("left", "right", "right", "right"))
        return f"{table}\n\n{self.threads} threads, kernels: {self.library}"


def _turns(first: Callable[[], Any], second: Callable[[], Any], seconds: float, least: int = 5) -> tuple[float, float, float]:
    """Medians in ms of two functions that run in turns, and the median ratio first / second."""
    for function in (first, second, first, second):
        function()
    a: list[float] = []
    b: list[float] = []
    end = time.perf_counter() + seconds
    while len(a) < least or time.perf_counter() < end:
        for function, times in ((first, a), (second, b)):
            start = time.perf_counter()
            function()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(a), statistics.median(b), statistics.median(x / y for x, y in zip(a, b, strict=True))


def benchmark(model: nn.Module, quantized: nn.Module, inputs: Any, *, seconds: float = 3.0) -> Benchmark:
    """Times ``model`` against ``quantized`` (of `quantize_graph`) on ``inputs``, whole and layer by layer.

    ``inputs`` are given as to `quantize_graph`. Half of ``seconds`` goes to the whole model, half to its layers, each
    of which is timed by itself on the input that it has in the float model.

    >>> import torch, inro_fx
    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU()).eval()
    >>> small = inro_fx.quantize_graph(model, torch.randn(4, 32))
    >>> [t.name for t in inro_fx.benchmark(model, small, torch.randn(4, 32), seconds=0.02).layers]
    ['0']
    """
    example = Example.of(inputs)
    args, kwargs = example.fresh()
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            total = Timing("whole model", *_turns(lambda: model(*args, **kwargs), lambda: quantized(*args, **kwargs), seconds / 2))
            calls = _layer_inputs(model, quantized, args, kwargs)
            layers = [Timing(path, *_turns(lambda c=call, p=path: model.get_submodule(p)(*c[0], **c[1]),  # type: ignore[misc]
                                           lambda c=call, p=path: quantized.get_submodule(p)(*c[0], **c[1]),  # type: ignore[misc]
                                           seconds / 2 / len(calls))) for path, call in calls.items()]
    finally:
        model.train(training)
    return Benchmark(total, layers, torch.get_num_threads(), kernels()["library"])


def _layer_inputs(model: nn.Module, quantized: nn.Module, args: tuple, kwargs: dict) -> dict[str, tuple[tuple, dict]]:
    """The first call of every module of the float model that became a row of the report."""
    modules = dict(model.named_modules())
    paths = [p for p in dict.fromkeys(row.layer for row in report(quantized).rows) if p in modules]
    calls: dict[str, tuple[tuple, dict]] = {}
    with contextlib.ExitStack() as stack:
        for path in paths:
            def remember(module: nn.Module, args: tuple, kwargs: dict, path: str = path) -> None:
                calls.setdefault(path, (args, kwargs))
            stack.callback(modules[path].register_forward_pre_hook(remember, with_kwargs=True).remove)
        model(*args, **kwargs)
    return calls


def benchmark_linear(scheme: str = "int8", dtype: torch.dtype = torch.float32, *, rows: Sequence[int] = ROWS,
                     shapes: Sequence[tuple[int, int]] = SHAPES, seconds: float = 0.3) -> list[Timing]:
    """One linear layer of each shape at each number of rows, against the float layer, both as modules with all overhead."""
    from .api import quantize_graph
    found = []
    for inner, out in shapes:
        layer = nn.Linear(inner, out).to(dtype).eval()
        small = quantize_graph(layer, torch.randn(2, inner, dtype=dtype), find_scheme(scheme))
        for count in rows:
            x = torch.randn(count, inner, dtype=dtype)
            with torch.inference_mode():
                found.append(Timing(f"{count} x {inner} -> {out}", *_turns(lambda: layer(x), lambda: small(x), seconds)))  # noqa: B023
    return found
