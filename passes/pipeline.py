"""The column of passes: from a captured program to one that computes with codes."""

from __future__ import annotations

from collections.abc import Sequence

from .failures import PassError
from .program import Context, Pass, Program
from .rules.epilogues import epilogues
from .rules.fuse import fuse
from .rules.integers import integers
from .rules.quantize import quantize
from .verify import verify

__all__ = ["PASSES", "run_passes"]

PASSES: tuple[Pass, ...] = (
    quantize,          # weights become parts and their unpacking: right, and everywhere
    fuse,              # unpacking and operator become one call: after quantize, for it looks for unpacked weights
    epilogues,         # batch norms and activations go into the convolution before them
    integers,          # values between convolutions on codes stay codes: after epilogues, for it looks for what makes codes
)


def run_passes(program: Program, context: Context, more: Sequence[Pass] = ()) -> Program:
    """The program after `PASSES`, and after ``more`` of the user's, verified after each.

    Raises `PassError` naming the pass that broke it.
    """
    for step in (*PASSES, *more):
        name = getattr(step, "__name__", type(step).__name__)
        done = step(program, context)
        if not isinstance(done, Program) or (done is program and step not in PASSES and done.graph is not program.graph):
            raise PassError(f"the pass {name} gave back {type(done).__name__}, not a Program")
        program = done
        verify(program, context, after=name)
    return program
