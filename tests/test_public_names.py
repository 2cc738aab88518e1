"""What the package offers, and how its parts may import each other."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import inro_fx

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "passes").rglob("*.py"), *(p for p in (ROOT / "inro_fx").rglob("*.py") if "passes" not in p.parts)])


def test_all_is_the_public_api():
    public = {n for n, v in vars(inro_fx).items() if not n.startswith("_") and getattr(v, "__module__", "").startswith("inro_fx")
              and not isinstance(v, type(sys))}
    assert public | {"SCHEMES"} == set(inro_fx.__all__)
    assert len(set(inro_fx.__all__)) == len(inro_fx.__all__)


@pytest.mark.parametrize("name", [n for n in inro_fx.__all__ if n != "SCHEMES"])
def test_everything_public_is_documented(name):
    assert getattr(inro_fx, name).__doc__


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(source):
    """passes/ imports torch and its siblings only; numerics and ops import neither passes nor the product above them."""
    tree = ast.parse(source.read_text())
    relative = source.relative_to(ROOT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [("." * node.level) + (node.module or "")]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        for name in names:
            assert not (name == "passes" or name.startswith("passes.")), "the compiler is imported as inro_fx.passes"
            if relative.parts[0] == "passes":
                outside = len(name) - len(name.lstrip(".")) >= len(relative.parts)
                assert not name.startswith("inro_fx"), name
                assert not outside, f"{name} is above passes/"
            if relative.parts[1:2] in (("numerics",), ("ops",)):
                assert not any(w in name for w in ("passes", "api", "report", "schemes", "cli")), name
    assert tree.body[0].value.value if isinstance(tree.body[0], ast.Expr) else False, "no module docstring"


def test_wheel_holds_one_top_level_name(tmp_path):
    """Real files under inro_fx/passes; nothing called passes beside them."""
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT],
                   check=True, capture_output=True, cwd=tmp_path)
    wheel = next(tmp_path.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"inro_fx"}
    assert {"inro_fx/passes/capture/tracer.py", "inro_fx/passes/rules/fuse.py", "inro_fx/py.typed", "inro_fx/demo/digits.safetensors"} <= set(names)


def test_importing_is_quiet_and_leaves_torch_alone():
    code = ("import torch, torch.nn as nn; before = (nn.Module.__call__, nn.Module.__getattr__, nn.Module.__setattr__, isinstance);"
            "import inro_fx; assert before == (nn.Module.__call__, nn.Module.__getattr__, nn.Module.__setattr__, isinstance)")
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
