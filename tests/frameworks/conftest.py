"""These tests need packages that no other test needs, hundreds of megabytes: `make frameworks` gets and runs them.

Without ``-m frameworks`` they are not selected.
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
