"""int8_rowwise_full: all 256 codes, scale = max(|w|) / 127.5 per output channel; the numbers of the int8 tensor subclass.

The largest weight of a channel maps between two codes, so quantizing the result once more shrinks it a little: this is
the one scheme that is not idempotent.
"""

from .uniform import Uniform

int8_rowwise_full = Uniform("int8_rowwise_full", 127, low=-128, divisor=127.5)
