"""One router for each file of cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fuzz_target import Target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("fuzz")) as made:
        yield made
