"""TABLE: what each use of a weight multiplies it by, as rows of the matrix that the weight is seen as.

A row of `INPUTS` is for one operator a function ``(use of the weight, values) -> [(rows, x)]``: the rows ``rows`` of the matrix are
multiplied by the rows of ``x`` [blocks, samples, columns], where each of the blocks is of equally many rows (one but for grouped
convolutions and batched products). It gives a sentence in the place of a list where it does not know.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..carriers import Use, carrier_of
from ..constants import Alias
from ..program import meta_of
from ..rules.fuse_conv import Geometry, geometry_of
from ..rules.fuse_recurrent import groups_of, layer_of
from .plan import Weight

__all__ = ["INPUTS", "inputs_of"]

Rows = list[tuple[slice, Tensor]]
MOST = 1 << 25             # numbers of x that one use gives: of more samples, evenly spaced ones are taken


@dataclasses.dataclass(frozen=True)
class Site:
    """One use of a weight at a node; ``value`` gives the values of other nodes, and what is no node as it is."""

    node: fx.Node
    use: Use
    weight: Weight
    value: Callable[[Any], Any]

    @property
    def call(self) -> dict[str, Any]:
        carrier = carrier_of(self.node.target)
        assert carrier is not None
        return carrier.bind(self.node.args, self.node.kwargs)

    @property
    def alias(self) -> Alias | None:
        name, _, index = self.use.operand.partition(".")
        operand = self.call.get(name)
        operand = operand[int(index)] if index and isinstance(operand, (list, tuple)) else operand
        alias = meta_of(operand).get("alias") if isinstance(operand, fx.Node) else None
        return alias if alias is not None and alias.view else None


def inputs_of(node: fx.Node, use: Use, weight: Weight, value: Callable[[Any], Any]) -> Rows | str:
    """What a use multiplies its weight by, or why that is not known."""
    find = INPUTS.get(use.op)
    if find is None or use.computed:
        return f"what {use.op} multiplies by is not known" if find is None else "arithmetic stands between the weight and its operator"
    found = find(Site(node, use, weight, value))
    return found if isinstance(found, str) else [(rows, _sampled(x)) for rows, x in found]


def _sampled(x: Tensor) -> Tensor:
    """At most so many samples that `MOST` numbers remain."""
    step = -(-x.numel() // MOST)
    return x.float() if step <= 1 else x[:, ::step].float()


# ---- products of matrices ----

def _flat(x: Tensor) -> Tensor:
    return x.reshape(1, -1, x.shape[-1])


def _rows(site: Site, out: int) -> slice | str:
    """The rows of the matrix that a two-dimensional operand is, whose axis ``out`` runs over them."""
    alias, layout = site.alias, site.weight.layout
    if alias is None or len(alias.shape) != 2 or len(site.weight.constant.shape) != 2:
        return "the weight is not a plain matrix"
    if alias.shape[1 - out] != layout.columns or (alias.axes[1 - out] != layout.reduced and layout.columns > 1):
        return "the weight is a part of another one, across its columns"
    if alias.shape[out] == layout.rows:
        return slice(0, layout.rows)
    if layout.channels != (0,) or alias.offset % layout.columns or alias.strides[out] != layout.columns:
        return "the weight is a part of another one, across its rows"
    return slice(alias.offset // layout.columns, alias.offset // layout.columns + alias.shape[out])


def _plain(operand: str, out: int, turned: bool = False) -> Callable[[Site], Rows | str]:
    """The rows of x [..., samples, columns] (``turned``: [..., columns, samples]) against a matrix."""
    def find(site: Site) -> Rows | str:
        rows = _rows(site, out)
        if isinstance(rows, str):
            return rows
        x = site.value(site.call[operand])
        return [(rows, _flat(x.transpose(-1, -2) if turned and x.dim() > 1 else x))]
    return find


def _batched(site: Site, x: Tensor) -> Rows | str:
    """x [..., samples, columns] against a weight of several matrices, one for each entry of its first axes."""
    alias, layout = site.alias, site.weight.layout
    shape = site.weight.constant.shape
    if alias is None or alias.shape != shape or layout.reduced not in ((len(shape) - 2,), (len(shape) - 1,)) or layout.view != shape:
        return "the weight is a part or a view of another one"
    batch = shape[:-2]
    x = x.expand(*torch.broadcast_shapes(x.shape[:-2], batch), *x.shape[-2:])
    if math.prod(batch) == 1:
        return [(slice(0, layout.rows), _flat(x))]
    if tuple(x.shape[x.dim() - len(shape):-2]) != tuple(batch):
        return "one matrix of the weight serves several of the batch"
    x = x.reshape(-1, math.prod(batch), *x.shape[-2:]).transpose(0, 1)
    return [(slice(0, layout.rows), x.reshape(x.shape[0], -1, x.shape[-1]))]


def _matmul(site: Site) -> Rows | str:
    left = site.use.operand == "input"
    x = site.value(site.call["other" if left else "input"])
    if len(site.weight.constant.shape) == 2:
        return _plain("other" if left else "input", 0 if left else 1, turned=left)(site)
    return _batched(site, x.transpose(-1, -2) if left else x)


def _addmm(site: Site) -> Rows | str:
    left = site.use.operand == "mat1"
    return _plain("mat2" if left else "mat1", 0 if left else 1, turned=left)(site)


def _baddbmm(site: Site) -> Rows | str:
    left = site.use.operand == "batch1"
    x = site.value(site.call["batch2" if left else "batch1"])
    return _batched(site, x.transpose(-1, -2) if left else x)


def _grouped_mm(site: Site) -> Rows | str:
    """x [rows, columns], those up to ``offs[e]`` against the matrix e of [experts, columns, out]."""
    call, layout, shape = site.call, site.weight.layout, site.weight.constant.shape
    x, offs = site.value(call["input"]), site.value(call.get("offs"))
    if len(shape) != 3 or layout.reduced != (1,) or not isinstance(offs, Tensor) or x.dim() != 2:
        return "not rows of x against a stack of matrices"
    ends = [0, *offs.tolist()]
    return [(slice(e * shape[2], (e + 1) * shape[2]), x[None, ends[e]:ends[e + 1]]) for e in range(shape[0])]


def _vector(operand: str) -> Callable[[Site], Rows | str]:
    return _plain(operand, 0)


def _inner(site: Site) -> Rows | str:
    return _plain("other" if site.use.operand == "input" else "input", 0)(site)


def _bilinear(site: Site) -> Rows | str:
    one, two = (site.value(site.call[name]) for name in ("input1", "input2"))
    if site.alias is None or site.alias.shape != site.weight.constant.shape or site.weight.layout.reduced != (1, 2):
        return "the weight is a part or a view of another one"
    return [(slice(0, site.weight.layout.rows), _flat((one[..., :, None] * two[..., None, :]).flatten(-2)))]


def _einsum(site: Site) -> Rows | str:
    call, layout, shape = site.call, site.weight.layout, site.weight.constant.shape
    operands = {name: call[name] for name in ("first", "second", "third") if call.get(name) is not None}
    if len(operands) != 2 or site.alias is None or site.alias.shape != shape or layout.view != shape:
        return "not one other operand, or a part or a view of another weight"
    inputs, _, _ = call["equation"].replace(" ", "").partition("->")
    labels = dict(zip(operands, inputs.split(","), strict=True))
    mine = labels.pop(site.use.operand)
    other, theirs = next(iter(labels.items()))
    x = site.value(call[other])
    if "..." in mine or len(set(mine)) < len(mine) or len(set(theirs.replace(".", ""))) < len(theirs.replace(".", "")):
        return "a diagonal, or an ellipsis in the weight"
    free = [c for c in string.ascii_letters if c not in inputs]
    theirs = theirs.replace("...", "".join(free[:x.dim() - len(theirs.replace("...", ""))]))
    summed, kept = [mine[a] for a in layout.reduced], [mine[a] for a in layout.channels]
    shared = [c for c in kept if c in theirs]
    if not set(summed) <= set(theirs) or kept[:len(shared)] != shared:
        return "the other operand does not run over what is summed"
    rest = [c for c in theirs if c not in shared and c not in summed]
    x = x.permute([theirs.index(c) for c in (*shared, *rest, *summed)])
    blocks, columns = math.prod(x.shape[:len(shared)]), layout.columns
    return [(slice(0, layout.rows), x.reshape(blocks, -1, columns))]


# ---- convolutions: patches ----

def _conv(site: Site) -> Rows | str:
    layout, shape, alias = site.weight.layout, site.weight.constant.shape, site.alias
    geometry = geometry_of(site.node, site.weight)
    if isinstance(geometry, str):
        return geometry
    if alias is None or alias.shape != shape or alias.axes != tuple((a,) for a in range(len(shape))):
        return "the weight is a part or a view of another one"
    x = site.value(site.call["input"])
    x = x if x.dim() == len(shape) else x[None]
    if geometry.transposed:
        x = _spread(x, geometry)
        patches = _patches(x, geometry.kernel, (1,) * len(geometry.kernel), geometry.dilation, layout.columns).flip(
            tuple(range(-len(geometry.kernel), 0)))
        axes = [a - (len(layout.view) - len(geometry.kernel) - 1) if a > 1 else 0 for a in layout.reduced]
    else:
        x = F.pad(x, [p for size in reversed(geometry.padding) for p in (size, size)])
        patches = _patches(x, geometry.kernel, geometry.stride, geometry.dilation, layout.columns)
        axes = [a - 1 for a in layout.reduced]
    dims = len(geometry.kernel)
    patches = patches.unflatten(1, (geometry.groups, -1)).transpose(0, 1)           # [groups, n, channels, *positions, *kernel]
    patches = patches.movedim(2, 2 + dims)                                          # [groups, n, *positions, channels, *kernel]
    patches = patches.permute(*range(2 + dims), *(2 + dims + a for a in axes))
    return [(slice(0, layout.rows), patches.reshape(geometry.groups, -1, layout.columns))]


def _patches(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], columns: int) -> Tensor:
    """A view [n, channels, *positions, *kernel] of a padded x; of very many positions, some."""
    for dim, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), 2):
        x = x.unfold(dim, d * (k - 1) + 1, s)[..., ::d]
    dims = len(kernel)
    step = max(1, round((x.shape[0] * math.prod(x.shape[2:2 + dims]) * columns / MOST) ** (1 / dims)))
    return x[(slice(None), slice(None), *(slice(None, None, step),) * dims)]


def _spread(x: Tensor, geometry: Geometry) -> Tensor:
    """The input of a transposed convolution with zeros between, so that a plain one with turned taps gives the same."""
    pads: list[int] = []
    for dim, k, s, p, d, more in zip(range(2, x.dim()), geometry.kernel, geometry.stride, geometry.padding, geometry.dilation,
                                     geometry.output_padding, strict=True):
        wide = x.new_zeros((*x.shape[:dim], (x.shape[dim] - 1) * s + 1, *x.shape[dim + 1:]))
        wide[(slice(None),) * dim + (slice(None, None, s),)] = x
        x, beside = wide, d * (k - 1) - p
        pads = [beside, beside + more, *pads]
    return F.pad(x, pads)


# ---- recurrent layers ----

def _recurrent(site: Site) -> Rows | str:
    """The inputs of a matrix are the layer's, or the states that its steps begin with: the float layers are run to have them."""
    layer = layer_of(site.node)
    if layer is None or layer.batch_sizes is not None or layer.each not in (2, 4):
        return "a packed sequence, a projection, or a call of another form than torch.nn's"
    number = _position(site, layer)
    which, rows = number % layer.each, slice(0, site.weight.layout.rows)
    if which > 1 or site.alias is None or site.alias.shape != site.weight.constant.shape:
        return "the weight is a part or a view of another one"
    x, params = site.value(layer.x), [[site.value(p) for p in group] for group in groups_of(layer)]
    states = [site.value(s) for s in (layer.state if isinstance(layer.state, (tuple, list)) else (layer.state,))]
    states = [t for s in states for t in (s if isinstance(s, (tuple, list)) else (s,))]
    if layer.single:
        return [(rows, _flat(x if which == 0 else states[0]))]
    x = x.transpose(0, 1) if layer.batch_first else x
    function = getattr(torch, {"tanh": "rnn_tanh", "relu": "rnn_relu"}.get(layer.cell, layer.cell))
    outputs: list[Tensor] = []
    for index, group in enumerate(params):
        mine = [s[index:index + 1] for s in states]
        turned = x.flip(0) if index % layer.directions else x
        if index == number // layer.each and which == 0:
            return [(rows, _flat(x))]
        y = function(turned, tuple(mine) if layer.cell == "lstm" else mine[0], group, layer.biases, 1, 0.0, False, False, False)[0]
        if index == number // layer.each:
            return [(rows, _flat(torch.cat([mine[0], y[:-1]])))]
        outputs.append(y.flip(0) if index % layer.directions else y)
        if len(outputs) == layer.directions:
            x, outputs = torch.cat(outputs, -1), []
    return "the weight is not among the layer's"


def _position(site: Site, layer: Any) -> int:
    """The position of the weight among the parameters of a layer; of a cell, 0 or 1."""
    _, _, index = site.use.operand.partition(".")
    return int(index) if index else ("w_ih", "w_hh").index(site.use.operand)


INPUTS: Mapping[str, Callable[[Site], Rows | str]] = {
    "linear": _plain("input", 0), "matmul": _matmul, "addmm": _addmm, "baddbmm": _baddbmm, "grouped_mm": _grouped_mm,
    "mv": _vector("vec"), "addmv": _vector("vec"), "inner": _inner, "bilinear": _bilinear, "einsum": _einsum,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _conv),
    **dict.fromkeys(("lstm", "gru", "rnn", "lstm_cell", "gru_cell", "rnn_cell"), _recurrent),
}
