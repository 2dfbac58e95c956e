"""Small models saved by transformers, as the tests of one runner have them; what starts ranks is a test of the system."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

for folder in ("models_forward", "workers"):
    sys.path.append(str(Path(__file__).parent.parent / folder))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks share the machine; runners set the threads of the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
