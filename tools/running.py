"""Access to the running job that a command's options select."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flightedl.adapters.clock import SystemClock
from flightedl.config import CommonSettings, settings
from flightedl.launch.status import JobStatus


def running_job(options: Mapping[str, Any]) -> JobStatus:
    """Return access to the job that ``running_job_options`` select."""
    return JobStatus(settings(CommonSettings, **options), SystemClock())
