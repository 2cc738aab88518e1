"""Pure tensor mathematics: scales and codes, storage of small integers, error measures, exact integer products."""

from .affine import codes_of, scale_of, unscale
from .bits import pack_bits, storage_bits, unpack_bits
from .grid import Grid
from .metrics import WeightError, entropy, output_error, weight_error
from .products import int8_matmul, lift_scale, quantize_lifted, quantize_rows

__all__ = ["Grid", "WeightError", "codes_of", "entropy", "int8_matmul", "lift_scale", "output_error", "pack_bits",
           "quantize_lifted", "quantize_rows", "scale_of", "storage_bits", "unpack_bits", "unscale", "weight_error"]
