"""The command ``inro-fx``: demo, quantize, report, draw, plan and bench, on any model that Python can import; show, on a saved file."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import __version__
from .allocation import Budget
from .api import plan_bits, quantize_graph
from .atomic import refuse_unwritable, write_bytes
from .benchmark import benchmark
from .draw import FORMATS, draw
from .errors import FileError, InputError, InroError, MissingTool, ModelError
from .load import _read
from .manifest import record_of, shown
from .report import Report, report
from .save import save
from .schemes import SCHEMES, uniform
from .solvers import SOLVERS
from .steps import CAPTURES

__all__ = ["main"]

EXAMPLES = """examples:
  inro-fx demo
  inro-fx report mypackage.models:resnet --inputs 1x3x224x224
  inro-fx quantize mypackage.models:bert --inputs int:1x128 --scheme int8_dynamic --override pooler=none --out small/
  inro-fx quantize mypackage.models:bert --inputs int:1x128 --bits 4.5 --calibration mypackage.models:batches --solver auto --out small/
  inro-fx plan mypackage.models:bert --inputs int:1x128 --bits 4.5 --out bert.svg
  inro-fx show small/model.safetensors
  inro-fx bench mypackage.models:bert --inputs int:1x128 --scheme int8_dynamic
  inro-fx draw mypackage.models:bert --inputs mypackage.models:example --out bert.svg
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status is 0, or 2 after an error in one line on standard error."""
    options = _parser().parse_args(arguments)
    sys.path.insert(0, os.getcwd())
    try:
        options.run(options)
    except (InroError, OSError) as error:
        print(f"inro-fx: {_line(error)}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="inro-fx", description="Quantize a PyTorch model and see layer by layer what it cost.",
                                     epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"inro_fx {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="quantize a small trained model that comes with the package")
    demo.add_argument("--out", type=Path, default=Path("inro-fx-demo"), metavar="DIR",
                      help="where report and drawing go (%(default)s)")
    _add_scheme(demo)
    demo.set_defaults(run=_demo)

    for name, run, text, out in (
            ("quantize", _quantize, "write the quantized model, the report and a drawing to a folder", "DIR"),
            ("report", _report, "print the report; with --out write it as .txt, .json, .csv or .md", "FILE"),
            ("draw", _draw, "draw the quantized graph as .txt, .dot, .svg, .png or .pdf", "FILE"),
            ("bench", _bench, "time the float and the quantized model in turns, whole and layer by layer", "FILE")):
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        _add_model(command)
        command.add_argument("--fold-batchnorm", action="store_true", help="multiply batch norms into the convolutions before them")
        command.add_argument("--out", type=Path, metavar=out, required=name in ("quantize", "draw"),
                             help=f"the {out.lower()} to write")
        command.add_argument("--solver", default="nearest", help="what chooses the codes: "
                             f"{', '.join(x.name for x in SOLVERS)} or auto (%(default)s); gptq and gptaq need --calibration")
        command.add_argument("--bias-correction", action="store_true", help="biases take up the mean errors of their layers")
        _add_budget(command)
        _add_scheme(command)
        command.set_defaults(run=run)

    plan = commands.add_parser("plan", help="what each format of each weight would do to the output, and the best for a budget",
                               description="Measures what each format of each weight does to the output. Prints the table, with the "
                               "choices for a budget marked; --out writes the plan as .json, or its curve as .svg.")
    _add_model(plan)
    plan.add_argument("--solver", default="nearest", help="the solver whose errors are measured: nearest or search (%(default)s)")
    plan.add_argument("--out", type=Path, action="append", default=[], metavar="FILE", help="a .json or .svg to write; may be repeated")
    _add_budget(plan)
    plan.set_defaults(run=_plan)

    show = commands.add_parser("show", help="print what a saved file holds, without a model",
                               description="Print what a file that save or quantize wrote holds. It is checked as load checks it.")
    show.add_argument("file", type=Path, metavar="FILE.safetensors")
    show.set_defaults(run=_show)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODULE:NAME", help="an nn.Module, or a function that returns one or (model, inputs)")
    parser.add_argument("--inputs", metavar="SPEC", help="shapes such as 1x3x224x224 or int:1x128 (comma between arguments), "
                        "or MODULE:NAME of the inputs or a function that makes them")
    parser.add_argument("--override", action="append", default=[], metavar="PATTERN=SCHEME",
                        help="another scheme for matching layers, none leaves them float, SCHEME:SOLVER names a solver; may be repeated")
    parser.add_argument("--capture", choices=CAPTURES, default="auto", help="how to capture the graph (%(default)s)")
    parser.add_argument("--calibration", metavar="MODULE:NAME", help="an iterable of inputs, or a function that makes one: "
                        "errors are measured on it, int8_static takes its ranges from it, and solvers their codes")


def _add_budget(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--bits", type=float, metavar="N", help="choose each layer's format: N bits a weight, on average")
    group.add_argument("--bytes", type=float, metavar="N", help="the same, for a model of N bytes")
    group.add_argument("--ratio", type=float, metavar="N", help="the same, for a model of N times the float one's bytes")
    group.add_argument("--error", type=float, metavar="N", help="the same, for a relative error of the output of N at most")


def _add_scheme(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scheme", default="int8",
                        help=f"{', '.join(s.name for s in SCHEMES)}, or a quant_max such as 100 (%(default)s)")


# ---- the commands ----

def _demo(options: argparse.Namespace) -> None:
    from .demo import accuracy, load_digits_model
    _refuse_folder(options.out)
    model, images, labels = load_digits_model()
    before = accuracy(model, images, labels)
    static = options.scheme == "int8_static"
    small = quantize_graph(model, images[:64], _scheme(options.scheme), calibration=images[:256].split(64) if static else None)
    print("A vision transformer that reads handwritten digits, before and after:\n")
    print(report(small))
    after = accuracy(small, images, labels)
    print(f"accuracy      {before:.2%} -> {after:.2%} on {len(labels)} test images\n")
    _write_all(small, options.out)


def _quantize(options: argparse.Namespace) -> None:
    _refuse_folder(options.out)
    small = _quantized(options)
    print(report(small))
    _write_all(small, options.out)
    print(f"wrote {save(small, options.out / 'model.safetensors')}")


REPORTS: Mapping[str, Callable[[Report], str]] = {
    ".txt": str, ".json": Report.to_json, ".csv": Report.to_csv, ".md": Report.to_markdown}


def _report(options: argparse.Namespace) -> None:
    if options.out is None:
        print(report(_quantized(options)))
        return
    refuse_unwritable(options.out)
    model, inputs = _model_and_inputs(options)
    if options.out.suffix not in REPORTS:
        raise InputError(f"{options.out.name}: a report ends in one of {', '.join(REPORTS)}")
    text = REPORTS[options.out.suffix](report(_quantized(options, model, inputs)))
    print(f"wrote {_write(options.out, text)}")


def _draw(options: argparse.Namespace) -> None:
    refuse_unwritable(options.out)
    model, inputs = _model_and_inputs(options)
    if options.out.suffix not in FORMATS:
        raise InputError(f"{options.out.name}: a drawing ends in one of {', '.join(FORMATS)}")
    if options.out.suffix in (".svg", ".png", ".pdf") and shutil.which("dot") is None:
        raise MissingTool(f"drawing {options.out.suffix} needs the program dot: install Graphviz, or draw to .txt or .dot")
    print(f"wrote {draw(_quantized(options, model, inputs), options.out)}")


def _plan(options: argparse.Namespace) -> None:
    for file in options.out:
        refuse_unwritable(file)
        if file.suffix not in (".json", ".svg"):
            raise InputError(f"{file.name}: a plan ends in .json, its curve in .svg")
    model, inputs = _model_and_inputs(options)
    budget = _budget(options)
    plan = plan_bits(model, inputs, overrides=_overrides(options), calibration=_calibration(options), solver=options.solver,
                     capture=options.capture)
    chosen = None if budget is None else plan.solve(budget)
    print(plan.table(chosen))
    if chosen is not None:
        print(f"\n{chosen.bits:.2f} bits a weight, {chosen.bytes:,} bytes in all, predicted error of the output {chosen.error:.2%}")
    for file in options.out:
        if file.suffix == ".svg":
            plan.curve(file)
        else:
            plan.save(file)
        print(f"wrote {file}")


def _bench(options: argparse.Namespace) -> None:
    if options.out is not None:
        refuse_unwritable(options.out)
    model, inputs = _model_and_inputs(options)
    timed = benchmark(model, _quantized(options, model, inputs), inputs)
    print(timed)
    if options.out is not None:
        _write(options.out, str(timed))


def _show(options: argparse.Namespace) -> None:
    if options.file.is_dir():
        raise FileError(f"{options.file} is a folder: give the file that inro_fx.save wrote")
    manifest, tensors = _read(options.file)
    sizes = {n: t.numel() * t.element_size() for n, t in tensors.items()}
    weights = {(w["holder"], *w["stored"]): w["scheme"] for w in manifest.weights}           # tied ones once
    schemes = Counter(shown(manifest.schemes[i]["name"]) if i < len(manifest.schemes) else "unknown" for i in weights.values())
    print(f"model         {shown(manifest.model)}\n"
          f"made by       inro_fx {shown(manifest.inro_fx)}, torch {shown(manifest.torch)}; format {manifest.format_version}\n"
          f"schemes       {', '.join(f'{name} ({count})' for name, count in schemes.items()) or 'none'}\n"
          f"weights       {len(weights)} as codes, of {len(tensors)} tensors\n"
          f"bytes         {sum(sizes.values()):,} of numbers, {options.file.stat().st_size:,} in all")
    if "" in manifest.records:
        record = record_of(manifest.records[""])
        stored = sum(size for n, size in sizes.items() if manifest.tensors[n]["kind"] in ("parameter", "frozen", "buffer"))
        totals = Report(record.rows, record.skipped, record.float_bytes, stored, record.output_error, record.steps, record.regions,
                        record.nodes, record.guards, {}, [])._totals()
        print("\nas quantized", *map(_harmless, "\n".join(totals).split("\n")), sep="\n")


def _write_all(model: nn.Module, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    result = report(model)
    for ending, form in REPORTS.items():
        _write(folder / f"report{ending}", form(result))
    drawings = ["graph.txt"]
    draw(model, folder / "graph.txt")
    try:
        draw(model, folder / "graph.svg")
        drawings.append("graph.svg")
    except MissingTool as missing:
        draw(model, folder / "graph.dot")
        drawings.append("graph.dot")
        print(f"(no graph.svg: {missing})")
    print(f"wrote {folder}/: {', '.join(f'report{ending}' for ending in REPORTS)}, {', '.join(drawings)}")


def _write(file: Path, text: str) -> Path:
    return write_bytes(file, (text.rstrip() + "\n").encode())


def _refuse_folder(folder: Path) -> None:
    """Raises `OSError` now for a folder that cannot be made or written: before the work, not after it."""
    there = next(p for p in (folder, *folder.absolute().parents) if os.path.lexists(p))
    refuse_unwritable(there / "model.safetensors")


def _harmless(line: str) -> str:
    """Without what a terminal would obey."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def _line(error: Exception) -> str:
    """What an exception says, in one line."""
    return _harmless(" ".join(str(error).split())) or type(error).__name__


# ---- what the arguments name ----

def _model_and_inputs(options: argparse.Namespace) -> tuple[nn.Module, Any]:
    model, inputs = _model(options.model), None
    if isinstance(model, tuple):
        model, inputs = model
    if options.inputs is not None:
        inputs = _inputs(options.inputs)
    if inputs is None:
        raise InputError(f"{options.model} gives a model without inputs: add --inputs, for example --inputs 1x3x224x224")
    return model, inputs


def _quantized(options: argparse.Namespace, model: Any = None, inputs: Any = None) -> nn.Module:
    if model is None:
        model, inputs = _model_and_inputs(options)
    return quantize_graph(model, inputs, _scheme(options.scheme), overrides=_overrides(options), calibration=_calibration(options),
                          capture=options.capture, fold_batchnorm=options.fold_batchnorm, solver=options.solver,
                          bias_correction=options.bias_correction, budget=_budget(options))


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    for entry in options.override:
        pattern, equals, scheme = entry.rpartition("=")
        if not equals:
            raise InputError(f"--override {entry}: write PATTERN=SCHEME, for example --override 'encoder.*=int8' or head=none")
        scheme, _, solver = scheme.partition(":")
        chosen = None if scheme.lower() == "none" else _scheme(scheme)
        overrides[pattern] = (chosen, solver) if solver else chosen
    return overrides


def _calibration(options: argparse.Namespace) -> Any:
    return None if options.calibration is None else _inputs(options.calibration)


def _budget(options: argparse.Namespace) -> Budget | None:
    given = {name: value for name in ("bits", "bytes", "ratio", "error") if (value := getattr(options, name)) is not None}
    return Budget(**given) if given else None


def _scheme(text: str) -> Any:
    return uniform(int(text)) if text.isdecimal() else text


def _lookup(spec: str) -> Any:
    module, colon, name = spec.partition(":")
    if not colon:
        raise InputError(f"{spec}: write MODULE:NAME, for example mypackage.models:resnet")
    try:
        value: Any = importlib.import_module(module)
        for piece in name.split("."):
            value = getattr(value, piece)
    except Exception as error:                          # whatever the code of the module raises
        raise InputError(f"{spec} cannot be imported: {_line(error)}") from error
    return value


def _called(spec: str, function: Callable[[], Any]) -> Any:
    """What the function that ``spec`` names returns. Raises `InputError` where it needs arguments or raises itself."""
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise InputError(f"{spec} is called without arguments, but has {_line(error)}: name a function that needs none") from error
    except ValueError:                                  # of a builtin nothing is known
        pass
    try:
        return function()
    except Exception as error:
        raise InputError(f"{spec} raised {type(error).__name__}: {_line(error)}") from error


def _model(spec: str) -> Any:
    value = _lookup(spec)
    value = _called(spec, value) if callable(value) and not isinstance(value, nn.Module) else value
    model = value[0] if isinstance(value, tuple) and len(value) == 2 else value
    if not isinstance(model, nn.Module):
        raise ModelError(f"{spec} gives {type(model).__name__}, not a torch.nn.Module (or a function that returns one)")
    return value


def _inputs(spec: str) -> Any:
    if spec.partition(":")[0] not in ("int", "float") and ":" in spec:
        value = _lookup(spec)
        return _called(spec, value) if callable(value) and not isinstance(value, torch.Tensor) else value
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for piece in spec.split(","):
        kind, _, shape = piece.rpartition(":")
        try:
            sizes = [int(n) for n in shape.split("x")]
            if min(sizes) < 0:
                raise ValueError
        except ValueError:
            raise InputError(f"--inputs {piece}: write a shape such as 1x3x224x224 or int:1x128") from None
        if kind not in ("", "float", "int"):
            raise InputError(f"--inputs {piece}: the kind before the colon is int or float")
        random = torch.randint(0, 2, sizes, generator=generator) if kind == "int" else torch.randn(sizes, generator=generator)
        tensors.append(random)
    return tuple(tensors)

