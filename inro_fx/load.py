"""load: the numbers of a file that `save` wrote, put into an architecture; its graphs are captured from the code of that.

Everything is read once, copied, and checked before a model is touched: against the schema, the bytes that are there, and the
architecture.
"""

from __future__ import annotations

import json
import os
import re
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .checks import check_model
from .errors import FileError, InroError, ModelError, SchemeError
from .manifest import DTYPES, Entry, Manifest, checked, differences, record_of, shown
from .passes.capture.clone import clone, make_independent
from .passes.capture.example import Example
from .passes.program import Pass
from .passes.run.again import Again, attach_all, capture_again
from .passes.run.finish import finish
from .passes.run.forward import attach_program, rewatch
from .passes.run.weights import Packed, attach_packed
from .passes.scheme import Layout, Scheme
from .progress import progress_bar
from .save import crc32_of, dtype_name, own_tensors
from .schemes import read_scheme

__all__ = ["load"]

NAMED = 5                      # differences that a message names


def load(path: str | os.PathLike[str], model: nn.Module | Callable[[], nn.Module], *, example_inputs: Any = None,
         schemes: Sequence[Scheme] = (), passes: Sequence[Pass] = (), strict: bool = False) -> nn.Module:
    """The quantized model in a file that `save` wrote: the same outputs as before saving, bit for bit.

    It lies on the device of ``model``; on the CPU where that is the meta device, or where ``model`` is on several.

    Parameters
    ----------
    path
        The file.
    model
        The architecture: a float model (which stays as it is, whatever its weights), one on the meta device, or a function that returns
        either. Its hooks, patched forwards and settings are respected.
    example_inputs
        What one call of the model takes: its graph is captured at once then, else at the first call.
    schemes
        The schemes of your own that the model was quantized with.
    passes
        The passes of your own that it was quantized with.
    strict
        Refuse an architecture that differs from the saved one in a class or a setting, which else is a warning.

    Raises
    ------
    FileError
        If the file is damaged, was not written by `save` or by another version, or holds another architecture.
    SchemeError
        If the file needs a scheme that is neither in ``inro_fx.SCHEMES`` nor in ``schemes``.
    FileNotFoundError
        If there is no file.
    """
    file = Path(path)
    if file.is_dir():
        raise FileError(f"{file.name} is a folder: give the file that inro_fx.save wrote")
    manifest, tensors = _read(file)
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise ModelError(f"load needs the architecture: a model or a function that returns one, not a {type(model).__name__}")
        model = model()
        if not isinstance(model, nn.Module):
            raise ModelError(f"the function returned a {type(model).__name__}, not a torch.nn.Module")
    check_model(model, skeleton=True)
    with torch.no_grad(), torch.inference_mode(False):
        device = _device_of(model)
        try:
            root = _rebuild(model, manifest, tensors, schemes, passes, file.name, strict)
        except (InroError, MemoryError):
            raise
        except Exception as error:                     # what the checks did not foresee
            raise FileError(f"{file.name}: its manifest makes no sense ({type(error).__name__}: {shown(str(error))})") from error
        root = root if device is None else root.to(device)
        if example_inputs is not None:
            example = Example.of(example_inputs)
            attach_all(root, capture_again(root, example.args, example.kwargs, passes, whole=True), passes)
    return root


# ---- reading ----

def _read(file: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest and all tensors of a file, each copied out of it and then checked."""
    try:
        with safe_open(file, "pt") as stored:
            manifest = _manifest(file.name, stored.metadata() or {})
            if set(stored.keys()) != set(manifest.tensors):
                raise FileError(f"{file.name} is damaged: its tensors are not those of its manifest")
            tensors = {}
            with progress_bar(len(manifest.tensors), f"loading {file.name}") as tick:
                for name, entry in manifest.tensors.items():
                    if entry["names"][:1] != [name]:
                        raise FileError(f"{file.name}: its manifest makes no sense: {shown(name)} is named {shown(entry['names'])}")
                    tensors[name] = _checked(file.name, name, stored.get_tensor(name).clone(), Entry(**entry))
                    tick()
    except SafetensorError as error:
        raise FileError(f"{file.name} is damaged, or no safetensors file ({shown(str(error))})") from error
    return manifest, tensors


def _manifest(name: str, metadata: Mapping[str, str]) -> Manifest:
    checksum, _, text = metadata.get("inro_fx", "").partition(" ")
    if not text:
        raise FileError(f"{name} was not written by inro_fx.save: it holds tensors, but not how they are quantized")
    if f"{zlib.crc32(text.encode('utf-8', 'replace')):08x}" != checksum:
        raise FileError(f"{name} is damaged: the checksum of its manifest does not match")
    from . import __version__
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{name}: its manifest is no JSON ({shown(str(error))})") from error
    return checked(data, name, __version__)


def _checked(file: str, name: str, tensor: Tensor, entry: Entry) -> Tensor:
    if entry.dtype == "complex128" and tensor.dtype == torch.float64 and tensor.shape[-1:] == (2,):
        whole = torch.view_as_complex(tensor)
    else:
        whole = tensor
    if dtype_name(whole.dtype) != entry.dtype or list(whole.shape) != entry.shape or crc32_of(tensor) != entry.crc32:
        raise FileError(f"{file} is damaged: the checksum of {shown(name)} does not match")
    return whole


# ---- building ----

def _rebuild(model: nn.Module, manifest: Manifest, tensors: Mapping[str, Tensor], given: Sequence[Scheme], passes: Sequence[Pass],
             file: str, strict: bool) -> nn.Module:
    found = differences(model, manifest.fingerprint)
    if found and strict:
        raise FileError(f"{file} was saved from another model: {_listed(found)}")
    root = clone(model)
    schemes = [_scheme(d, given, file) for d in manifest.schemes]
    _check_architecture(root, manifest, file)
    packed = [_packed(root, weight, manifest, tensors, schemes, file) for weight in manifest.weights]
    made = {_full(w["holder"], b) for w in manifest.weights for b in w["stored"]}
    for weight in manifest.weights:
        owner = root.get_submodule(weight["module"])
        owner._parameters.pop(weight["name"], None)
        owner._buffers.pop(weight["name"], None)
    for name, entry in manifest.tensors.items():
        _place(root, tensors[name], Entry(**entry), made)
    for weight, form in zip(manifest.weights, packed, strict=True):
        attach_packed(root.get_submodule(weight["module"]), weight["name"], form, root.get_submodule(weight["holder"]),
                      tuple(weight["stored"]))
    _refuse_meta(root, file)
    make_independent(root)
    for path, module in root.named_modules():
        if path in manifest.records and path:
            finish(module, record_of(manifest.records[path]))
    attach_program(root, None, manifest.strict, Again(passes, eager=True))
    finish(root, record_of(manifest.records[""]) if "" in manifest.records else None)
    rewatch(root)
    if found:
        warnings.warn(f"{file} was saved from another model, and yours is respected: {_listed(found)}", stacklevel=3)
    return root


def _scheme(description: Mapping[str, Any], given: Sequence[Scheme], file: str) -> Scheme:
    try:
        return read_scheme(description, given)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        if isinstance(error, SchemeError) and "schemes=" in str(error):
            raise
        raise FileError(f"{file}: its manifest makes no sense: {shown(str(error))}") from error


def _full(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _listed(found: Sequence[str]) -> str:
    return "; ".join(found[:NAMED]) + (f" (and {len(found) - NAMED} more)" if len(found) > NAMED else "")


def _check_architecture(root: nn.Module, manifest: Manifest, file: str) -> None:
    """Refuses a model whose weights have other names or shapes than the file's."""
    entries = manifest.tensors.values()
    wanted = {n: e["shape"] for e in entries if e["kind"] in ("parameter", "frozen", "buffer") for n in e["names"]}
    for weight in manifest.weights:
        for buffer in weight["stored"]:
            wanted.pop(_full(weight["holder"], buffer), None)
    for weight in manifest.weights:
        wanted[_full(weight["module"], weight["name"])] = weight["shape"]
    here = {_full(path, name): list(tensor.shape) for path, module in root.named_modules(remove_duplicate=False)
            for kind, name, tensor in own_tensors(module) if kind in ("parameter", "frozen", "buffer")}
    found = [f"the model lacks {shown(n)} {shape}" for n, shape in wanted.items() if n not in here]
    found += [f"the file lacks {n} {shape}" for n, shape in here.items() if n not in wanted]
    found += [f"{n} is {shown(shape)} in the file and {here[n]} in the model" for n, shape in wanted.items()
              if n in here and here[n] != shape]
    if found:
        raise FileError(f"{file} holds a {shown(manifest.model)} that does not fit this {type(root).__name__}: {_listed(found)}")
    paths = {path for path, _ in root.named_modules(remove_duplicate=False)}
    for weight in manifest.weights:
        for path in (weight["module"], weight["holder"], *manifest.records):
            if path not in paths:
                raise FileError(f"{file} holds a {shown(manifest.model)} that does not fit this {type(root).__name__}: the model lacks "
                                f"the module {shown(path)}")


def _packed(root: nn.Module, weight: Mapping[str, Any], manifest: Manifest, tensors: Mapping[str, Tensor], schemes: Sequence[Scheme],
            file: str) -> Packed:
    """How a weight is held, if its layout and parts are what its scheme would have made of it."""
    def fail(reason: str) -> FileError:
        return FileError(f"{file}: its manifest makes no sense: {shown(_full(weight['module'], weight['name']))} {reason}")

    if weight["scheme"] >= len(schemes):
        raise fail(f"is of scheme {shown(weight['scheme'])}, of {len(schemes)}")
    shape, view, channels, reduced = (tuple(weight[k]) for k in ("shape", "view", "channels", "reduced"))
    split = len(shape) > 1 and len(view) == len(shape) + 1 and view[0] > 0 and view[0] * view[1] == shape[0] and view[2:] == shape[1:]
    if not (view == shape or (split and channels == (0, 2))) or list(channels) != sorted(set(channels)) \
            or not channels or not reduced or sorted((*channels, *reduced)) != list(range(len(view))):
        raise fail(f"has a layout that is none: {shown(weight['view'])}, {shown(weight['channels'])}")
    layout, scheme, dtype = Layout(shape, view, channels, reduced), schemes[weight["scheme"]], DTYPES[weight["dtype"]]
    if not dtype.is_floating_point or dtype.itemsize < 2 or not layout.columns:
        raise fail(f"is {shown(weight['dtype'])} {shown(list(shape))}")
    if len(weight["buffers"]) != len(scheme.parts) or len(weight["stored"]) != len(scheme.parts):
        raise fail(f"has {len(weight['stored'])} parts, and its scheme {scheme.name} has {len(scheme.parts)}")
    expected = scheme.pack(torch.zeros(2, layout.columns, dtype=dtype, device="cpu"))
    for part, buffer, stored in zip(scheme.parts, weight["buffers"], weight["stored"], strict=True):
        if not _is_part(buffer, weight["name"], part) or not re.fullmatch(f"(?s).+_{part}(_[0-9]+)?", stored):
            raise fail(f"keeps {part} as {shown(buffer)}")
        full = _full(weight["holder"], stored)
        entry = next((e for e in manifest.tensors.values() if full in e["names"]), None)
        if entry is None or entry["kind"] != "buffer":
            raise fail(f"lacks its {part}, {shown(full)}")
        holder = root.get_submodule(weight["holder"])
        if stored in (*holder._parameters, *holder._modules, *holder.__dict__) or hasattr(type(holder), stored):
            raise fail(f"keeps {part} where {shown(full)} is something else")
        held, like = tensors[entry["names"][0]], expected[part]
        rows = 1 if like.shape[0] == 1 else layout.rows
        if held.dtype != like.dtype or held.shape != (rows, *like.shape[1:]):
            raise fail(f"has {part} {dtype_name(held.dtype)} {shown(list(held.shape))}, where {scheme.name} has "
                       f"{dtype_name(like.dtype)} {[rows, *like.shape[1:]]}")
    return Packed(scheme, tuple(weight["buffers"]), layout, dtype)


def _is_part(buffer: str, name: str, part: str) -> bool:
    """Is this what the part of a weight is called, or that with a number where the model had the name itself?"""
    return buffer.startswith(f"{name}_{part}") and re.fullmatch("(_[0-9]+)?", buffer[len(name) + len(part) + 1:]) is not None


def _place(root: nn.Module, tensor: Tensor, entry: Entry, made: set[str]) -> None:
    """Puts a tensor of the file where it belongs, under all of its names."""
    floats = tensor.is_floating_point() or tensor.is_complex()
    value: Tensor = nn.Parameter(tensor, entry.kind == "parameter" and floats) if entry.kind in ("parameter", "frozen") else tensor
    for full in entry.names:
        path, _, name = full.rpartition(".")
        module = root.get_submodule(path)
        if entry.kind in ("parameter", "frozen"):
            if name not in module._parameters:
                raise KeyError(full)
            module._parameters[name] = value
        elif entry.kind == "attribute":
            if not isinstance(vars(module).get(name), Tensor):
                raise KeyError(full)
            module.__dict__[name] = value
        elif name in module._buffers:
            module._buffers[name] = value
        elif full in made:
            module.register_buffer(name, value, persistent=entry.kind == "buffer")
        else:
            raise KeyError(full)


def _refuse_meta(root: nn.Module, file: str) -> None:
    """Refuses what a skeleton has on the meta device and the file does not hold."""
    for path, module in root.named_modules():
        held = [(n, t) for _, n, t in own_tensors(module)]
        for name, value in vars(module).items():
            if type(value) in (list, tuple, dict) and not name.startswith("_"):
                held += [(name, t) for t in (value.values() if isinstance(value, dict) else value) if isinstance(t, Tensor)]
        for name, tensor in held:
            if tensor.device.type == "meta":
                raise FileError(f"{path}.{name} is on the meta device and not in {file}: give load a real model or a function "
                                f"that makes one".lstrip("."))


def _device_of(model: nn.Module) -> torch.device | None:
    devices = {t.device for module in model.modules() for _, _, t in own_tensors(module)}
    return devices.pop() if len(devices) == 1 and next(iter(devices)).type not in ("cpu", "meta") else None
