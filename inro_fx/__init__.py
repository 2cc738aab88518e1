"""Quantize any PyTorch model with one call, and see layer by layer what it cost and what it saved.

>>> import torch, inro_fx
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
>>> small = inro_fx.quantize_graph(model, torch.randn(8, 64))
>>> print(round(inro_fx.report(small).coverage, 2))
1.0
"""

from .api import quantize_graph
from .report import Report, report
from .schemes import SCHEMES, Scheme, uniform

__all__ = ["SCHEMES", "Report", "Scheme", "quantize_graph", "report", "uniform"]
