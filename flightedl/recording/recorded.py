"""Constructs cores, which are recorded if there is a recorder. Without a recorder, this costs nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from flightedl.ports import Clock

if TYPE_CHECKING:
    from flightedl.recording.writer import Recorder

_Core = TypeVar("_Core")
_Arguments = ParamSpec("_Arguments")


def recorded(
    recorder: Recorder | None,
    about: Mapping[str, object],
    core: Callable[_Arguments, _Core],
    /,
    *args: _Arguments.args,
    **kwargs: _Arguments.kwargs,
) -> _Core:
    """Construct a core whose inputs are recorded. ``cores`` lists the kinds.

    Args:
        recorder: Recorder of the process; None for a core that is not recorded.
        about: Names for readers of the recording, such as ``trainer`` and ``evaluation``.
        core: Class of the core.
        args: Positional arguments of its constructor.
        kwargs: Keyword arguments of its constructor.
    """
    if recorder is None:
        return core(*args, **kwargs)
    from flightedl.recording.calls import recorded_core

    return recorded_core(recorder, about, core, args, kwargs)  # type: ignore[return-value]


def recording_trainer(directory: str, job: str, clock: Clock) -> contextlib.AbstractContextManager[Recorder | None]:
    """Record a trainer, see ``writer.recording_process``."""
    if not directory:
        return contextlib.nullcontext()
    from flightedl.recording.writer import recording_process

    return recording_process(directory, "trainer", job, clock)
