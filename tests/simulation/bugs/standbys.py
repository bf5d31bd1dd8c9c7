"""Bugs in standby pservers. Runs with one of these bugs always have standbys, moves and rows."""

from __future__ import annotations

from tests.support.planting import Planted, answers, bug, swaps

_STANDBY = "domain.moving.standby:"
_COPY = f"{_STANDBY}StandbyCopy."

STANDBY_BUGS: dict[str, Planted] = {
    "half of a copy is taken over": bug(
        "a standby adds changes to its content part by part, and serves a mixture of two copies",
        answers(f"{_COPY}is_kept_back", "False"),
    ),
    "the first half of a copy is taken over": bug(
        "a standby serves its former copy although a copy of everything has overwritten part of it",
        swaps(f"{_COPY}begin", "self.has = None", "pass"),
    ),
    "a copy of moved blocks is taken over": bug(
        "a standby serves a copy although blocks have moved away from its pserver since, or to it",
        swaps(f"{_COPY}is_usable", " and self.layout == layout", ""),
        swaps(f"{_COPY}waits", "waits = layout != self.layout and", "waits = self.layout is None and"),
        swaps(f"{_COPY}follow", "layout != self.layout", "self.layout is None"),
        swaps(f"{_COPY}end", "if blocks == received else", "if self.receiving else"),
    ),
    "changes follow a copy that has not arrived": bug(
        "a copy contains only changes, although its standby lacks the copy before it",
        swaps(f"{_STANDBY}CopySource.begin", "self.newest == Sent(standby, has)", "self.newest is not None"),
    ),
    "standbys leave an index free": bug(
        "all processes without an index are standbys of others, and none gives up its copy",
        answers(f"{_STANDBY}has_unclaimed", "False"),
    ),
    "a pserver without values keeps its placement": bug(
        "a pserver that lacks its values ignores newer placements, and can never report this",
        answers("domain.pserver.life:PserverLife.may_be_placed", "self.is_serving"),
    ),
}
