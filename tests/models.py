"""Tiny models for the laws: name -> function that gives (model, example inputs). Each shows another way of using weights."""

import torch
import torch.nn.functional as F
from torch import nn

import inro_fx


class Tied(nn.Module):
    """One table, looked up and multiplied by."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(torch.relu(self.middle(self.table(ids))))


class Sliced(nn.Module):
    """Three projections that are rows of one parameter."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(24, 8))

    def forward(self, x):
        q, k, v = (F.linear(x, self.w[i * 8:(i + 1) * 8]) for i in range(3))
        return F.scaled_dot_product_attention(q, k, v)


class Matmuls(nn.Module):
    """A constant on either side, stored either way, and in an einsum."""

    def __init__(self):
        super().__init__()
        self.right = nn.Parameter(torch.randn(8, 12))
        self.left = nn.Parameter(torch.randn(5, 6))
        self.tall = nn.Parameter(torch.randn(16, 12))
        self.cube = nn.Parameter(torch.randn(4, 3, 10))

    def forward(self, x):                                     # [batch, 6, 8]
        y = self.left @ (x @ self.right)                      # [batch, 5, 12]
        y = torch.einsum("bij,hj->bih", y, self.tall)         # [batch, 5, 16]
        y = y.unflatten(-1, (4, 4))[..., :3]                  # [batch, 5, 4, 3]
        return torch.einsum("bihd,hdo->bio", y, self.cube)


class Conv1D(nn.Module):
    """addmm with the weight stored [in, out], as GPT-2 has it."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 24)), nn.Parameter(torch.randn(24))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], 24)


class Convolutions(nn.Module):
    """Grouped, depthwise and transposed, with batch norm between."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8, padding="same"),
                                 nn.ConvTranspose2d(8, 6, 2, 2, groups=2), nn.Conv2d(6, 4, 1, padding=1, padding_mode="reflect"))

    def forward(self, x):
        return self.net(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 12, 2, batch_first=True, bidirectional=True), nn.Linear(24, 8)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class Repeated(nn.Module):
    """One module called twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(torch.relu(self.layer(x)))


class ValueBranch(nn.Module):
    """Its own code cannot be traced; its children can."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU())

    def forward(self, x):
        y = self.first(x)
        return self.second(y) if y.sum() > 0 else self.second(-y)


class Plain(nn.Module):
    """Nothing to quantize."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x).sin()


MODELS = {
    "mlp": lambda: (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), torch.randn(5, 16)),
    "tied": lambda: (Tied(), torch.randint(0, 40, (2, 5))),
    "sliced": lambda: (Sliced(), torch.randn(2, 3, 8)),
    "matmuls": lambda: (Matmuls(), torch.randn(2, 6, 8)),
    "conv1d": lambda: (Conv1D(), torch.randn(2, 3, 8)),
    "convolutions": lambda: (Convolutions(), torch.randn(2, 4, 9, 9)),
    "recurrent": lambda: (Recurrent(), torch.randn(2, 5, 8)),
    "encoder": lambda: (nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), torch.randn(2, 5, 16)),
    "attention": lambda: (nn.MultiheadAttention(16, 4), (torch.randn(5, 2, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16))),
    "bag": lambda: (nn.EmbeddingBag(40, 16), torch.randint(0, 40, (3, 4))),
    "repeated": lambda: (Repeated(), torch.randn(4, 16)),
    "value_branch": lambda: (ValueBranch(), torch.randn(4, 16)),
}


def quantize(model, inputs, scheme, **options):
    """quantize_graph, with the example as calibration data for schemes that need some."""
    if getattr(scheme, "name", scheme) == "int8_static":
        options["calibration"] = [inputs]
    return inro_fx.quantize_graph(model, inputs, scheme, **options)


def example(inputs):
    """The inputs as (args, kwargs)."""
    return ((), inputs) if isinstance(inputs, dict) else (inputs if isinstance(inputs, tuple) else (inputs,), {})


def first(output):
    """The first tensor of an output."""
    while isinstance(output, (tuple, list)):
        output = output[0]
    return output


def relative(want, got):
    return ((first(got).double() - first(want).double()).norm() / first(want).double().norm().clamp(min=1e-12)).item()


# ---- comparing ----

SCHEMES = ("int8", "int8_dynamic", "int4")


WITHIN = {"int8": 0.02, "int8_dynamic": 0.04, "int4": 0.4, "int8_tensor": 0.1, "int8_rowwise_full": 0.02}


def quantized(model, inputs, scheme="int8", **options):
    return quantize(model.eval(), inputs, scheme, **options)


def close(model, small, *inputs, scheme="int8"):
    want, got = first(model(*inputs)), first(small(*inputs))
    return want.dtype == got.dtype and want.shape == got.shape and (not want.numel() or relative(want, got) < WITHIN[scheme])
