"""A small trained model that the package carries: a vision transformer that reads 8x8 handwritten digits.

The file ``digits.safetensors`` holds its weights and 719 test images; ``train.py`` beside it made both.
"""

from __future__ import annotations

import importlib.resources

import torch
import torch.nn.functional as F
from safetensors.torch import load
from torch import Tensor, nn

__all__ = ["DigitsTransformer", "accuracy", "load_digits_model"]


class Block(nn.Module):
    """Attention and a two-layer perceptron around a residual stream."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class DigitsTransformer(nn.Module):
    """Images [batch, 1, 8, 8] with values 0..1 -> scores [batch, 10]; 152 thousand parameters."""

    def __init__(self, width: int = 64, blocks: int = 3):
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, 2)
        self.position = nn.Parameter(torch.zeros(1, 16, width))
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


def load_digits_model() -> tuple[DigitsTransformer, Tensor, Tensor]:
    """The trained model in eval mode, the test images [719, 1, 8, 8] float32 and their labels [719] int64."""
    data = load((importlib.resources.files(__name__) / "digits.safetensors").read_bytes())
    images, labels = data.pop("test.images"), data.pop("test.labels")
    model = DigitsTransformer()
    model.load_state_dict(data)
    return model.eval(), images.float().reshape(-1, 1, 8, 8) / 16, labels.long()


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of images that the model reads right."""
    with torch.no_grad():
        return (model(images).argmax(1) == labels).double().mean().item()
