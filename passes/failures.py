"""The errors that the compiler raises; `inro_fx.errors` shows the whole tree."""

from __future__ import annotations

__all__ = ["GraphNotTaken", "InputError", "InroError", "ModelError", "PassError", "SchemeError", "StateError"]


class InroError(Exception):
    """The root of every error that a user can cause."""


class ModelError(InroError, ValueError):
    """The model cannot be quantized as it is; the message names the layer and the way out."""


class InputError(InroError, ValueError):
    """The example or calibration inputs do not fit the model."""


class SchemeError(InroError, ValueError):
    """An unknown scheme, or options that make no scheme."""


class StateError(InroError, RuntimeError):
    """A state_dict that is not one of a quantized model; nothing of it was loaded."""


class GraphNotTaken(InroError, RuntimeError):
    """With ``strict=True``: a call that the captured graph does not cover; the message names what differs."""


class PassError(RuntimeError):
    """A pass broke an invariant: a defect of inro_fx, not of the model."""
