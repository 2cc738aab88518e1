"""inro_fx::recurrent(x, h, c, batch_sizes, codes_ih, ..., cell, reverse, dynamic_input, dynamic, bits, group): one layer, one direction.

x is [steps, batch, in], or the data of a packed sequence [rows, in] with its ``batch_sizes`` int64 [steps]. h, and c of an LSTM, are
[batch, out] and [batch, hidden]; ``codes_hr`` are those of a projection of the hidden state. With gates = x @ W_ih.T + b_ih + h @ W_hh.T +
b_hh, as in torch.nn:

    lstm          i, f, g, o = gates; c = sigmoid(f) * c + sigmoid(i) * tanh(g); h = sigmoid(o) * tanh(c)
    gru           r, z of both products; n = tanh(n_x + r * n_h); h = (1 - z) * n + z * h
    tanh, relu    h = tanh(gates), relu(gates)

All steps of x are multiplied at once; ``dynamic_input`` and ``dynamic`` quantize x and h per row and multiply integers, else they keep 15
bits (see `linear`). Codes may be floats [out, in] instead, with scale 1: what a report computes the error of one matrix with. The result is
(y [steps, batch, out] or [rows, out], the last h, the last c; the last c is empty where there is none). The gradient is that of the
layer with dequantized weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import recurrent_steps
from .dequantize import reference as dequantize
from .library import define

__all__ = ["GATES", "recurrent"]

GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}


def _product(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool, bits: int, group: int) -> Tensor:
    if codes.is_floating_point():
        return F.linear(x, codes, bias)
    if dynamic:
        return torch.ops.inro_fx.linear_dynamic.inference(x, codes, scale, bias, x.shape[-1])
    return torch.ops.inro_fx.linear.inference(x, codes, scale, bias, bits, group, x.shape[-1])


def _lstm(gates: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.add_(hidden).chunk(4, -1)
    c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
    return o.sigmoid().mul_(c.tanh()), c


def _gru(gates: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    (r, z, n), (hidden_r, hidden_z, hidden_n) = gates.chunk(3, -1), hidden.chunk(3, -1)
    n = torch.addcmul(n, (r + hidden_r).sigmoid_(), hidden_n).tanh_()
    return torch.lerp(n, h, (z + hidden_z).sigmoid_()), c


CELLS = {"lstm": _lstm, "gru": _gru, "tanh": lambda gates, hidden, h, c: ((gates + hidden).tanh_(), c),
         "relu": lambda gates, hidden, h, c: ((gates + hidden).relu_(), c)}


def reference(x: Tensor, h: Tensor, c: Tensor | None, batch_sizes: Tensor | None, codes_ih: Tensor, scale_ih: Tensor, codes_hh: Tensor,
              scale_hh: Tensor, bias_ih: Tensor | None, bias_hh: Tensor | None, codes_hr: Tensor | None, scale_hr: Tensor | None,
              cell: str, reverse: bool, dynamic_input: bool, dynamic: bool, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    _check_fit(x, h, c, batch_sizes, codes_ih, codes_hh, bias_ih, bias_hh, codes_hr, cell)
    step, last_c = CELLS[cell], h.new_empty(0) if c is None else c
    h, rest = h.clone(memory_format=torch.contiguous_format), (dynamic, bits, group)
    gates = _product(x, codes_ih, scale_ih, bias_ih, dynamic_input, bits, group)
    last_c = last_c.clone(memory_format=torch.contiguous_format)
    if batch_sizes is None and codes_hr is None and bits == 8 and not group:
        y = recurrent_steps(gates, h, None if c is None else last_c, codes_hh, scale_hh, bias_hh, cell, reverse, 1 if dynamic else 2)
        if y is not None:
            return y, h, last_c
    sizes = [h.shape[0]] * x.shape[0] if batch_sizes is None else batch_sizes.tolist()
    starts = [0] * len(sizes) if batch_sizes is None else [0, *torch.cumsum(batch_sizes, 0).tolist()]
    y = x.new_empty((*x.shape[:-1], h.shape[1]))
    for t in reversed(range(len(sizes))) if reverse else range(len(sizes)):
        n = sizes[t]
        rows = slice(starts[t], starts[t] + n)
        given, here = (gates[t], y[t]) if batch_sizes is None else (gates[rows], y[rows])
        hidden = _product(h[:n], codes_hh, scale_hh, bias_hh, *rest)
        new, new_c = step(given, hidden, h[:n], last_c[:n])
        if codes_hr is not None and scale_hr is not None:
            new = _product(new, codes_hr, scale_hr, None, *rest)
        here.copy_(new)
        h[:n] = new
        if c is not None:
            last_c[:n] = new_c
    return y, h, last_c


def _check_fit(x: Tensor, h: Tensor, c: Tensor | None, batch_sizes: Tensor | None, codes_ih: Tensor, codes_hh: Tensor,
               bias_ih: Tensor | None, bias_hh: Tensor | None, codes_hr: Tensor | None, cell: str) -> None:
    """Raises RuntimeError for states, weights and inputs of sizes that do not belong together."""
    if x.shape[0] == 0:
        raise RuntimeError("a recurrent layer got a sequence of no steps")
    rows, projected = codes_hh.shape[0], codes_hr is not None
    hidden = h.shape[-1] if c is None else c.shape[-1]
    fits = rows == codes_ih.shape[0] == GATES[cell] * hidden and (c is None) == (cell != "lstm") \
        and x.dim() == (3 if batch_sizes is None else 2) and h.dim() == 2 and (batch_sizes is not None or h.shape[0] == x.shape[1]) \
        and (c is None or c.shape == (h.shape[0], hidden)) and (projected or h.shape[-1] == hidden) \
        and all(b is None or b.shape == (rows,) for b in (bias_ih, bias_hh))
    if not fits:
        raise RuntimeError(f"a recurrent layer ({cell}) of {rows} gates got an input {tuple(x.shape)} and a state {tuple(h.shape)} that do "
                           f"not fit it")
    if any(t is not None and t.dtype != x.dtype for t in (h, c, bias_ih, bias_hh)):
        raise RuntimeError(f"a recurrent layer got an input of {x.dtype}, and states or biases of another dtype")


def fake(x: Tensor, h: Tensor, c: Tensor | None, *rest: Any) -> Any:
    torch._check(x.is_floating_point(), lambda: f"a quantized recurrent layer needs floating-point inputs, got {x.dtype}")
    return x.new_empty((*x.shape[:-1], h.shape[1])), h.new_empty(h.shape), h.new_empty(0) if c is None else c.new_empty(c.shape)


def setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.tensors = [isinstance(value, Tensor) for value in inputs]
    ctx.rest = [None if isinstance(value, Tensor) else value for value in inputs]
    ctx.save_for_backward(*[value for value in inputs if isinstance(value, Tensor)])


def backward(ctx, *grads: Tensor) -> tuple:  # type: ignore[no-untyped-def]
    """Through the layer in floats, computed once more."""
    saved = iter(ctx.saved_tensors)
    inputs = [next(saved) if is_tensor else value for is_tensor, value in zip(ctx.tensors, ctx.rest, strict=True)]
    x, bits, group = inputs[0], inputs[16], inputs[17]
    for i in (4, 6, 10):
        if inputs[i] is not None and not inputs[i].is_floating_point():
            columns = (x if i == 4 else inputs[1]).shape[-1] if i != 10 else inputs[2].shape[-1]
            inputs[i] = dequantize(inputs[i], inputs[i + 1], bits, group, columns, x.dtype)
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed and ctx.tensors[i]]
    with torch.enable_grad():
        for i in wanted:
            inputs[i] = inputs[i].detach().requires_grad_()
        outputs = _differentiable(*inputs[:14])
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad and g is not None]
        found = torch.autograd.grad([o for o, _ in pairs], [inputs[i] for i in wanted], [g for _, g in pairs], allow_unused=True)
    result: list[Any] = [None] * len(inputs)
    for i, grad in zip(wanted, found, strict=True):
        result[i] = grad
    return tuple(result)


def _differentiable(x: Tensor, h: Tensor, c: Tensor | None, batch_sizes: Tensor | None, w_ih: Tensor, _: Tensor, w_hh: Tensor, __: Tensor,
                    b_ih: Tensor | None, b_hh: Tensor | None, w_hr: Tensor | None, ___: Tensor | None, cell: str, reverse: bool
                    ) -> tuple[Tensor, Tensor, Tensor]:
    """torch's own layer, whose backward direction is that of the reversed sequence."""
    weights = [w for w in (w_ih, w_hh, b_ih, b_hh, w_hr) if w is not None]
    function = {"lstm": torch.lstm, "gru": torch.gru, "tanh": torch.rnn_tanh, "relu": torch.rnn_relu}[cell]
    hx: Any = h[None] if c is None else [h[None], c[None]]
    if batch_sizes is None:
        given = x.flip(0) if reverse else x
        y, *states = function(given, hx, weights, b_ih is not None, 1, 0.0, False, False, False)
        return y.flip(0) if reverse else y, states[0][0], states[1][0] if c is not None else h.new_empty(0)
    if not reverse:
        y, *states = function(x, batch_sizes, hx, weights, b_ih is not None, 1, 0.0, False, False)
        return y, states[0][0], states[1][0] if c is not None else h.new_empty(0)
    both: Any = torch.cat([h[None]] * 2) if c is None else [torch.cat([s[None]] * 2) for s in (h, c)]
    y, *states = function(x, batch_sizes, both, weights * 2, b_ih is not None, 1, 0.0, False, True)        # its second direction
    return y[:, h.shape[1]:], states[0][1], states[1][1] if c is not None else h.new_empty(0)


recurrent = define(
    "recurrent(Tensor x, Tensor h, Tensor? c, Tensor? batch_sizes, Tensor codes_ih, Tensor scale_ih, Tensor codes_hh, Tensor scale_hh, "
    "Tensor? bias_ih, Tensor? bias_hh, Tensor? codes_hr, Tensor? scale_hr, str cell, bool reverse, bool dynamic_input, bool dynamic, "
    "int bits, int group) -> (Tensor, Tensor, Tensor)", reference, fake, setup, backward)
