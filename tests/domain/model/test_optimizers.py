import json
from pathlib import Path

import numpy as np
import pytest

from flightedl.domain.model.optimizers import (
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Delta,
    Ftrl,
    Momentum,
    Optimizer,
    RMSprop,
    exact,
)
from flightedl.domain.model.schedules import Cosine, LinearWarmup, StepDecay
from flightedl.errors import UsageError
from tests.support.reference_updates import initial_slots, update

GOLDEN = json.loads((Path(__file__).parent / "golden_optimizers.json").read_text())
ALL = [
    SGD(0.1, overrides={"*.running_mean": Delta(), "*.bias": {"lr": 0.2}}),
    Delta(),
    Momentum(0.1, nesterov=True),
    Adagrad(initial_accumulator=0.5),
    Adadelta(),
    RMSprop(centered=True, momentum=0.5),
    Adam(LinearWarmup(10, Cosine(0.1, 100)), amsgrad=True, clip_value=1.0),
    AdamW(clip_norm=2.0, overrides={"*.bias": {"lr": StepDecay(0.1), "weight_decay": 0}}),
    Ftrl(0.1, l1=0.1),
    LAMB(0.1),
]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['optimizer']['kind']}-{case['dtype']}")
def test_the_reference_equals_torch(case: dict) -> None:
    """The expected values are from torch: ``torch_golden.py`` in this directory regenerates them."""
    optimizer = Optimizer.from_json(case["optimizer"])
    values = np.array(GOLDEN["start"], case["dtype"])
    slots = initial_slots(optimizer, values.size, values.dtype)
    tolerance = 1e-6 if case["dtype"] == "float32" else 1e-13
    for version, (gradient, expected) in enumerate(zip(GOLDEN["gradients"], case["values"], strict=True)):
        update(optimizer, values, np.array(gradient, case["dtype"]), slots, version, version)
        np.testing.assert_allclose(values, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_golden_values_cover_every_rule_and_variant_of_torch(dtype: str) -> None:
    asked = [Optimizer.from_json(case["optimizer"]) for case in GOLDEN["cases"] if case["dtype"] == dtype]
    assert {type(one) for one in asked} == {type(one) for one in ALL} - {Delta, Ftrl, LAMB}
    for kind in {type(one) for one in asked}:
        assert {one.weight_decay > 0 for one in asked if type(one) is kind} == {False, True}
    assert {one.nesterov for one in asked if isinstance(one, Momentum)} == {False, True}
    assert len({(one.centered, one.momentum > 0) for one in asked if isinstance(one, RMSprop)}) == 4
    assert {(type(one), one.amsgrad) for one in asked if isinstance(one, Adam)} == {
        *((Adam, False), (Adam, True), (AdamW, False), (AdamW, True))
    }


def test_ftrl_follows_its_paper() -> None:
    """Algorithm 1 of McMahan et al. 2013, one coordinate at a time in Python floats; l2 as TensorFlow counts it."""
    alpha, beta, l1, l2 = 0.3, 0.5, 0.2, 0.1
    optimizer = Ftrl(alpha, l1=l1, l2=l2 / 2, beta=beta, initial_accumulator=0.0)
    values = np.zeros(4)
    slots = initial_slots(optimizer, 4, "float64")
    z, n, w = [0.0] * 4, [0.0] * 4, [0.0] * 4
    for version, gradient in enumerate(np.random.default_rng(1).normal(size=(8, 4))):
        update(optimizer, values, gradient, slots, version, version)
        for i, g in enumerate(gradient):
            sigma = ((n[i] + g * g) ** 0.5 - n[i] ** 0.5) / alpha
            z[i] += g - sigma * w[i]
            n[i] += g * g
            sign = 1 if z[i] > 0 else -1
            w[i] = 0.0 if abs(z[i]) <= l1 else -(z[i] - sign * l1) / ((beta + n[i] ** 0.5) / alpha + l2)
        np.testing.assert_allclose(values, w, rtol=1e-12)
    assert 0.0 in Ftrl_after_small_gradients()


def Ftrl_after_small_gradients() -> list[float]:  # noqa: N802
    values, optimizer = np.array([0.5, 0.0]), Ftrl(0.1, l1=10.0)
    update(optimizer, values, np.array([1e-3, 5.0]), initial_slots(optimizer, 2, "float64"), 0, 0)
    return values.tolist()


def test_ftrl_changes_nothing_at_a_rate_of_zero() -> None:
    values, optimizer = np.ones(3), Ftrl(LinearWarmup(2, 0.1))
    slots = initial_slots(optimizer, 3, "float64")
    update(optimizer, values, np.ones(3), slots, 0, 0)
    assert values.tolist() == [1, 1, 1]
    assert slots[1].tolist() == [0, 0, 0]


def test_lamb_follows_its_paper() -> None:
    optimizer = LAMB(0.1, weight_decay=0.05)
    values, gradient = np.array([3.0, -4.0]), np.array([0.5, 2.0])
    slots = initial_slots(optimizer, 2, "float64")
    update(optimizer, values, gradient, slots, 0, 0)
    # After one step, m' is the gradient and v' its square: the direction is its sign, plus the decay.
    direction = gradient / (np.abs(gradient) + 1e-6) + 0.05 * np.array([3.0, -4.0])
    expected = np.array([3.0, -4.0]) - 0.1 * 5.0 / np.linalg.norm(direction) * direction
    np.testing.assert_allclose(values, expected, rtol=1e-12)


def test_gradients_are_scaled_then_clipped_then_decayed() -> None:
    values = np.array([10.0, 10.0, 10.0])
    update(SGD(1.0, clip_value=1.0, weight_decay=0.1), values, np.array([8.0, -8.0, 1.0]), (), 0, 0, scale=0.5)
    np.testing.assert_allclose(values, [10 - 2.0, 10 - 0.0, 10 - 1.5])


def test_rates_follow_version_and_factor() -> None:
    values = np.zeros(1)
    optimizer = SGD(StepDecay(1.0, 0.5, every=2))
    for version in range(4):
        update(optimizer, values, np.ones(1), (), version, version, rate_factor=0.5)
    assert values[0] == -(0.5 + 0.5 + 0.25 + 0.25)


@pytest.mark.parametrize("optimizer", ALL, ids=lambda optimizer: type(optimizer).__name__)
def test_optimizers_survive_encoding_as_json(optimizer: Optimizer) -> None:
    data = json.loads(json.dumps(optimizer.to_json()))
    assert Optimizer.from_json(data) == optimizer
    assert Optimizer.from_json(data).to_json() == data
    assert hash(Optimizer.from_json(data)) == hash(optimizer)


def test_the_json_is_a_contract() -> None:
    assert Momentum(1).to_json() == {
        "kind": "Momentum",
        "weight_decay": 0.0,
        "clip_value": None,
        "clip_norm": None,
        "overrides": {},
        "lr": 1.0,
        "momentum": 0.9,
        "nesterov": False,
    }


def test_slots_depend_on_the_settings() -> None:
    names = {repr(o): [slot.name for slot in o.slots] for o in (Adam(), Adam(amsgrad=True), RMSprop(), SGD(1.0))}
    assert list(names.values()) == [
        ["average", "square_average"],
        ["average", "square_average", "largest_square_average"],
        ["square_average"],
        [],
    ]
    (square_sum,) = initial_slots(Adagrad(initial_accumulator=0.25), 3, "float32")
    assert (square_sum.dtype, square_sum.tolist()) == (np.float32, [0.25] * 3)


def test_overrides_match_name_patterns() -> None:
    optimizer = Adam(
        0.1,
        clip_norm=3.0,
        overrides={
            "*.bias": {"weight_decay": 0.5, "lr": 0.2},
            "head.*": {"lr": 0.3},
            "a[0]": {"eps": 1.0},
            "layer?.w": {"amsgrad": True},
        },
    )
    assert optimizer.for_parameter("body.weight") == Adam(0.1, clip_norm=3.0)
    assert optimizer.for_parameter("body.bias") == Adam(0.2, clip_norm=3.0, weight_decay=0.5)
    assert optimizer.for_parameter("head.bias") == Adam(0.3, clip_norm=3.0, weight_decay=0.5)
    assert optimizer.for_parameter("a[0]").eps == 1.0
    assert optimizer.for_parameter("a0").eps == 1e-8
    assert optimizer.for_parameter("layer3.w").amsgrad
    assert not optimizer.for_parameter("layer33.w").amsgrad
    optimizer.check_names(["x.bias", "head.w", "a[0]", "layer1.w"])
    with pytest.raises(UsageError, match=r"overrides\['head.\*'\] matches none of the 3 parameters, such as x.bias"):
        optimizer.check_names(["x.bias", "a[0]", "layer1.w"])


def test_an_exact_name_matches_only_itself() -> None:
    for name in ("a*", "a?", r"a\*", r"a\b", "a"):
        optimizer = SGD(0.1, overrides={exact(name): {"lr": 0.5}})
        changed = [
            each for each in ("a", "ab", "a*", "a?", r"a\*", r"a\b", r"a\\b") if optimizer.for_parameter(each).lr == 0.5
        ]
        assert changed == [name]
    assert SGD(0.1, overrides={r"a\b*": {"lr": 0.5}}).for_parameter(r"a\bc").lr == 0.5


def test_new_values_are_pushed_to_parameters_that_are_assigned() -> None:
    rules = {"a": Delta(), "b": Delta(assign="mean"), "c": Delta(assign="latest"), "d": {"lr": 0.5}}
    assert SGD(0.1, overrides=rules).assigned("abcde") == {"b", "c"}
    assert Delta(assign="latest").assigned("ab") == {"a", "b"}
    with pytest.raises(UsageError, match="clip_value limits differences"):
        Delta(assign="mean", clip_value=1.0)


def test_a_setting_cannot_change() -> None:
    source = {"*": {"lr": 0.5}}
    optimizer = SGD(0.1, overrides=source)
    source["*"]["lr"] = 7
    assert optimizer.for_parameter("w").lr == 0.5
    with pytest.raises(AttributeError):
        optimizer.lr = 1.0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SGD(-1), "SGD: lr is -1, but must be at least 0"),
        (lambda: SGD("fast"), "SGD: lr is 'fast', but must be a number or a Schedule"),
        (lambda: SGD(True), "SGD: lr is True"),
        (lambda: Adam(beta1=1.0), "Adam: beta1 is 1, but must be at least 0 and below 1"),
        (lambda: Adam(amsgrad=1), "Adam: amsgrad is 1, but must be True or False"),
        (lambda: Adam(eps=float("nan")), "Adam: eps is nan, but must be a finite number"),
        (lambda: Momentum(0.1, clip_value=0), "Momentum: clip_value is 0, but must be above 0"),
        (lambda: SGD(0.1, overrides={"*": {"momentum": 1}}), "can set weight_decay, clip_value, lr, not 'momentum'"),
        (lambda: SGD(0.1, overrides={"*": {"clip_norm": 1}}), "not 'clip_norm'"),
        (lambda: SGD(0.1, overrides={"*": {"lr": -1}}), r"SGD: overrides\['\*'\]: lr is -1"),
        (lambda: SGD(0.1, overrides={"*": 3}), "must map name patterns to settings"),
        (lambda: SGD(0.1, overrides={"*": Adam(clip_norm=1)}), "must have neither clip_norm nor overrides"),
        (lambda: Delta(weight_decay=0.1), "belongs to the optimizer that computes the differences"),
        (lambda: SGD(0.1, overrides=[]), "a mapping"),
        (lambda: Optimizer.from_json({"kind": "Sgd", "lr": 1}), "no optimizer 'Sgd'; choose one of Adadelta, Adagrad"),
        (lambda: Optimizer.from_json({"kind": "Cosine", "initial": 1, "updates": 3}), "no optimizer 'Cosine'"),
        (lambda: Optimizer.from_json({"kind": "SGD"}), "SGD needs 'lr'"),
        (lambda: Optimizer.from_json({"kind": "SGD", "lr": {"kind": "Adam"}}), "a number or a Schedule"),
        (lambda: Optimizer.from_json({"kind": "SGD", "lr": 1, "beta": 2}), "SGD has no setting 'beta'"),
    ],
)
def test_an_invalid_value_is_named(make: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make()
