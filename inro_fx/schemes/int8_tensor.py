"""int8_tensor: eight-bit weights with one scale for the whole weight."""

from .uniform import Uniform

int8_tensor = Uniform("int8_tensor", 127, "tensor")
