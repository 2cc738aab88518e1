"""fold_batchnorm: a batch norm after a convolution is multiplied into the convolution's weight and bias.

    before    conv2d = conv2d(x, weight, bias); batch_norm = batch_norm(conv2d, mean, var, gamma, beta, ...)
    after     conv2d = conv2d(x, weight * g, (bias - mean) * g + beta)        g = gamma / sqrt(var + eps)

It works on the module tree, so that a call outside the graph computes the same: the convolution gets new parameters and
the batch norm becomes an `nn.Identity`.
"""

from __future__ import annotations
