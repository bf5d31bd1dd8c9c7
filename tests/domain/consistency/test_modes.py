import json
from collections.abc import Callable

import pytest

from flightedl.domain.consistency.modes import Async, Bounded, Mode, Sync
from flightedl.domain.model.optimizers import SGD, Adam, AdamW, Optimizer
from flightedl.errors import UsageError

MODES = [
    Sync(),
    Sync("sum", backup=2),
    Sync(deterministic=True),
    Async(),
    Async(4, 2, staleness_scaled=True),
    Bounded(3),
    Sync(push_every=3),
]


@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_modes_survive_encoding_as_json(mode: Mode) -> None:
    assert Mode.from_json(json.loads(json.dumps(mode.to_json()))) == mode


def test_the_json_is_a_contract() -> None:
    assert Sync().to_json() == {
        "kind": "Sync",
        "reduce": "mean",
        "backup": 0,
        "deterministic": False,
        "push_every": 1,
    }
    assert Async().to_json() == {
        "kind": "Async",
        "push_every": 1,
        "pull_every": 1,
        "staleness_scaled": False,
        "reduce": "mean",
    }
    assert Bounded(3).to_json() == {"kind": "Bounded", "staleness": 3}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Sync(push_every=2, backup=1), "push_every cannot be combined with deterministic or backup"),
        (lambda: Sync(push_every=2, deterministic=True), "push_every cannot be combined"),
        (lambda: Sync("max"), "Sync: reduce is 'max', but must be one of 'mean', 'sum'"),
        (lambda: Sync(["mean"]), "Sync: reduce"),
        (lambda: Sync(backup=-1), "Sync: backup is -1, but must be at least 0"),
        (lambda: Sync(backup=1, deterministic=True), "set backup to 0"),
        (lambda: Sync(deterministic=1), "True or False"),
        (lambda: Async(push_every=0), "Async: push_every is 0, but must be at least 1"),
        (lambda: Async(pull_every=True), "a whole number"),
        (lambda: Bounded(-1), "Bounded: staleness is -1"),
        (lambda: Mode.from_json({"kind": "SGD", "lr": 1}), "no mode 'SGD'; choose one of Async, Bounded, Sync"),
        (lambda: Mode.from_json({"kind": "Mode"}), "no mode 'Mode'"),
        (lambda: Mode.from_json(None), "'kind'"),
    ],
)
def test_an_invalid_value_is_named(make: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make()


def test_a_mode_or_optimizer_may_be_chosen_by_its_name_or_class() -> None:
    assert Mode.chosen("async") == Async()
    assert Mode.chosen("Sync") == Sync()
    assert Mode.chosen(Async) == Async()
    assert Mode.chosen(Bounded(2)) == Bounded(2)
    assert Optimizer.chosen("adam") == Adam()
    assert Optimizer.chosen(AdamW) == AdamW()


@pytest.mark.parametrize(
    ("choose", "text"),
    [
        (lambda: Optimizer.chosen("sgd"), "SGD needs 'lr': write SGD(lr=...) with a value for it"),
        (lambda: Optimizer.chosen(SGD), "SGD needs 'lr'"),
        (lambda: Mode.chosen("bounded"), "Bounded needs 'staleness'"),
        (lambda: Optimizer.chosen("adma"), "there is no optimizer 'adma'; choose one of Adadelta, Adagrad, Adam"),
        (lambda: Optimizer.chosen(0.1), "there is no optimizer 0.1; choose one of"),
        (lambda: Optimizer.chosen(Sync()), "there is no optimizer Sync("),
        (lambda: Mode.chosen(Adam), "there is no mode <class"),
        (lambda: Mode.chosen(Mode), "there is no mode <class"),
        (lambda: Mode.chosen({"kind": "Sync"}), "there is no mode {'kind': 'Sync'}"),
    ],
)
def test_an_impossible_choice_is_one_sentence(choose: Callable[[], object], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose()
    assert text in str(caught.value)
