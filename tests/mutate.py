"""Switches off each refusal of the compiler, one at a time, and looks whether a test notices.

    python tests/mutate.py passes/rules/fuse.py -- tests/test_passes.py tests/test_carriers.py

A refusal is an ``if`` whose body ends by giving a reason (a text) or by raising. It works on a copy of the project; what it prints as
SURVIVED is a refusal that no test asks for.
"""

import argparse
import ast
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def refusals(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            last = node.body[-1]
            text = isinstance(last, ast.Return) and isinstance(last.value, (ast.Constant, ast.JoinedStr)) and (
                not isinstance(last.value, ast.Constant) or isinstance(last.value.value, str))
            if text or isinstance(last, ast.Raise):
                yield node


def switched_off(source, node):
    """The source in which this ``if`` never holds."""
    lines = source.splitlines(keepends=True)
    test = node.test
    first, last = test.lineno - 1, test.end_lineno - 1
    start = len(lines[first].encode()[:test.col_offset].decode())
    end = len(lines[last].encode()[:test.end_col_offset].decode())
    lines[first:last + 1] = [lines[first][:start] + "False" + lines[last][end:]]
    return "".join(lines)


def fails(command, folder, seconds):
    """Do the tests fail, or take longer than that?"""
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=seconds).returncode != 0
    except subprocess.TimeoutExpired:
        return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="files of passes/, then -- and the tests that shall notice")
    files = parser.parse_args(sys.argv[1:sys.argv.index("--")]).files
    tests = sys.argv[sys.argv.index("--") + 1:]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "build", "*.egg-info", "__pycache__"))
        run = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        start = time.monotonic()
        if fails(run, copy, None):
            sys.exit("the tests fail as they are")
        alone = time.monotonic() - start
        survivors = 0
        for name in files:
            source = (ROOT / name).read_text()
            for node in refusals(ast.parse(source)):
                (copy / name).write_text(switched_off(source, node))
                noticed = fails(run, copy, 3 * alone + 60)
                survivors += not noticed
                print("noticed " if noticed else "SURVIVED", f"{name}:{node.lineno}", ast.unparse(node.body[-1])[:90], flush=True)
            (copy / name).write_text(source)
    print(f"{survivors} survived")
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main()
