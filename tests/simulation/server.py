"""The warm process of ``client``: reads a request a line, and answers each with a line."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import msgspec

from tests.simulation import rpc_tests, runs
from tests.simulation.scenario import Wanted
from tests.simulation.timelines import timeline


def main() -> None:
    """Answer requests until the input ends."""
    answers = sys.stdout
    # Whatever the product prints must not be taken for an answer.
    sys.stdout = sys.stderr
    runs.warm_up()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _answer(request: dict[str, Any]) -> Any:
    if "tests" in request:
        return runs.forked(lambda: rpc_tests.run(request["tests"], request["left_out"]))
    if "timeline" in request:
        return timeline(request["timeline"])
    wanted = msgspec.convert(request["wanted"], Wanted)
    return asdict(runs.run_forked(request["seed"], wanted, **request.get("more", {})))


if __name__ == "__main__":
    main()
