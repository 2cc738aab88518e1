"""Which weights are quantized, how, and why the others are not."""
