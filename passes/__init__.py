"""The compiler: torch.fx graphs in, torch.fx graphs out.

In the order in which they act: `capture` (with `trace`, `call`, `decompose`) makes graphs of a model, `targets` (with
`carriers`) finds the weights in them, `quantize` and `fuse` rewrite them, `verify` says what a legal graph is, and
`measure` runs the float and the quantized graphs side by side. `module` is what runs a graph in the place of a module.
"""
