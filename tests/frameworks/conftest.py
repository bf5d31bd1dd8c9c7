"""Tests that require large packages (hundreds of megabytes): `make frameworks` installs them and runs the tests.

The tests are selected only with ``-m frameworks``.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(item.path).parent == Path(__file__).parent]
    for item in ours:
        item.add_marker(pytest.mark.frameworks)
    if "frameworks" not in config.option.markexpr:
        items[:] = [item for item in items if item not in ours]
        config.hook.pytest_deselected(items=ours)
