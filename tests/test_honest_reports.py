"""Reports say what is there: bytes, errors, kernels, memory."""

import gc
import math
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from models import Tied, first, quantized
from test_capture import net, one_graph
from torch import nn

import inro_fx
from inro_fx.passes.scheme import Identity


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e20, 1e30])
def test_errors_at_extreme_sizes_are_real(size):
    model = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        model.weight.mul_(size)
    row = inro_fx.report(inro_fx.quantize_graph(model, torch.randn(4, 64), "int4")).rows[0]
    assert 0.02 < row.weight_error < 0.2
    assert 0.02 < row.isolated < 0.2


def test_numbers_too_large_for_a_scale_are_left_float():
    model = nn.Linear(16, 16).double()
    with torch.no_grad():
        model.weight.mul_(1e300)
    report = inro_fx.report(inro_fx.quantize_graph(model, torch.randn(2, 16).double()))
    assert report.skipped[0].reason == "it holds numbers too large for a float32 scale"


def test_masked_rows_that_are_nan_in_float_too_are_no_error():
    model = net(lambda self, x: torch.softmax(self.fc(x).masked_fill(x[:1] * 0 == 0, -math.inf), -1) + self.fc(x), fc=nn.Linear(16, 16))
    report = inro_fx.report(inro_fx.quantize_graph(model, torch.randn(2, 16)))
    assert report.output_error < 0.05 or math.isnan(report.output_error)


def test_two_schemes_for_one_weight_are_refused():
    with pytest.raises(inro_fx.SchemeError, match=r"overrides ask for int8 and int4 for table\.weight = head\.weight"):
        inro_fx.quantize_graph(Tied(), torch.randint(0, 40, (2, 3)), overrides={"table": "int8", "head": "int4"})
    small = inro_fx.quantize_graph(Tied(), torch.randint(0, 40, (2, 3)), overrides={"head": "int4"})
    assert {r.scheme for r in inro_fx.report(small).rows if r.layer in ("table", "head")} == {"int4"}


def test_calls_that_layers_did_not_cover_are_counted_too():
    model = net(lambda self, x: self.fc(x) if x.sum() > 0 else self.fc(x[None])[0], fc=nn.Linear(8, 8))
    small = inro_fx.quantize_graph(model, torch.ones(2, 8))
    assert not one_graph(small)
    with torch.autocast("cpu", torch.bfloat16):
        small(torch.ones(2, 8))
    assert inro_fx.report(small).outside == {"fc: autocast": 1}


def test_inplace_frees_each_weight_when_it_is_packed():
    """Peak memory of the float run stays near one layer above the float model."""
    from inro_fx import packing, steps
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    alive = []

    class Watching(packing.Packer):
        def pack(self, name):
            parts = super().pack(name)
            alive.append(sum(layer.weight.numel() > 0 for layer in model if "weight" in layer._parameters))
            return parts
    original = steps.Packer
    steps.Packer = Watching
    try:
        inro_fx.quantize_graph(model, torch.randn(2, 64), inplace=True)
    finally:
        steps.Packer = original
    assert min(alive) <= 1
    assert alive[0] == 8


@pytest.mark.parametrize("branches", [False, True])
def test_what_a_scheme_remembers_of_its_calls_is_not_undone(branches):
    packed = []

    class Remembering(Identity):
        def pack(self, matrix):
            packed.append(tuple(matrix.shape))
            return super().pack(matrix)
    model = net(lambda self, x: F.linear(x, self.w) if branches and x.sum() > 0 else F.linear(x + 1, self.w), w=nn.Parameter(torch.ones(4, 8)))
    inro_fx.quantize_graph(model, torch.ones(2, 8), Remembering())
    assert packed[-1] == (4, 8)


def test_gates_names_with_glob_characters_can_be_named_exactly():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("we[ir]d*", nn.Linear(8, 8))
            self.weird = nn.Linear(8, 8)

        def forward(self, x):
            return self.weird(self.get_submodule("we[ir]d*")(x))
    small = inro_fx.quantize_graph(Odd(), torch.randn(2, 8), overrides={"we[ir]d*": None})
    assert "we[ir]d*.weight" in [s.layer for s in inro_fx.report(small).skipped]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_scripted_children_are_refused_by_path():
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    with pytest.raises(inro_fx.ModelError, match="1 is a RecursiveScriptModule, which cannot be quantized"):
        inro_fx.quantize_graph(model, torch.randn(2, 8))


@pytest.mark.filterwarnings("ignore::FutureWarning")               # of what gc finds
def test_memory_is_a_quarter_and_does_not_grow():
    def live():
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and t.device.type == "cpu"]
        return sum(t.untyped_storage().nbytes() for t in {t.untyped_storage().data_ptr(): t for t in tensors}.values())
    start = live()
    sizes = []
    for _ in range(5):
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
        whole = live() - start
        small = quantized(model, torch.randn(2, 512))
        del model
        sizes.append(live() - start)
        del small
    assert max(sizes) < 0.3 * whole
    assert max(sizes) - min(sizes) < 0.01 * whole
    assert live() - start < 0.01 * whole


GROWTH = """
import gc, itertools, tracemalloc
import torch
from torch import nn
import inro_fx

model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(2, 16)
tracemalloc.start()
sizes = []
for _ in range(5):
    for _ in range(30):
        inro_fx.quantize_graph(model, x)(x)
    gc.collect()
    sizes.append(tracemalloc.get_traced_memory()[0])
growth = min(b - a for a, b in itertools.pairwise(sizes))                  # tables of the process grow now and then, by steps
assert growth < 6 * 1024, sizes
"""


def test_many_rounds_of_quantizing_running_and_dropping_do_not_grow():
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_quantizing_and_running_in_several_threads_at_once():
    models = [nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(4)]
    x, shared = torch.randn(3, 16), quantized(nn.Sequential(nn.Linear(16, 16), nn.LSTM(16, 16)), torch.randn(3, 16))
    want = [quantized(m, x)(x) for m in models]
    expected, failures = first(shared(x)), []

    def work(i):
        try:
            for _ in range(5):
                assert torch.equal(quantized(models[i], x)(x), want[i])
                assert torch.equal(first(shared(x)), expected)
        except BaseException as error:
            failures.append(error)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_report_says_which_layers_run_integers_and_which_dequantize():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(128, 64))
    report = inro_fx.report(quantized(model, torch.randn(1, 4, 6, 6), "int8_dynamic"))
    kernels = {r.layer: r.kernel for r in report.rows}
    assert kernels["0"] == "dequantize + conv2d"
    assert kernels["2"] in ("inro_fx.linear_dynamic/c", "inro_fx.linear_dynamic/torch")
    assert "dequantize" in str(report)
