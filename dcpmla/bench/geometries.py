"""Models whose layers the benchmarks measure with random weights, as transformers configs: published ones, and tiny
ones that run on CPUs in seconds.
"""

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "configs"  # each a config.json without the fields that are transformers' defaults
GEOMETRIES = tuple(sorted(file.stem for file in _FOLDER.glob("*.json")))


def config_of(geometry: str, **changes: Any) -> Any:
    """Return the transformers config of one of GEOMETRIES.

    Args:
        changes: Fields that are to differ.
    """
    from transformers import AutoConfig  # takes seconds

    fields = json.loads((_FOLDER / f"{geometry}.json").read_text())
    return AutoConfig.for_model(**{**fields, **changes})
