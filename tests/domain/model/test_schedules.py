import json
import math

import pytest

from flightedl.domain.model.schedules import (
    Constant,
    Cosine,
    LinearWarmup,
    Piecewise,
    Polynomial,
    Schedule,
    StepDecay,
)
from flightedl.errors import UsageError

CASES = [
    (Constant(0.3), {0: 0.3, 10**9: 0.3}),
    (StepDecay(0.8, 0.5, 10), {0: 0.8, 9: 0.8, 10: 0.4, 19: 0.4, 20: 0.2}),
    (Piecewise((5, 8), (0.3, 0.2, 0.1)), {0: 0.3, 4: 0.3, 5: 0.2, 7: 0.2, 8: 0.1, 10**9: 0.1}),
    (Piecewise((), (0.3,)), {0: 0.3}),
    (Cosine(1.0, 100, 0.2), {0: 1.0, 50: 0.6, 25: 0.6 + 0.4 * math.cos(math.pi / 4), 100: 0.2, 10**9: 0.2}),
    (Polynomial(1.0, 10, 0.5), {0: 1.0, 5: 0.75, 9: 0.55, 10: 0.5, 11: 0.5}),
    (Polynomial(1.0, 10, 0.0, 2.0), {0: 1.0, 5: 0.25, 10: 0.0}),
    (LinearWarmup(4, 0.4), {0: 0.0, 1: 0.1, 3: 0.3, 4: 0.4, 99: 0.4}),
    (LinearWarmup(4, Cosine(0.4, 10), 0.2), {0: 0.2, 2: 0.3, 4: 0.4, 9: 0.2, 14: 0.0}),
]


@pytest.mark.parametrize(("schedule", "rates"), CASES, ids=lambda case: type(case).__name__)
def test_schedules_have_exact_rates_at_their_bounds(schedule: Schedule, rates: dict[int, float]) -> None:
    assert {version: schedule.at(version) for version in rates} == pytest.approx(rates, abs=1e-15)


@pytest.mark.parametrize("schedule", [case[0] for case in CASES], ids=lambda case: type(case).__name__)
def test_schedules_survive_encoding_as_json(schedule: Schedule) -> None:
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: StepDecay(-1.0), "StepDecay: initial is -1, but must be at least 0"),
        (lambda: StepDecay(0.1, every=0), "StepDecay: every is 0, but must be at least 1"),
        (lambda: Cosine(0.1, 2.5), "Cosine: updates is 2.5, but must be a whole number"),
        (lambda: Piecewise((5, 5), (1.0, 2.0, 3.0)), "must rise"),
        (lambda: Piecewise((5,), (1.0,)), "need 2"),
        (lambda: Piecewise((5,), (1.0, -2.0)), "Piecewise: values is -2"),
        (lambda: Piecewise(5, (1.0,)), "a list of numbers"),
        (lambda: LinearWarmup(5, "cosine"), "a number or a Schedule"),
        (lambda: Polynomial(math.inf, 3), "finite"),
        (lambda: Schedule.from_json({"kind": "Cosine", "initial": 1.0}), "Cosine needs 'updates'"),
        (lambda: Schedule.from_json({"kind": "Adam"}), "no schedule 'Adam'; choose one of Constant, Cosine"),
        (lambda: Schedule.from_json({"kind": "Constant", "value": 1, "x": 2}), "Constant has no setting 'x'"),
        (lambda: Schedule.from_json([1]), "must be an object with a 'kind'"),
    ],
)
def test_an_invalid_value_is_named(make: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make()
