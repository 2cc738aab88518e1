"""What can go wrong, as one tree of exceptions.

    InroError
      ModelError(ValueError)      the model cannot be quantized: no data in its weights, already quantized, scripted
      InputError(ValueError)      the example inputs or calibration inputs do not fit the model
      SchemeError(ValueError)     an unknown scheme name, an impossible quant_max or group size
      FileError(ValueError)       a saved model that is damaged, foreign, newer, or of another architecture
      StateError(RuntimeError)    a float state_dict for a quantized model
      GraphNotTaken(RuntimeError) with strict=True: a call that the captured graph does not cover
      MissingTool(RuntimeError)   a program or package that an output needs is not installed
    PassError(RuntimeError)       a broken invariant inside the compiler: a defect of inro_fx, please report it
"""

from .passes.failures import GraphNotTaken, InputError, InroError, ModelError, PassError, SchemeError, StateError

__all__ = ["FileError", "GraphNotTaken", "InputError", "InroError", "MissingTool", "ModelError", "PassError", "SchemeError",
           "StateError"]


class FileError(InroError, ValueError):
    """A file that does not hold what was asked of it; nothing was taken from it."""


class MissingTool(InroError, RuntimeError):
    """A program or package that this output needs is not installed; the message says how to get it."""
