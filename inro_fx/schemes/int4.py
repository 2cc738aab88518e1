"""int4: four-bit weights, two in a byte, with a scale for each 32 inputs of an output channel."""

from .uniform import Uniform

int4 = Uniform("int4", 7, 32)
