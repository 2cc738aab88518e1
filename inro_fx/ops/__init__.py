"""The operators ``torch.ops.inro_fx.*``: one file each with its schema, reference, fake implementation and gradient.

The reference implementations are plain ATen and run on any device; on CPUs those of C take their place where they were built.
Importing this package registers all of them.
"""

from ..kernels import register
from . import (
    affine,
    conv,
    conv_static,
    dequantize,
    embedding,
    linear,
    linear_dynamic,
    linear_static,
    max_pool2d,
    quantize,
    recurrent,
)

__all__ = ["affine", "conv", "conv_static", "dequantize", "embedding", "linear", "linear_dynamic", "linear_static", "max_pool2d",
           "quantize", "recurrent"]

register()
