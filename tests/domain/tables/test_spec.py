"""Declarations of tables."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from flightedl.domain.model.initial import Normal, Uniform, Zeros
from flightedl.domain.model.optimizers import LAMB, SGD, Adagrad, Adam, Ftrl, Momentum
from flightedl.domain.model.schedules import Constant, StepDecay
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.optimizers import ROW_OPTIMIZERS, RowAdagrad, RowAdam
from flightedl.domain.tables.placement import BUCKETS, buckets_of
from flightedl.domain.tables.spec import TableSpec, have_room
from flightedl.errors import UsageError

SPECS = [
    TableSpec("users", 16, RowAdagrad(lr=0.05), init=Uniform(0.01)),
    TableSpec(
        "items", 3, Adam(StepDecay(0.1)), Constant(-1.0), "float16", "nearest", 7, "zero", 2, evict=Evict(max_rows=5)
    ),
    TableSpec("text", 1, RowAdam(), Normal(0.1, 1.0), "bfloat16", unknown="error", admission="sketch"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_specs_survive_encoding_as_json(spec: TableSpec) -> None:
    assert TableSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"dim": 0}, "TableSpec: dim is 0, but must be at least 1"),
        ({"dim": 2.5}, "dim is 2.5, but must be a whole number"),
        ({"name": ""}, "must be text of 1 to 256 characters"),
        ({"name": 3}, "TableSpec: name is 3, but must be text"),
        ({"optimizer": LAMB(0.1)}, "table 'users': tables do not support LAMB; choose one of SGD, Momentum"),
        ({"optimizer": SGD(0.1, overrides={"*": {"lr": 1}})}, "tables do not support overrides"),
        ({"optimizer": SGD(0.1, clip_norm=1)}, "tables do not support clip_norm"),
        ({"optimizer": Adam(amsgrad=True)}, "do not support Adam with amsgrad"),
        ({"init": 0.5}, "init is 0.5, but must be a Init"),
        ({"dtype": "float64"}, "dtype is 'float64', but must be one of 'float32'"),
        ({"unknown": "?"}, "unknown is '\\?', but must be one of 'init', 'zero', 'error'"),
        ({"admit_after": 0}, "admit_after is 0"),
    ],
)
def test_an_invalid_setting_is_named(given: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        TableSpec(**{"name": "users", "dim": 16, "optimizer": SGD(0.1), **given})  # type: ignore[arg-type]


def test_eviction_needs_a_rule() -> None:
    with pytest.raises(UsageError, match="needs a rule: unused_versions, unused_epochs, max_rows"):
        Evict()
    with pytest.raises(UsageError, match="max_rows is 0, but must be at least 1"):
        Evict(max_rows=0)


def test_a_limit_is_shared_by_buckets() -> None:
    spec = TableSpec("users", 16, SGD(0.1), evict=Evict(max_rows=1000, max_bytes=1 << 20))
    assert spec.row_words == 2 + 1 + 16
    assert spec.bucket_limit == 1
    assert TableSpec("users", 16, SGD(0.1), evict=Evict(max_bytes=7600 * 1024)).bucket_limit == 100
    assert TableSpec("users", 16, SGD(0.1), evict=Evict(unused_epochs=2)).bucket_limit is None


def test_a_constant_may_be_negative_as_an_initial_value_but_not_as_a_rate() -> None:
    assert TableSpec("users", 2, SGD(0.1), Constant(-1)).init == Constant(-1.0)
    with pytest.raises(UsageError, match="SGD: lr is -1, but must be at least 0"):
        SGD(Constant(-1))


@pytest.mark.parametrize("kind", ROW_OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_a_row_has_space_for_its_slots(kind: type) -> None:
    words = {SGD: 0, Momentum: 16, Adagrad: 16, RowAdagrad: 1, Adam: 33, RowAdam: 18, Ftrl: 32}
    assert TableSpec("users", 16, kind(lr=0.1)).row_words == 2 + 16 + words[kind]


def test_initial_values_depend_only_on_seed_table_id_and_element() -> None:
    specs = [TableSpec(name, 4, SGD(0.1), Uniform(0.5), seed=seed) for name in ("a", "b") for seed in (0, 1)]
    rows = {tuple(spec.init.first_values(spec.key, row, 4)) for spec in specs for row in (0, 1, 2**64 - 1)}
    assert len(rows) == 12
    assert len({value for row in rows for value in row}) == 48
    assert specs[0].init.first_values(specs[0].key, 5, 2) == specs[0].init.first_values(specs[0].key, 5, 4)[:2]


def test_initial_values_have_the_declared_distribution() -> None:
    uniform = [value for row in range(500) for value in Uniform(2.0).first_values(3, row, 8)]
    assert -2 <= min(uniform) < -1.98
    assert 1.98 < max(uniform) < 2
    assert abs(sum(uniform) / 4000) < 0.1
    assert abs(sum(value**2 for value in uniform) / 4000 - 4 / 3) < 0.1
    normal = [value for row in range(500) for value in Normal(2.0, 1.0).first_values(3, row, 7)]
    assert abs(sum(normal) / 3500 - 1) < 0.15
    assert abs(sum((value - 1) ** 2 for value in normal) / 3500 - 4) < 0.4
    assert Zeros().first_values(1, 2, 3) == [0, 0, 0]


def test_adagrad_of_tables_is_the_dense_one() -> None:
    assert TableSpec("users", 2, Adagrad()).optimizer == Adagrad()


def test_each_bucket_has_room_for_its_first_new_ids() -> None:
    ids, existing = np.arange(3000, dtype=np.uint64), np.arange(5000, 5400, dtype=np.uint64)
    assert have_room(SPECS[0], ids, existing).all()
    limited = TableSpec("limited", 1, RowAdam(), evict=Evict(max_rows=2 * BUCKETS))
    rows = Counter(buckets_of(existing, limited.salt).tolist())
    expected = []
    for bucket in buckets_of(ids, limited.salt).tolist():
        rows[bucket] += 1
        expected.append(rows[bucket] <= 2)
    assert have_room(limited, ids, existing).tolist() == expected
    assert True in expected
    assert False in expected
