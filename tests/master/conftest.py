"""Jobs of twins, see ``job_of_twins``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from job_of_twins import Job, jobs


@pytest.fixture
def make_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    with jobs(monkeypatch) as make:
        yield make
