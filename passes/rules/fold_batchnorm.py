"""fold_batchnorm: a batch norm after a convolution is multiplied into the convolution's weight and bias.

    before    conv2d = conv2d(x, weight, bias); batch_norm = batch_norm(conv2d, mean, var, gamma, beta, ...)
    after     conv2d = conv2d(x, weight * g, (bias - mean) * g + beta)        g = gamma / sqrt(var + eps)

It works on the module tree before capture is final, so that a call outside the graph computes the same: the convolution
gets new parameters of its own, and the batch norm becomes an `nn.Identity`. Pairs are found in the captured graph: the
convolution's result must go to the batch norm alone, and each of the two modules must be called once.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx, nn

from ..carriers import carrier_of, name_of_target
from ..program import Program, meta_of
from ..run.classes import user_class

__all__ = ["fold_batchnorm"]

CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)         # not their subclasses, whose forward may do more


def fold_batchnorm(root: nn.Module, program: Program) -> list[tuple[str, str]]:
    """Folds every batch norm of a program that can be folded, in the modules of ``root``: the (conv, norm) paths."""
    graph = program.graph
    calls = Counter(meta_of(n).get("module") for n in graph.nodes if _name(n) in CONVOLUTIONS or _name(n) == "batch_norm")
    folded = []
    for node in graph.nodes:
        conv = (node.args[0] if node.args else node.kwargs.get("input")) if _name(node) == "batch_norm" else None
        if not isinstance(conv, fx.Node):
            continue
        if _name(conv) not in CONVOLUTIONS or len(conv.users) != 1:
            continue
        first, second = meta_of(conv).get("module"), meta_of(node).get("module")
        if not first or not second or calls[first] != 1 or calls[second] != 1:
            continue
        convolution, norm = root.get_submodule(first), root.get_submodule(second)
        if _reads(conv, program, first) and user_class(norm) in NORMS and _fold(convolution, norm):
            parent, _, name = second.rpartition(".")
            root.get_submodule(parent)._modules[name] = nn.Identity().eval()
            folded.append((first, second))
    return folded


def _name(node: fx.Node) -> str:
    return name_of_target(node.target).removeprefix("functional.") if node.op == "call_function" else ""


def _reads(conv: fx.Node, program: Program, module: str) -> bool:
    """Does the convolution take its module's weight and bias as they are?"""
    def is_read(node: fx.Node, name: str) -> bool:
        return node.op == "get_attr" and program.full(str(node.target)) == f"{module}.{name}"
    carrier = carrier_of(conv.target)
    assert carrier is not None
    call = carrier.bind(conv.args, conv.kwargs)
    weight, bias = call["weight"], call.get("bias")
    return is_read(weight, "weight") and (bias is None or is_read(bias, "bias"))


def _fold(convolution: nn.Module, norm: nn.Module) -> bool:
    if norm.running_mean is None or norm.running_var is None or convolution._parameters.get("weight") is None:
        return False
    weight = convolution._parameters["weight"]
    assert weight is not None
    wide = torch.promote_types(weight.dtype, torch.float32)
    gain = torch.rsqrt(norm.running_var.to(wide) + norm.eps)
    gain = gain if norm.weight is None else gain * norm.weight.to(wide)
    bias = convolution._parameters.get("bias")
    shift = (0 if bias is None else bias.to(wide)) - norm.running_mean.to(wide)
    shift = shift * gain + (0 if norm.bias is None else norm.bias.to(wide))
    scaled = weight.to(wide) * gain.reshape(-1, *[1] * (weight.dim() - 1))
    convolution._parameters["weight"] = nn.Parameter(scaled.to(weight.dtype), weight.requires_grad)
    convolution._parameters["bias"] = nn.Parameter(shift.to(weight.dtype), weight.requires_grad)
    return True
