"""Jobs of twins, see ``job_of_twins``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .job_of_twins import Job, jobs


@pytest.fixture
def make_job() -> Iterator[Callable[..., Job]]:
    with jobs() as make:
        yield make
