"""inro_fx::max_pool2d(codes, kernel, stride, padding, dilation, ceil): the largest code of each window, codes uint8 [n, c, h, w].

The order of codes is that of the numbers they stand for, so these are the codes of the numbers' max pooling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .conv import Sizes
from .library import define
from .quantize import side_by_side

__all__ = ["max_pool2d"]


def reference(codes: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil: bool) -> Tensor:
    return side_by_side(F.max_pool2d(codes.float(), kernel, stride, padding, dilation, ceil).to(torch.uint8))


max_pool2d = define("max_pool2d(Tensor codes, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil) -> Tensor", reference,
                    reference)
