"""save: a quantized model as one safetensors file of numbers; `load` puts them into an architecture again.

The file holds every tensor once, under the first of its names in ``state_dict``, and in its metadata under ``inro_fx`` the manifest
behind its CRC-32: ``1a2b3c4d {...}`` (see `manifest`). Nothing of a program is in it: graphs are captured again from the code that
`load` is given. Saving the same model twice gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from .atomic import replacing
from .errors import FileError, ModelError
from .manifest import FORMAT_VERSION, Entry, Manifest, fingerprint_of
from .passes.constants import adopted_by
from .passes.run.classes import user_class
from .passes.run.forward import GraphForward
from .passes.run.weights import PackedWeights
from .passes.scheme import Scheme
from .report import Record
from .schemes import describe_scheme

__all__ = ["own_tensors", "save"]


def save(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Writes a quantized model, or a model with quantized parts, to a safetensors file; returns its path.

    The file is written whole or not at all. It holds the tensors that ``state_dict`` holds, tied ones once, and also the buffers that
    are not persistent, so that `load` needs nothing but the architecture.

    Raises `ModelError` for a model that `quantize_graph` did not make, that keeps state which is no plain tensor, that was equalized,
    or whose graph was edited by hand; `FileError` where the file cannot be written.

    >>> import tempfile, torch, inro_fx
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    >>> small = inro_fx.quantize_graph(model, torch.randn(8, 64))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = inro_fx.save(small, folder + "/small.safetensors")
    ...     with torch.device("meta"):
    ...         skeleton = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    ...     again = inro_fx.load(file, skeleton)
    >>> x = torch.randn(3, 64)
    >>> torch.equal(again(x), small(x))
    True
    """
    file = Path(path)
    if not isinstance(model, nn.Module) or not any(isinstance(m, PackedWeights) or "_inro" in vars(m) for m in model.modules()):
        raise ModelError(f"this {type(model).__name__} was not made by inro_fx.quantize_graph: save the result of that")
    _refuse_edited_graphs(model)
    equalized = next((p for p, m in model.named_modules() if "_inro" in vars(m) and vars(m)["_inro"].equalized), None)
    if equalized is not None:
        raise ModelError(f"{equalized or 'the model'} was equalized, so that its weights are right for the captured graph alone, and a "
                         f"file holds no graphs: save the result of quantize_graph with equalize=None")
    found = _tensors_of(model)
    tensors, entries = {}, {}
    seen: set[int] = set()
    for name, (kind, names, tensor) in found.items():
        stored = _storable(name, tensor, seen)
        tensors[name] = stored
        entries[name] = Entry(kind, names, dtype_name(tensor.dtype), list(tensor.shape), crc32_of(stored))
    schemes: list[Scheme] = []
    root: Any = model
    manifest = Manifest(
        format_version=FORMAT_VERSION, inro_fx=_version(), torch=str(torch.__version__),
        model=f"{user_class(model).__module__}.{user_class(model).__qualname__}", weights=_weights_of(model, schemes),
        schemes=[describe_scheme(s) for s in schemes], tensors={n: dataclasses.asdict(e) for n, e in entries.items()},
        fingerprint=fingerprint_of(model), strict=isinstance(model, GraphForward) and bool(root._inro_strict),
        records={p: _record_data(vars(m)["_inro"]) for p, m in model.named_modules() if "_inro" in vars(m)})
    text = json.dumps(dataclasses.asdict(manifest), separators=(",", ":"))
    try:
        with replacing(file) as temporary:
            save_file(tensors, temporary, {"inro_fx": f"{zlib.crc32(text.encode()):08x} {text}"})
    except (SafetensorError, OSError) as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | PermissionError):
            raise
        raise FileError(f"{file.name} cannot be written ({error}); nothing was changed") from error
    return file


def _refuse_edited_graphs(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for runner in module._inro_runners if isinstance(module, GraphForward) else ():
            if runner.edited():
                raise ModelError(f"the graph of {path or 'the model'} was edited, and a file holds no graphs: give the change as a pass, "
                                 f"quantize_graph(..., passes=[...]), and to load as well")


def _tensors_of(model: nn.Module) -> dict[str, tuple[str, list[str], Tensor]]:
    """Every tensor that the model holds, by its first name: (kind, all names, tensor)."""
    found: dict[int, tuple[str, list[str], Tensor]] = {}
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ModelError(f"{path or 'the model'} keeps extra state that is no tensor (get_extra_state), which a file "
                             f"without pickle cannot hold: save its state_dict with torch.save")
        for kind, name, tensor in own_tensors(module):
            full = f"{path}.{name}" if path else name
            found.setdefault(id(tensor), (kind, [], tensor))[1].append(full)
    return {entry[1][0]: entry for entry in found.values()}


def own_tensors(module: nn.Module) -> list[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of what one module holds itself; what a capture found outside of the model, the next one finds again."""
    own: list[tuple[str, str, Tensor]]
    own = [("parameter" if t.requires_grad else "frozen", n, t) for n, t in module._parameters.items() if t is not None]
    own += [("non_persistent" if n in module._non_persistent_buffers_set else "buffer", n, t)
            for n, t in module._buffers.items() if t is not None and n not in adopted_by(module)]
    return own + [("attribute", n, t) for n, t in vars(module).items() if isinstance(t, Tensor)]


def _storable(name: str, tensor: Tensor, seen: set[int]) -> Tensor:
    """The tensor on the CPU, alone in its memory, as the file format wants it."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise ModelError(f"{name} is {str(tensor.layout).removeprefix('torch.')}, which a safetensors file cannot hold")
    if tensor.device.type == "meta":
        raise ModelError(f"{name} is on the meta device and has no data")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    plain = torch.view_as_real(plain) if plain.dtype == torch.complex128 else plain         # the format has no complex128
    storage = plain.untyped_storage()
    if storage.nbytes() != plain.numel() * plain.element_size() or (plain.numel() and storage.data_ptr() in seen):
        plain = plain.clone()
    seen.add(plain.untyped_storage().data_ptr())
    return plain


def crc32_of(tensor: Tensor) -> int:
    """The checksum of a contiguous tensor on the CPU."""
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else 0


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")


def _weights_of(model: nn.Module, schemes: list[Scheme]) -> list[dict[str, Any]]:
    """One entry for each name under which a quantized weight is read; the schemes are collected in ``schemes``."""
    paths = {id(module): path for path, module in model.named_modules()}
    numbers: dict[Any, int] = {}
    found = []
    for path, module in model.named_modules():
        for name, packed in vars(module).get("_inro_packed", {}).items():
            if module._parameters.get(name) is not None:
                continue                                        # a float weight was put in its place
            links = [vars(module)["_inro_links"].get(buffer, (module, buffer)) for buffer in packed.buffers]
            if id(links[0][0]) not in paths:
                raise ModelError(f"{path}.{name} is tied to a weight of a module that is not in this model: save the whole model")
            number = numbers.setdefault(_key(packed.scheme), len(schemes))
            schemes += [packed.scheme] if number == len(schemes) else []
            found.append(dict(module=path, name=name, buffers=list(packed.buffers), holder=paths[id(links[0][0])],
                              stored=[there for _, there in links], scheme=number, shape=list(packed.layout.shape),
                              view=list(packed.layout.view), channels=list(packed.layout.channels),
                              reduced=list(packed.layout.reduced), dtype=dtype_name(packed.dtype)))
    return found


def _key(scheme: Scheme) -> Any:
    """Equal for equal schemes, where those can tell (a static scheme differs from layer to layer)."""
    return scheme if getattr(type(scheme), "__hash__", None) is not None else id(scheme)


def _record_data(record: Record) -> dict[str, Any]:
    return {**dataclasses.asdict(record), "errors": [[*key, error] for key, error in record.errors.items()]}


def _version() -> str:
    from . import __version__
    return __version__
