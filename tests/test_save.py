"""save and load: the same model from the architecture alone; damaged, foreign, newer and hostile files."""

import collections
import contextlib
import copy
import dataclasses
import enum
import json
import subprocess
import sys
import typing
import zlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import MODELS, Tied, example, first
from safetensors import safe_open
from safetensors.torch import save_file
from test_capture import net
from torch import nn

import inro_fx

files = sys.modules["inro_fx.save"]                                # the module: inro_fx.save is the function


def on_meta(model):
    return copy.deepcopy(model).to("meta")


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_model_from_a_skeleton_a_model_or_a_function(name, scheme, tmp_path):
    model, inputs = MODELS[name]()
    args, kwargs = example(inputs)
    model.eval()
    small = inro_fx.quantize_graph(model, inputs, scheme)
    file = inro_fx.save(small, tmp_path / "m.safetensors")
    before = copy.deepcopy(model.state_dict())
    for architecture in (on_meta(model), model, lambda: MODELS[name]()[0]):
        again = inro_fx.load(file, architecture)
        assert torch.equal(first(again(*args, **kwargs)), first(small(*args, **kwargs)))
        assert str(inro_fx.report(again)) == str(inro_fx.report(small))
        assert again.state_dict().keys() == small.state_dict().keys()
        assert type(again).__mro__[1:] == type(small).__mro__[1:]              # the first is each one's own
        assert inro_fx.to_networkx(again).nodes(data=True) == inro_fx.to_networkx(small).nodes(data=True)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    for module in (again, small):
        if hasattr(module, "_inro_runners"):
            assert module.code.replace(" ", "") == small.code.replace(" ", "")


def test_a_loaded_model_lives_like_the_first(tmp_path):
    model = Tied()
    ids = torch.randint(0, 40, (2, 5))
    small = inro_fx.quantize_graph(model, ids)
    again = inro_fx.load(inro_fx.save(small, tmp_path / "a.safetensors"), on_meta(model))
    third = inro_fx.load(inro_fx.save(copy.deepcopy(again), tmp_path / "b.safetensors"), model)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    third.table.weight_codes.zero_()
    assert third.head.weight.abs().max() == 0                     # still one table
    assert again.half()(ids).dtype == torch.float16
    half = inro_fx.load(inro_fx.save(again, tmp_path / "c.safetensors"), on_meta(model))
    assert torch.equal(half(ids), again(ids))
    assert half.middle.weight_scale.dtype == torch.float32
    with pytest.raises(inro_fx.StateError, match=r"table.weight in this state_dict is a float weight"):
        half.load_state_dict(model.state_dict())


class Kind(enum.Enum):
    SUM, MEAN = 1, 2


@dataclasses.dataclass
class Answer:
    value: torch.Tensor
    note: str
    extra: list


class Pair(typing.NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Everything(nn.Module):
    """Arguments, outputs, state and names of every kind."""

    def __init__(self):
        super().__init__()
        self.fc, self.rest = nn.Linear(8, 8), nn.ModuleDict({"class": nn.Linear(8, 8), "größe": nn.Linear(8, 8), "a b": nn.Linear(8, 8)})
        self.register_buffer("position", torch.arange(8.0), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("spectrum", torch.randn(2, dtype=torch.complex128))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.plain, self.single = torch.randn(8), nn.Parameter(torch.randn(()))

    def forward(self, x, kind=Kind.SUM, *, pairs=(), mask=None, act=torch.relu):
        y = act(self.fc(x)) + self.position + self.plain + self.frozen * self.single
        y = (y * 3)[..., None, :].squeeze(-2) + self.spectrum.real.sum().float() * self.count
        for child in self.rest.values():
            y = child(y)
        y = y.sum(-1) if kind is Kind.SUM else y.to(torch.float64).mean(-1)
        extra = collections.OrderedDict(size=torch.Size((1, 2)), pair=Pair(y, y + float("inf")), made=torch.ones(x.shape[0], 2, device=x.device))
        return Answer(y, "fine", [extra, {"n": None, 3: y * 2}, slice(1, None), frozenset({"a"}), b"raw", 2j, torch.float16, *pairs])


def test_arguments_outputs_state_and_names_of_every_kind(tmp_path):
    model = Everything().eval()
    call = dict(x=torch.randn(2, 8), kind=Kind.MEAN, pairs=[torch.randn(2), (torch.randn(3), 5)])
    small = inro_fx.quantize_graph(model, call, strict=True)
    file = inro_fx.save(small, tmp_path / "m.safetensors")
    again = inro_fx.load(file, on_meta(model))
    a, b = small(**call), again(**call)
    assert (type(b), b.note, b.extra[4:8], type(b.extra[0])) == (Answer, "fine", a.extra[4:8], collections.OrderedDict)
    assert torch.equal(a.value, b.value)
    assert torch.equal(a.extra[0]["pair"].left, b.extra[0]["pair"].left)
    assert torch.equal(a.extra[1][3], b.extra[1][3])
    assert not again.frozen.requires_grad and again.single.requires_grad
    assert again._non_persistent_buffers_set == small._non_persistent_buffers_set
    with pytest.raises(inro_fx.GraphNotTaken):
        again(torch.randn(2, 8))


class Halves:
    """Somebody's own scheme, with an operator of its own."""

    name, parts = "halves", ("codes",)

    def pack(self, matrix):
        return {"codes": (matrix * 2).round().clamp(-127, 127).to(torch.int8)}

    def unpack(self, parts, columns, dtype):
        return parts["codes"].to(dtype) / 2

    def bound(self, matrix):
        return torch.tensor(0.25)

    def operator(self, op):
        return (halves_linear, ()) if op == "linear" else "no operator"


def halves_linear(x, codes, bias, columns):
    return nn.functional.linear(x, codes.to(x.dtype) / 2, bias)


def test_a_scheme_of_ones_own_is_given_to_load(tmp_path):
    model, x = MODELS["mlp"]()
    small = inro_fx.quantize_graph(model, x, Halves(), overrides={"2": inro_fx.uniform(100, 4)})
    file = inro_fx.save(small, tmp_path / "m.safetensors")
    with pytest.raises(inro_fx.SchemeError, match="needs the scheme 'halves'"):
        inro_fx.load(file, model)
    again = inro_fx.load(file, model, schemes=[Halves()])
    assert torch.equal(again(x), small(x))
    assert inro_fx.report(again).nodes
    assert "halves_linear" in again.code


def test_a_model_with_quantized_parts(tmp_path):
    body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
    x = torch.randn(3, 16)
    model = nn.Sequential(inro_fx.quantize_graph(body, x), nn.Linear(32, 4))
    again = inro_fx.load(inro_fx.save(model, tmp_path / "m.safetensors"), lambda: nn.Sequential(body, nn.Linear(32, 4)))
    assert torch.equal(again(x), model(x))
    assert inro_fx.report(again[0]).coverage == 1


def test_parameters_that_overlap_in_memory(tmp_path):
    base = torch.randn(64)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    model[0].weight, model[1].weight = nn.Parameter(base.view(8, 8)), nn.Parameter(base[:32].view(4, 8))
    small = inro_fx.quantize_graph(model, torch.randn(2, 8), overrides={"*": None})
    again = inro_fx.load(inro_fx.save(small, tmp_path / "m.safetensors"), on_meta(model))
    assert torch.equal(again(base[:8]), model(base[:8]))


def test_the_size_of_the_file_is_what_the_report_says(tmp_path):
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
    small = inro_fx.quantize_graph(model, torch.randn(2, 512))
    size = inro_fx.save(small, tmp_path / "m.safetensors").stat().st_size
    assert abs(size / inro_fx.report(small).quantized_bytes - 1) < 0.01


def test_a_new_process(tmp_path):
    small = inro_fx.quantize_graph(*MODELS["encoder"]())
    x = torch.randn(3, 4, 16)
    inro_fx.save(small, tmp_path / "m.safetensors")
    torch.save((x, small(x)), tmp_path / "xy.pt")
    code = (f"import torch, inro_fx\nx, y = torch.load({str(tmp_path / 'xy.pt')!r})\nwith torch.device('meta'):\n"
            f"    net = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)\n"
            f"assert torch.equal(inro_fx.load({str(tmp_path / 'm.safetensors')!r}, net)(x), y)")
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_exported_program_in_a_new_process(tmp_path):
    small = inro_fx.quantize_graph(*MODELS["encoder"](), scheme="int8_dynamic")
    x = torch.randn(3, 4, 16)
    torch.export.save(torch.export.export(small, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},)), str(tmp_path / "m.pt2"))
    torch.save((x, small(x)), tmp_path / "xy.pt")
    code = (f"import torch, inro_fx\nx, y = torch.load({str(tmp_path / 'xy.pt')!r})\n"
            f"net = torch.export.load({str(tmp_path / 'm.pt2')!r}).module()\ntorch.testing.assert_close(net(x), y)\nnet(x[:2])")
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- what is refused ----

@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model, x = MODELS["mlp"]()
    small = inro_fx.quantize_graph(model, x)
    return inro_fx.save(small, tmp_path_factory.mktemp("saved") / "m.safetensors"), model, small, x


def test_other_architectures_are_named_and_stay_as_they_are(saved):
    file, model, _, _ = saved
    for other, message in ((nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 15)), r"2.weight is \[16, 32\] in the file and \[15, 32\] in the model"),
                           (nn.Sequential(nn.Linear(16, 32), nn.ReLU()), r"the model lacks 2.weight \[16, 32\]"),
                           (nn.Sequential(*model, nn.Linear(16, 16, bias=False)), r"the file lacks 3.weight \[16, 16\]")):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(inro_fx.FileError, match=message):
            inro_fx.load(file, other)
        assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())
        assert type(other) is nn.Sequential


def test_wrong_arguments(saved, tmp_path):
    file, model, small, x = saved
    for call, kind, message in (
            (lambda: inro_fx.save(model, tmp_path / "x.safetensors"), inro_fx.ModelError, "was not made by inro_fx.quantize_graph"),
            (lambda: inro_fx.load(file, "bert"), inro_fx.ModelError, "not a str"),
            (lambda: inro_fx.load(file, dict), inro_fx.ModelError, "the function returned a dict"),
            (lambda: inro_fx.load(file, small), inro_fx.ModelError, "already quantized"),
            (lambda: inro_fx.load(tmp_path / "none.safetensors", model), FileNotFoundError, "none.safetensors"),
            (lambda: inro_fx.save(small, tmp_path / "no" / "x.safetensors"), FileNotFoundError, "no")):
        with pytest.raises(kind, match=message):
            call()

    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            """Nothing to do."""
    with pytest.raises(inro_fx.ModelError, match="the model keeps extra state that is no tensor"):
        inro_fx.save(inro_fx.quantize_graph(Extra(16, 16), x), tmp_path / "x.safetensors")


def test_what_a_skeleton_lacks_is_named(tmp_path):
    model = net(lambda self, x: self.fc(x) + self.tables[0], fc=nn.Linear(8, 8))
    model.tables = [torch.randn(8)]
    small = inro_fx.quantize_graph(model, torch.randn(2, 8))
    file = inro_fx.save(small, tmp_path / "m.safetensors")
    x = torch.randn(2, 8)
    assert torch.equal(inro_fx.load(file, model)(x), small(x))
    skeleton = on_meta(model)
    skeleton.tables = [torch.empty(8, device="meta")]
    with pytest.raises(inro_fx.FileError, match=r"tables is on the meta device and not in m.safetensors"):
        inro_fx.load(file, skeleton)


def metadata_of(file):
    with safe_open(file, "pt") as stored:
        return stored.metadata(), {k: stored.get_tensor(k) for k in stored.keys()}


def rewritten(file, to, change):
    """A copy of the file whose manifest went through ``change``, with a checksum that fits."""
    metadata, tensors = metadata_of(file)
    manifest = json.loads(metadata["inro_fx"].partition(" ")[2])
    manifest = change(manifest) or manifest
    text = json.dumps(manifest)
    save_file(tensors, to, {"inro_fx": f"{zlib.crc32(text.encode()):08x} {text}"})
    return to


def test_foreign_newer_and_rewritten_files(saved, tmp_path):
    file, model, _, _ = saved
    _, tensors = metadata_of(file)
    save_file(tensors, tmp_path / "foreign.safetensors", {"format": "pt"})
    with pytest.raises(inro_fx.FileError, match=r"was not written by inro_fx.save"):
        inro_fx.load(tmp_path / "foreign.safetensors", model)
    newer = rewritten(file, tmp_path / "newer.safetensors", lambda m: m.update(format_version=3))
    with pytest.raises(inro_fx.FileError, match=r"has format 3.*install a newer inro_fx"):
        inro_fx.load(newer, model)
    (tmp_path / "pickle.safetensors").write_bytes(b"\x80\x04nonsense" * 10)
    (tmp_path / "empty.safetensors").write_bytes(b"")
    for name in ("pickle", "empty"):
        with pytest.raises(inro_fx.FileError, match="is damaged, or no safetensors file"):
            inro_fx.load(tmp_path / f"{name}.safetensors", model)


FUZZ = dict(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@settings(max_examples=150, **FUZZ)
@given(data=st.data())
def test_every_flipped_bit_and_every_cut_is_noticed(saved, tmp_path_factory, data):
    file, model, small, x = saved
    whole = file.read_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:position] + bytes([whole[position] ^ 1 << data.draw(st.integers(0, 7))]) + whole[position + 1:]
    else:
        damaged = whole[:position]
    broken = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    broken.write_bytes(damaged)
    with contextlib.suppress(inro_fx.FileError):
        assert torch.equal(inro_fx.load(broken, model)(x), small(x))       # a bit that says nothing, such as a space


def test_a_file_adds_no_buffers_of_its_own(saved, tmp_path):
    file, model, _, _ = saved
    metadata, tensors = metadata_of(file)
    for name in ("extra", "0.forward", '0.x"); print("', "_constant_0x"):
        manifest = json.loads(metadata["inro_fx"].partition(" ")[2])
        manifest["tensors"][name] = dict(kind="non_persistent", names=[name], dtype="float32", shape=[2], crc32=zlib.crc32(torch.zeros(2).numpy()))
        text = json.dumps(manifest)
        save_file({**tensors, name: torch.zeros(2)}, tmp_path / "more.safetensors", {"inro_fx": f"{zlib.crc32(text.encode()):08x} {text}"})
        with pytest.raises(inro_fx.FileError):
            inro_fx.load(tmp_path / "more.safetensors", model)


def test_a_file_is_written_whole_or_not_at_all(saved, tmp_path, monkeypatch):
    _, _, small, _ = saved
    file = inro_fx.save(small, tmp_path / "m.safetensors")
    before = file.read_bytes()

    def failing(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("disk full")
    monkeypatch.setattr(files, "save_file", failing)
    with pytest.raises(inro_fx.FileError, match="disk full"):
        inro_fx.save(small, file)
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
