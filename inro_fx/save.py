"""save and load: a quantized model as one safetensors file, rebuilt bit for bit from the architecture alone.

The file holds every tensor once, under the first of its names in ``state_dict``, and in its metadata under ``inro_fx``
the manifest behind its CRC-32: ``1a2b3c4d {...}``. The manifest is JSON: format version, the scheme, layout and buffers of
each weight, for each tensor its kind, names, shape, dtype and CRC-32, the captured graphs and the report (compressed).
Saving the same model twice gives the same bytes.

Nothing in the file is run or unpickled. Everything is read and checked before a model is touched.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .atomic import replacing
from .checks import check_model
from .errors import FileError, InroError, ModelError
from .passes.module import GraphForward, Packed, PackedWeights, attach_graph, attach_packed, finish, user_class
from .passes.scheme import Layout, Scheme
from .passes.state import clone
from .passes.stored import Codec, NotStored
from .passes.verify import verify
from .progress import progress_bar
from .report import Record, Row, Skipped
from .schemes import describe_scheme, read_scheme

__all__ = ["load", "save"]

FORMAT_VERSION = 1
NEW_BUFFER = re.compile(r"_constant_\d+")          # what a graph may add to a module; else a file names what is there
MOST_TEXT = 1 << 30            # of the graphs and the report when unpacked: more is no honest file
NAMED = 5                      # differences that a message names


@dataclasses.dataclass
class Entry:
    """One tensor of a file: ``kind`` says what it is on its module, ``names`` are all its names, the first is the file's."""

    kind: str                  # parameter, frozen (a parameter without gradient), buffer, non_persistent, attribute
    names: list[str]
    dtype: str
    shape: list[int]
    crc32: int


# ---- saving ----

def save(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Writes a quantized model, or a model with quantized parts, to a safetensors file; returns its path.

    The file is written whole or not at all. It holds the tensors that ``state_dict`` holds, tied ones once, and also the
    buffers that are not persistent, so that `load` needs nothing but the architecture.

    Raises `ModelError` for a model that `quantize_graph` did not make, or that keeps state which is no plain tensor.

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
    found = _tensors_of(model)
    tensors, entries = {}, {}
    seen: set[int] = set()
    for name, (kind, names, tensor) in found.items():
        stored = _storable(name, tensor, seen)
        tensors[name] = stored
        entries[name] = Entry(kind, names, _dtype_name(tensor.dtype), list(tensor.shape), _crc32(stored))
    schemes: list[Scheme] = []
    manifest = dict(
        format_version=FORMAT_VERSION, inro_fx=_version(), torch=str(torch.__version__),
        model=f"{user_class(model).__module__}.{user_class(model).__qualname__}", weights=_weights_of(model, schemes),
        schemes=[describe_scheme(s) for s in schemes], tensors={n: dataclasses.astuple(e) for n, e in entries.items()},
        graphs=_packed_text(_graphs_of(model, schemes)))
    text = json.dumps(manifest, separators=(",", ":"))
    with replacing(file) as temporary:
        save_file(tensors, temporary, {"inro_fx": f"{zlib.crc32(text.encode()):08x} {text}"})
    return file


def _tensors_of(model: nn.Module) -> dict[str, tuple[str, list[str], Tensor]]:
    """Every tensor that the model holds, by its first name: (kind, all names, tensor)."""
    found: dict[int, tuple[str, list[str], Tensor]] = {}
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ModelError(f"{path or 'the model'} keeps extra state that is no tensor (get_extra_state), which a file "
                             f"without pickle cannot hold: save its state_dict with torch.save")
        for kind, name, tensor in _own_tensors(module):
            full = f"{path}.{name}" if path else name
            found.setdefault(id(tensor), (kind, [], tensor))[1].append(full)
    return {entry[1][0]: entry for entry in found.values()}


def _own_tensors(module: nn.Module) -> list[tuple[str, str, Tensor]]:
    """(kind, name, tensor) of what one module holds itself."""
    own: list[tuple[str, str, Tensor]]
    own = [("parameter" if t.requires_grad else "frozen", n, t) for n, t in module._parameters.items() if t is not None]
    own += [("non_persistent" if n in module._non_persistent_buffers_set else "buffer", n, t)
            for n, t in module._buffers.items() if t is not None]
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


def _crc32(tensor: Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else 0


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _weights_of(model: nn.Module, schemes: list[Scheme]) -> list[dict[str, Any]]:
    """One entry for each name under which a quantized weight is read; the schemes are collected in ``schemes``."""
    paths = {id(module): path for path, module in model.named_modules()}
    numbers: dict[Any, int] = {}
    found = []
    for path, module in model.named_modules():
        for name, packed in vars(module).get("_inro_packed", {}).items():
            links = [module._inro_links.get(buffer, (module, buffer)) for buffer in packed.buffers]
            if id(links[0][0]) not in paths:
                raise ModelError(f"{path}.{name} is tied to a weight of a module that is not in this model: save the whole model")
            number = numbers.setdefault(_key(packed.scheme), len(schemes))
            schemes += [packed.scheme] if number == len(schemes) else []
            found.append(dict(module=path, name=name, buffers=packed.buffers, holder=paths[id(links[0][0])],
                              stored=[there for _, there in links], scheme=number,
                              layout=dataclasses.astuple(packed.layout), dtype=_dtype_name(packed.dtype)))
    return found


def _key(scheme: Scheme) -> Any:
    """Equal for equal schemes, where those can tell (a static scheme differs from layer to layer)."""
    return scheme if getattr(type(scheme), "__hash__", None) is not None else id(scheme)


def _graphs_of(model: nn.Module, schemes: Sequence[Scheme]) -> dict[str, Any]:
    codec = Codec(model.modules(), schemes)
    graphs: dict[str, Any] = {}
    unstored: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, GraphForward):
            try:
                capture = codec.encode_capture(module._inro_capture)
            except NotStored as reason:
                unstored[path] = str(reason)
                continue
            graphs[path] = dict(capture=capture, strict=module._inro_strict, changed=module._inro_changed,
                                dtypes=[_dtype_name(d) for d in module._inro_float_dtypes])
    records = {path: _record_data(vars(module)["_inro"]) for path, module in model.named_modules() if "_inro" in vars(module)}
    return dict(graphs=graphs, unstored=unstored, records=records)


def _record_data(record: Record) -> dict[str, Any]:
    return {**dataclasses.asdict(record), "errors": [[*key, error] for key, error in record.errors.items()]}


def _packed_text(value: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 9)).decode()


def _version() -> str:
    from . import __version__
    return __version__


# ---- loading ----

def load(path: str | os.PathLike[str], model: nn.Module | Callable[[], nn.Module], *,
         schemes: Sequence[Scheme] = ()) -> nn.Module:
    """The quantized model in a file that `save` wrote, bit for bit.

    It lies on the device of ``model``; on the CPU where that is the meta device, or where ``model`` is on several.

    Parameters
    ----------
    path
        The file.
    model
        The architecture: a float model (which stays as it is, whatever its weights), one on the meta device, or a function
        that returns either.
    schemes
        The schemes of your own that the model was quantized with.

    Raises
    ------
    FileError
        If the file is damaged, was not written by `save` or by a newer version, or holds another architecture.
    SchemeError
        If the file needs a scheme that is neither in ``inro_fx.SCHEMES`` nor in ``schemes``.
    FileNotFoundError
        If there is no file.
    """
    file = Path(path)
    manifest, entries, tensors = _read(file)
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
            root = _rebuild(model, manifest, entries, tensors, schemes, file.name)
        except (InroError, MemoryError):
            raise
        except Exception as error:                     # the manifest is whole, but says what no save would have written
            raise FileError(f"{file.name}: its manifest makes no sense ({type(error).__name__}: {error})") from error
        return root if device is None else root.to(device)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Entry], dict[str, Tensor]]:
    """The manifest and all tensors of a file, every one checked."""
    try:
        with safe_open(file, "pt") as stored:
            manifest = _manifest(file.name, stored.metadata() or {})
            entries = {name: Entry(*fields) for name, fields in manifest["tensors"].items()}
            if set(stored.keys()) != set(entries):
                raise FileError(f"{file.name} is damaged: its tensors are not those of its manifest")
            tensors = {}
            with progress_bar(len(entries), f"loading {file.name}") as tick:
                for name, entry in entries.items():
                    tensors[name] = _checked(file.name, name, stored.get_tensor(name), entry)
                    tick()
    except SafetensorError as error:
        raise FileError(f"{file.name} is damaged, or no safetensors file ({error})") from error
    except (InroError, OSError, MemoryError):
        raise
    except Exception as error:
        raise FileError(f"{file.name}: its manifest makes no sense ({type(error).__name__}: {error})") from error
    return manifest, entries, tensors


def _manifest(name: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    checksum, _, text = metadata.get("inro_fx", "").partition(" ")
    if not text:
        raise FileError(f"{name} was not written by inro_fx.save: it holds tensors, but not how they are quantized")
    if f"{zlib.crc32(text.encode()):08x}" != checksum:
        raise FileError(f"{name} is damaged: the checksum of its manifest does not match")
    manifest = json.loads(text)
    version = manifest["format_version"]
    if version != FORMAT_VERSION:
        raise FileError(f"{name} has format {version} (inro_fx {manifest.get('inro_fx')}), and this inro_fx {_version()} reads "
                        f"format {FORMAT_VERSION}: install a newer inro_fx")
    return manifest


def _checked(file: str, name: str, tensor: Tensor, entry: Entry) -> Tensor:
    whole = torch.view_as_complex(tensor) if entry.dtype == "complex128" and tensor.dtype == torch.float64 else tensor
    if _dtype_name(whole.dtype) != entry.dtype or list(whole.shape) != entry.shape or _crc32(tensor) != entry.crc32:
        raise FileError(f"{file} is damaged: the checksum of {name} does not match")
    return whole


def _rebuild(model: nn.Module, manifest: Mapping[str, Any], entries: Mapping[str, Entry], tensors: Mapping[str, Tensor],
             given: Sequence[Scheme], file: str) -> nn.Module:
    root = clone(model)
    schemes = [read_scheme(d, given) for d in manifest["schemes"]]
    _check_architecture(root, manifest, entries, file)
    made = {f"{w['holder']}.{b}".lstrip(".") for w in manifest["weights"] for b in w["stored"]
            if any(b.startswith(own + "_") and re.fullmatch(r"\w+", b[len(own):]) for own in _names_on(root, w["holder"]))}
    for weight in manifest["weights"]:
        owner = root.get_submodule(weight["module"])
        owner._parameters.pop(weight["name"], None)
        owner._buffers.pop(weight["name"], None)
    for name, entry in entries.items():
        _place(root, tensors[name], entry, made)
    for weight in manifest["weights"]:
        shape, view, channels = (tuple(int(n) for n in part) for part in weight["layout"])
        packed = Packed(schemes[weight["scheme"]], tuple(weight["buffers"]), Layout(shape, view, channels),
                        _dtype(weight["dtype"]))
        attach_packed(root.get_submodule(weight["module"]), weight["name"], packed,
                      root.get_submodule(weight["holder"]), tuple(weight["stored"]))
    content = json.loads(_unpacked_text(manifest["graphs"]))
    unstored = dict(content["unstored"])
    codec = Codec(root.modules(), schemes)
    for path, data in content["graphs"].items():
        module = root.get_submodule(path)
        try:
            capture = codec.decode_capture(data["capture"], module)
        except NotStored as reason:
            unstored[path] = str(reason)
            continue
        verify(capture.graph, module, {}, after="load")
        attach_graph(module, capture, bool(data["strict"]))
        first, now = map(_dtype, data["dtypes"])
        module.__dict__.update(_inro_float_dtypes=(first, now), _inro_changed=data["changed"])
    for path, data in content["records"].items():
        root.get_submodule(path).__dict__["_inro"] = _record(data, path, unstored)
    _refuse_meta(root, file)
    finish(root)
    return root


def _unpacked_text(text: str) -> bytes:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), MOST_TEXT)
    if not unpacker.eof:
        raise ValueError("the compressed part does not end")
    return data


def _check_architecture(root: nn.Module, manifest: Mapping[str, Any], entries: Mapping[str, Entry], file: str) -> None:
    """Refuses a model whose weights have other names or shapes than the file's."""
    wanted = {n: e.shape for e in entries.values() if e.kind in ("parameter", "frozen", "buffer") for n in e.names}
    for weight in manifest["weights"]:
        prefix = f"{weight['holder']}." if weight["holder"] else ""
        for buffer in weight["stored"]:
            wanted.pop(prefix + buffer, None)
    for weight in manifest["weights"]:
        wanted[f"{weight['module']}.{weight['name']}" if weight["module"] else weight["name"]] = list(weight["layout"][0])
    here = {f"{path}.{name}" if path else name: list(tensor.shape) for path, module in root.named_modules()
            for kind, name, tensor in _own_tensors(module) if kind in ("parameter", "frozen", "buffer")}
    found = [f"the model lacks {n} {shape}" for n, shape in wanted.items() if n not in here]
    found += [f"the file lacks {n} {shape}" for n, shape in here.items() if n not in wanted]
    found += [f"{n} is {shape} in the file and {here[n]} in the model" for n, shape in wanted.items()
              if n in here and here[n] != shape]
    if found:
        more = f" (and {len(found) - NAMED} more)" if len(found) > NAMED else ""
        raise FileError(f"{file} holds a {manifest['model']} that does not fit this {type(root).__name__}: "
                        f"{'; '.join(found[:NAMED])}{more}")


def _names_on(root: nn.Module, path: str) -> list[str]:
    module = root.get_submodule(path)
    return [*module._parameters, *module._buffers]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found


def _place(root: nn.Module, tensor: Tensor, entry: Entry, made: set[str]) -> None:
    """Puts a tensor of the file where it belongs, under all of its names."""
    value = nn.Parameter(tensor, entry.kind == "parameter") if entry.kind in ("parameter", "frozen") else tensor
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
        elif full in made or NEW_BUFFER.fullmatch(name):
            module.register_buffer(name, value, persistent=entry.kind == "buffer")
        else:
            raise KeyError(full)


def _record(data: dict[str, Any], path: str, unstored: Mapping[str, str]) -> Record:
    prefix = path + "." if path else ""
    lost = [(p[len(prefix):], f"its graph is not in the file: {reason}") for p, reason in unstored.items()
            if (p + ".").startswith(prefix)]
    record = Record(**{**data, "rows": [Row(**{**row, "shape": tuple(row["shape"])}) for row in data["rows"]],
                       "skipped": [Skipped(**{**skip, "shape": tuple(skip["shape"])}) for skip in data["skipped"]],
                       "steps": [tuple(s) for s in data["steps"]], "regions": [tuple(r) for r in data["regions"]] + lost,
                       "errors": {(capture, node): error for capture, node, error in data["errors"]}})
    if path in unstored:
        record.nodes = 0
        record.steps.append(("load", "the model's own code runs, over layers with graphs of their own"))
    return record


def _refuse_meta(root: nn.Module, file: str) -> None:
    """Refuses what a skeleton has on the meta device and the file does not hold."""
    for path, module in root.named_modules():
        held = [(n, t) for _, n, t in _own_tensors(module)]
        for name, value in vars(module).items():
            if type(value) in (list, tuple, dict) and not name.startswith("_"):
                held += [(name, t) for t in (value.values() if isinstance(value, dict) else value) if isinstance(t, Tensor)]
        for name, tensor in held:
            if tensor.device.type == "meta":
                raise FileError(f"{path}.{name} is on the meta device and not in {file}: give load a real model or a function "
                                f"that makes one".lstrip("."))


def _device_of(model: nn.Module) -> torch.device | None:
    devices = {t.device for module in model.modules() for _, _, t in _own_tensors(module)}
    return devices.pop() if len(devices) == 1 and next(iter(devices)).type not in ("cpu", "meta") else None
