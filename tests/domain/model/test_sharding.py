import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import (
    BLOCK_BYTES,
    ELEMENTS_LIMIT,
    MINIMUM_ELEMENTS,
    Block,
    ShardPlan,
    block_limit,
    plan_shards,
    runs_of,
)
from flightedl.errors import NotFoundError, UsageError


def blocks_of(plan: ShardPlan, name: str) -> list[Block]:
    """Return the blocks of a parameter by rising start."""
    return [plan.block(number) for number in plan.block_range(name)]


def resnet50() -> list[ParameterSpec]:
    """25,557,032 elements in 161 parameters, as torchvision declares them."""
    specs = [("conv1.weight", (64, 3, 7, 7)), ("bn1.weight", (64,)), ("bn1.bias", (64,))]
    channels = 64
    for layer, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for number in range(count):
            name = f"layer{layer}.{number}"
            shapes = [(width, channels, 1, 1), (width, width, 3, 3), (width * 4, width, 1, 1)]
            for index, shape in enumerate(shapes, start=1):
                specs += [(f"{name}.conv{index}.weight", shape)]
                specs += [(f"{name}.bn{index}.{kind}", shape[:1]) for kind in ("weight", "bias")]
            if number == 0:
                specs += [(f"{name}.downsample.0.weight", (width * 4, channels, 1, 1))]
                specs += [(f"{name}.downsample.1.{kind}", (width * 4,)) for kind in ("weight", "bias")]
            channels = width * 4
    specs += [("fc.weight", (1000, 2048)), ("fc.bias", (1000,))]
    return [ParameterSpec(name, shape) for name, shape in specs]


def bert_base() -> list[ParameterSpec]:
    """109,482,240 elements in 199 parameters: BERT base, uncased, with its pooler."""
    specs = [("word.weight", (30522, 768)), ("position.weight", (512, 768)), ("type.weight", (2, 768))]
    specs += [("norm.weight", (768,)), ("norm.bias", (768,))]
    for layer in range(12):
        linears = {"query": (768, 768), "key": (768, 768), "value": (768, 768), "output": (768, 768)}
        linears |= {"norm1": (768,), "intermediate": (3072, 768), "output2": (768, 3072), "norm2": (768,)}
        for name, shape in linears.items():
            specs += [(f"{layer}.{name}.weight", shape), (f"{layer}.{name}.bias", shape[:1])]
    specs += [("pooler.weight", (768, 768)), ("pooler.bias", (768,))]
    return [ParameterSpec(name, shape) for name, shape in specs]


def giant_and_tiny() -> list[ParameterSpec]:
    """One parameter of 200 MB, and 3,000 of 4 kB around it."""
    tiny = [ParameterSpec(f"tiny{number}", (1000,)) for number in range(3000)]
    return [*tiny[:1500], ParameterSpec("giant", (100_000, 512)), *tiny[1500:]]


MODELS = {"resnet50": resnet50, "bert_base": bert_base, "giant_and_tiny": giant_and_tiny}


def check(plan: ShardPlan, block_bytes: int = BLOCK_BYTES) -> None:
    """Every element of every parameter lies in exactly one block, and every block keeps its bounds."""
    items = np.array([p.item_size_bytes for p in plan.parameters])[plan.block_parameters]
    sizes = plan.block_stops - plan.block_starts
    assert (sizes > 0).all()
    assert (sizes <= ELEMENTS_LIMIT).all()
    fits = sizes * items <= block_bytes
    assert (fits | (sizes < 2 * MINIMUM_ELEMENTS)).all()
    assert (np.diff(plan.block_parameters) >= 0).all()
    expected_start = 0
    for number, parameter in enumerate(plan.parameters):
        blocks = blocks_of(plan, parameter.name)
        expected_start = 0
        for block in blocks:
            assert (block.parameter, block.start) == (number, expected_start)
            assert 0 <= block.pserver < plan.pserver_count
            assert block.size >= MINIMUM_ELEMENTS or len(blocks) == 1
            assert block.start % 16 == 0
            expected_start = block.stop
        assert expected_start == parameter.size
    shards = [plan.blocks_of(pserver) for pserver in range(plan.pserver_count)]
    assert sorted(np.concatenate(shards)) == list(range(plan.block_count))
    assert sum(plan.block_bytes) == sum(p.size_bytes for p in plan.parameters)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pservers", [1, 2, 3, 4, 7, 8, 16])
def test_real_models_are_balanced(model: str, pservers: int) -> None:
    plan = plan_shards(MODELS[model](), pservers)
    check(plan)
    sizes = np.array([plan.block_bytes[plan.blocks_of(pserver)].sum() for pserver in range(pservers)])
    assert sizes.max() <= 1.05 * sizes.mean()
    assert sizes.min() >= 0.95 * sizes.mean()


def test_the_models_are_the_real_ones() -> None:
    assert (len(resnet50()), sum(p.size for p in resnet50())) == (161, 25_557_032)
    assert (len(bert_base()), sum(p.size for p in bert_base())) == (199, 109_482_240)


def test_neighbors_stay_together() -> None:
    plan = plan_shards(bert_base(), 4)
    pairs = [(p.name, p.name.replace("weight", "bias")) for p in plan.parameters if len(p.shape) == 2 and "." in p.name]
    pairs = [(weight, bias) for weight, bias in pairs if bias in plan.numbers_by_name]
    owners = [(blocks_of(plan, weight)[-1].pserver, blocks_of(plan, bias)[0].pserver) for weight, bias in pairs]
    assert len(pairs) == 73
    assert sum(first == second for first, second in owners) >= 65


def test_a_few_layers_are_distributed_over_all_pservers() -> None:
    plan = plan_shards(bert_base(), 4)
    layer = [b.pserver for p in plan.parameters if p.name.startswith("5.") for b in blocks_of(plan, p.name)]
    assert set(layer) == {0, 1, 2, 3}


def test_pieces_are_equal_instead_of_leaving_a_small_rest() -> None:
    plan = plan_shards([ParameterSpec("w", (393_216 + 16_000,))], 1)
    assert [block.size for block in blocks_of(plan, "w")] == [204_608, 204_608]


def test_a_power_of_two_model_gets_full_messages() -> None:
    plan = plan_shards([ParameterSpec("w", (16 << 20,))], 2)
    assert plan.block_count == 32
    assert {block.size for block in blocks_of(plan, "w")} == {524_288}
    assert plan.block_bytes[plan.blocks_of(1)].sum() == 32 << 20


def test_a_small_parameter_is_never_split() -> None:
    plan = plan_shards([ParameterSpec("w", (2 * MINIMUM_ELEMENTS - 1,))], 4)
    assert plan.block_count == 1


shapes = st.one_of(
    st.just(()), st.tuples(st.integers(1, 3_000_000)), st.tuples(st.integers(1, 900), st.integers(1, 900))
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(shapes, st.sampled_from(["float32", "float64"])), min_size=1, max_size=30),
    st.integers(1, 12),
    st.sampled_from([BLOCK_BYTES, 1 << 16, 100_000]),
)
def test_every_element_is_in_exactly_one_block(
    declared: list[tuple[tuple[int, ...], str]], pservers: int, block_bytes: int
) -> None:
    parameters = [ParameterSpec(f"p{number}", shape, dtype) for number, (shape, dtype) in enumerate(declared)]
    plan = plan_shards(parameters, pservers, block_bytes=block_bytes)
    check(plan, block_bytes)
    total = sum(p.size_bytes for p in parameters)
    rounds = -(-total // (pservers * (4 << 20)))
    move = max(MINIMUM_ELEMENTS * 8 + 128, total // (64 * pservers * rounds) + 128)
    for pserver in range(pservers):
        assert abs(plan.block_bytes[plan.blocks_of(pserver)].sum() - total / pservers) <= rounds * 2 * move


@pytest.mark.parametrize(
    ("mib", "pservers", "limit", "messages"),
    [
        (1, 1, 1 << 20, 1),
        (4, 1, 1 << 20, 4),
        (5, 1, 5 << 18, 4),
        (8, 1, 2 << 20, 4),
        (9, 1, 2 << 20, 5),
        (8, 2, 1 << 20, 4),
    ],
)
def test_a_small_share_is_divided_into_four_messages(mib: int, pservers: int, limit: int, messages: int) -> None:
    big = plan_shards([ParameterSpec("w", (mib << 18,))], pservers)
    small = plan_shards([ParameterSpec(f"p{number}", (1 << 8,)) for number in range(mib << 10)], pservers)
    for plan in (big, small):
        assert block_limit(plan.parameters, pservers) == limit
        for index in range(pservers):
            runs = runs_of(plan, index)
            assert len(runs) == messages
            assert max(4 * sum(plan.block(number).size for number in run) for run in runs) <= limit


def test_the_plan_does_not_change_between_releases() -> None:
    mixed = [*resnet50(), ParameterSpec("scale", (), "float64"), ParameterSpec("wide", (3, 100_001), "float64")]
    plan = plan_shards(mixed, 3)
    assert (plan.version, plan.block_count, plan.hash) == (3, 209, "bd643fc1ed86d3aa7c4b4820300cd422")
    assert plan_shards(mixed, 3).hash == plan.hash


def test_different_plans_have_different_hashes() -> None:
    parameters = [ParameterSpec("a", (10, 3)), ParameterSpec("b", (3,))]
    others = [
        ([ParameterSpec("a", (3, 10)), ParameterSpec("b", (3,))], 1),
        ([ParameterSpec("a", (10, 3), "float64"), ParameterSpec("b", (3,))], 1),
        ([ParameterSpec("c", (10, 3)), ParameterSpec("b", (3,))], 1),
        (parameters[::-1], 1),
        (parameters, 2),
    ]
    hashes = {plan_shards(parameters, 1).hash} | {plan_shards(specs, count).hash for specs, count in others}
    assert len(hashes) == 6


def test_a_hundred_thousand_parameters_are_planned() -> None:
    plan = plan_shards([ParameterSpec(f"p{number}", (1000,)) for number in range(100_000)], 8)
    assert plan.block_count == 100_000
    assert plan.block(99_999).stop == 1000


def test_impossible_plans_are_refused() -> None:
    parameter = ParameterSpec("w", (3,))
    with pytest.raises(UsageError, match="two parameters named 'w'"):
        plan_shards([parameter, parameter], 1)
    with pytest.raises(UsageError, match="this job has 0 pservers, but a model needs at least one"):
        plan_shards([parameter], 0)
    with pytest.raises(UsageError, match="at least one parameter"):
        plan_shards([], 1)
    plan = plan_shards([parameter], 2)
    for lookup in (
        lambda: plan.block(1),
        lambda: plan.block(-1),
        lambda: plan.blocks_of(2),
        lambda: plan.block_range("v"),
    ):
        with pytest.raises(NotFoundError):
            lookup()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("", (1,)), "name"),
        (("x" * 300, (1,)), "name"),
        (("w", (3, 0)), "without elements"),
        (("w", (2.5,)), "whole numbers"),
        (("w", (3,), "int32"), "convert it to one of float32, float64, float16, bfloat16"),
    ],
)
def test_an_invalid_parameter_is_refused(arguments: tuple, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ParameterSpec(*arguments)


def test_a_parameter_survives_json() -> None:
    parameter = ParameterSpec("layer/w", (3, 4), "float64")
    assert ParameterSpec.from_json(parameter.to_json()) == parameter
    assert (parameter.size, parameter.size_bytes, parameter.storage_dtype) == (12, 96, "float64")
    assert ParameterSpec("scalar", ()).size == 1
    with pytest.raises(UsageError, match="must be a list"):
        ParameterSpec.from_json({"name": "w", "shape": 3, "dtype": "float32"})
    with pytest.raises(UsageError, match="name, shape and dtype"):
        ParameterSpec.from_json({"name": "w"})
