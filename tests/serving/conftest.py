"""A server that the tests of the API share: two ranks, one cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import RunningServer, needle_with_template, serve

KEY = "sesame"


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return needle_with_template(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    options = [
        "--api-key",
        KEY,
        "--served-model-name",
        "needle",
        "--max-num-seqs",
        64,
        "--max-waiting",
        400,
        "--dtype",
        "float32",
    ]
    with serve(tmp_path_factory.mktemp("server"), model, 2, *options) as running:
        yield running
