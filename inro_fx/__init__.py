"""Quantize any PyTorch model with one call, and see layer by layer what it cost and what it saved.

>>> import torch, inro_fx
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
>>> small = inro_fx.quantize_graph(model, torch.randn(8, 64))
>>> round(inro_fx.report(small).coverage, 2)
1.0
"""

import torch

__version__ = "0.1.0"
_OLDEST = (2, 11)
if tuple(int(n) for n in torch.__version__.split(".")[:2]) < _OLDEST:
    raise ImportError(f"inro_fx {__version__} needs torch {_OLDEST[0]}.{_OLDEST[1]} or newer; this is torch {torch.__version__}")

from .allocation import Allocation, BitPlan, Budget  # noqa: E402 - after the check of the version
from .api import convert_graph, plan_bits, prepare_graph, quantize_graph  # noqa: E402
from .benchmark import Benchmark, Timing, benchmark  # noqa: E402
from .compat import CompressedSize, compressed_size, uniform_dequantize, uniform_quantize  # noqa: E402
from .draw import draw, to_networkx  # noqa: E402
from .errors import (  # noqa: E402
    FileError,
    GraphNotTaken,
    InputError,
    InroError,
    MissingTool,
    ModelError,
    PassError,
    SchemeError,
    StateError,
)
from .explain import explain  # noqa: E402
from .int8_tensor import Int8SymmetricTensor  # noqa: E402
from .kernels import kernels  # noqa: E402 - the function; the package of that name stays importable
from .load import load  # noqa: E402
from .observers import (  # noqa: E402
    HistogramObserver,
    MinMaxObserver,
    MovingAverageObserver,
    Observer,
    PercentileObserver,
    all_reduce_observers,
)
from .onnx_export import export_onnx  # noqa: E402
from .passes.carriers import register_operator  # noqa: E402
from .report import ProgramCalls, Report, Row, Skipped, report  # noqa: E402
from .save import save  # noqa: E402
from .schemes import SCHEMES, Scheme, static, uniform  # noqa: E402
from .solvers import Moments, Solver  # noqa: E402

__all__ = [
    "SCHEMES",
    "Allocation",
    "Benchmark",
    "BitPlan",
    "Budget",
    "CompressedSize",
    "FileError",
    "GraphNotTaken",
    "HistogramObserver",
    "InputError",
    "InroError",
    "Int8SymmetricTensor",
    "MinMaxObserver",
    "MissingTool",
    "ModelError",
    "Moments",
    "MovingAverageObserver",
    "Observer",
    "PassError",
    "PercentileObserver",
    "ProgramCalls",
    "Report",
    "Row",
    "Scheme",
    "SchemeError",
    "Skipped",
    "Solver",
    "StateError",
    "Timing",
    "all_reduce_observers",
    "benchmark",
    "compressed_size",
    "convert_graph",
    "draw",
    "explain",
    "export_onnx",
    "kernels",
    "load",
    "plan_bits",
    "prepare_graph",
    "quantize_graph",
    "register_operator",
    "report",
    "save",
    "static",
    "to_networkx",
    "uniform",
    "uniform_dequantize",
    "uniform_quantize",
]
