"""How many random examples a property is checked with, on a commit and with `launch/test.sh --all`."""

import os
from typing import Any

from hypothesis import HealthCheck, settings


def load_profile() -> None:
    """Let properties of this process draw as many examples as the run of the tests wants."""
    is_whole = bool(os.environ.get("DCPMLA_ALL_TESTS"))
    # Busy machines draw slowly, so nothing has a deadline.
    settings.register_profile(
        "dcpmla", deadline=None, max_examples=400 if is_whole else 40, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("dcpmla")


def few(test: Any) -> Any:
    """Check a property whose examples take a second each with an eighth of the profile's examples."""
    return settings(max_examples=settings().max_examples // 8)(test)
