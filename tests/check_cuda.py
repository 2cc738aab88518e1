"""Checks the operators on a CUDA device against the CPU, and times them against the float layer: python tests/check_cuda.py

Rows on either side of where ``torch._int_mm`` starts, in three dtypes. Prints one line for each case; exits 1 if any is off.
"""

import sys
import time

import torch
from torch import nn

import inro_fx

ROWS, DTYPES, SHAPES = (1, 15, 16, 17, 32, 512), (torch.float32, torch.float16, torch.bfloat16), ((1024, 1024), (100, 77))
LIMIT = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def milliseconds(function):
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 20 * 1e3


def main():
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was checked")
        return 0
    passed = failed = 0
    for scheme in ("int8", "int8_dynamic", "int8_static", "int4"):
        for inner, out in SHAPES:
            layer = nn.Linear(inner, out)
            data = [torch.randn(64, inner)]
            small = inro_fx.quantize_graph(layer, data[0], scheme, calibration=data)
            for dtype in DTYPES:
                there, float_layer = inro_fx.quantize_graph(layer, data[0], scheme, calibration=data).to("cuda", dtype), nn.Linear(inner, out).to("cuda", dtype)
                for rows in ROWS:
                    x = torch.randn(rows, inner)
                    with torch.inference_mode():
                        want, got = small(x), there(x.to("cuda", dtype)).float().cpu()
                        error = ((got - want).norm() / want.norm()).item()
                        y = x.to("cuda", dtype)
                        ratio = milliseconds(lambda m=float_layer, y=y: m(y)) / milliseconds(lambda m=there, y=y: m(y))
                    good = error < LIMIT[dtype]
                    passed, failed = passed + good, failed + (not good)
                    print(f"{'ok ' if good else 'BAD'} {scheme:13} {inner}x{out} {str(dtype)[6:]:9} rows {rows:4} error {error:.1e} speed {ratio:.2f}")
    print(f"{passed} passed, {failed} failed on {torch.cuda.get_device_name()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
