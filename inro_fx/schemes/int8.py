"""int8: eight-bit weights with a scale per output channel, float activations. The default."""

from .uniform import Uniform

int8 = Uniform("int8", 127)
