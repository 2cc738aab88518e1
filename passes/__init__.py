"""The compiler: programs of torch.fx graphs in, programs out. From top to bottom, the way of a model:

    program                      what was captured of a module: graph, call, guards, probes; `node.meta` as one table
    structure, constants         nested values; where the weights are, and what is a view of one

    capture/clone, example       the copy that is worked on, the inputs, and how outputs are compared
    capture/state, draws         one run of the float model: its output, what it writes to, what it draws
    capture/listener, frames     what its code asks of Python, where no tensor is asked
    capture/bytecode             the questions that make no call, and what is under ``try``
    capture/proxy, tracer        traced values that carry the example's, and the graph that they leave
    capture/questions            what the code asks of them, which is guarded
    capture/values, operators    what it gets for a node's value; what torch's functions do, by name
    capture/aliases, leaks       views of weights; traced values that the code keeps
    capture/call, decompose      which calls a program answers; composites written out
    capture/traced, untraced     modules while they are traced; code that stays Python
    capture/session, ended       one model's capture; the graph of a trace as a program
    capture/ladder               one graph, else regions, else layers: taken when it gives what the model gave

    carriers, scheme             operators that carry a weight, and the ways to store one
    solve/plan, solve/examine    which weights are quantized how, the others' reasons; what a scheme makes of one

    pipeline                     PASSES: quantize, fuse, epilogues, integers, then the user's own, each verified
    rules/driver                 a `Rule` finds, refuses, rewrites; the driver keeps uses and probes
    rules/quantize, rules/fuse   a weight becomes its parts and their unpacking; unpacking and operator one call
    rules/fuse_conv, fuse_recurrent  the same for convolutions, and for recurrent layers
    rules/epilogues, integers    what follows a convolution becomes part of it; values between them stay codes
    rules/writes                 which values are changed in place, so that no rule reads them at another time
    rules/observe                observers in front of operators, for calibration
    rules/fold_batchnorm         batch norms into convolutions, when asked
    verify                       what a legal program is
    measure                      float and quantized programs side by side: an error for each use

    run/classes, weights         the class that a module gets; weights that read as floats and are codes
    run/codegen, forward         graphs as code; a program in the place of a forward
    run/covers, changes          whether it answers a call; what of the model was changed since
    run/again                    a second program for calls of another kind, and after loading
    run/plain, view, finish      a graph as data for pickle; what reads the module as a graph; the last touches

    failures                     the errors
"""
