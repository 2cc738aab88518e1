"""Every test starts from the same random state, and leaves none of it behind."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("inro_fx", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("inro_fx")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch._dynamo.reset()
