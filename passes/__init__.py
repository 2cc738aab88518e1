"""The compiler: torch.fx graphs in, torch.fx graphs out.

In the order in which they act:

    example, state             the inputs; the copy of the model and what its forward writes to
    capture, session           the ladder from a model to graphs, over
    trace, call, decompose     the tracer that carries the example, which calls a graph answers, composites written out
    constants, carriers        what the weights are, and which operators carry one
    targets                    which weights are quantized, how, and why the others are not
    quantize, fuse             the rewriting
    verify                     what a legal graph is
    measure                    the float and the quantized graphs side by side
    module, plain              what runs a graph in the place of a module; a graph as data for pickle
"""
