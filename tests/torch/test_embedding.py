"""Embeddings on tables with real pservers in this process, compared with PyTorch's own."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import flightedl as fe
from flightedl.client.tables.table import Table
from flightedl.errors import GradientError, UsageError
from flightedl.torch import Embedding, EmbeddingBag, EmbeddingCollection, Optimizer, batches

from .bench import BenchJob, TorchBench
from .page import JobOfOne, OneByOne


@pytest.fixture
def bench() -> Iterator[TorchBench]:
    with TorchBench() as made:
        yield made


def table_of(job: BenchJob, name: str = "users", dim: int = 3, rule: Any = None, **more: Any) -> Table:
    return job.table(name, dim, optimizer=rule or fe.SGD(1.0), **{"init": fe.Uniform(0.5), **more})


def plain_like(rows: np.ndarray, kind: type[Any] = nn.Embedding, **more: Any) -> Any:
    """Return PyTorch's embedding with these rows."""
    made = kind(*rows.shape, **more)
    with torch.no_grad():
        made.weight.copy_(torch.from_numpy(rows))
        if more.get("padding_idx") is not None:
            made.weight[more["padding_idx"]] = 0
    return made


def rows_in(table: Table, count: int) -> np.ndarray:
    return table.pull(np.arange(count))


def ids_of(count: int, size: tuple[int, ...], below: int = 20) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(below, size, generator=generator) for _ in range(count)]


# --- agreement with PyTorch ---


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (fe.SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (fe.Adagrad(0.1, eps=1e-10), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    ],
    ids=["sgd", "adagrad"],
)
def test_100_steps_of_an_embedding_equal_those_of_torch(
    rule: Any, make: Callable[[Any], torch.optim.Optimizer], bench: TorchBench
) -> None:
    table = table_of(bench.job, rule=rule)
    torch.manual_seed(0)
    ours = nn.Sequential(Embedding(table), nn.Linear(3, 2))
    plain_head = copy.deepcopy(ours[1])
    optimizer = Optimizer(ours, bench.job, rule)
    theirs = nn.Sequential(plain_like(rows_in(table, 20), sparse=True), plain_head)
    reference = make(theirs.parameters())
    for batch, ids in enumerate(ids_of(100, (8, 2))):
        bench.job.begin(batch, len(ids))
        for net, each in ((ours, optimizer), (theirs, reference)):
            each.zero_grad()
            (net(ids) - 1).square().mean().backward()
            each.step()
        bench.job.end()
    torch.testing.assert_close(torch.from_numpy(rows_in(table, 20)), theirs[0].weight.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(ours[1].weight.detach(), theirs[1].weight.detach(), rtol=0, atol=1e-5)


def both_bags(bench: TorchBench, **more: Any) -> tuple[Table, EmbeddingBag, nn.EmbeddingBag, Optimizer]:
    table = table_of(bench.job)
    ours = EmbeddingBag(table, **more)
    optimizer = Optimizer(nn.ModuleDict({"bag": ours}), bench.job, fe.SGD(1.0))
    return table, ours, plain_like(rows_in(table, 20), nn.EmbeddingBag, **more), optimizer


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("shape", ["offsets", "last offset", "table"])
def test_bags_equal_those_of_torch(mode: str, padding_idx: int | None, shape: str, bench: TorchBench) -> None:
    table, ours, theirs, optimizer = both_bags(
        bench, mode=mode, padding_idx=padding_idx, include_last_offset=shape == "last offset"
    )
    ids = torch.tensor([3, 5, 5, 7, 3, 3, 19, 0])
    given: tuple[torch.Tensor, ...] = {
        "table": (ids.reshape(2, 4),),
        # The second bag is empty, and the third contains only padding.
        "offsets": (ids, torch.tensor([0, 4, 4, 6])),
        "last offset": (ids, torch.tensor([0, 4, 4, 6, 8])),
    }[shape]
    bench.job.begin(0)
    found, expected = ours(*given), theirs(*given)
    assert torch.equal(found, expected)
    weights = torch.arange(found.numel()).reshape(found.shape)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    before = rows_in(table, 20)
    optimizer.step()
    bench.job.end()
    np.testing.assert_allclose(before - rows_in(table, 20), theirs.weight.grad.numpy(), rtol=1e-6, atol=1e-6)


def test_weights_of_bags_are_applied_and_have_gradients(bench: TorchBench) -> None:
    _, ours, theirs, _ = both_bags(bench, mode="sum")
    bench.job.begin(0)
    grads = []
    for bag in (ours, theirs):
        weights = torch.tensor([1.0, 2.0, -3.0], requires_grad=True)
        found = bag(torch.tensor([4, 4, 9]), torch.tensor([0, 1]), per_sample_weights=weights)
        found.square().sum().backward()
        grads.append((found.detach(), weights.grad))
    torch.testing.assert_close(grads[0], grads[1])


def test_a_column_of_lists_becomes_bags(bench: TorchBench) -> None:
    _, ours, theirs, _ = both_bags(bench, mode="mean")
    column = pa.array([[1, 2], [], [4, 4, 4]])
    assert torch.equal(ours(column), theirs(torch.tensor([1, 2, 4, 4, 4]), torch.tensor([0, 2, 2])))


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_rows_beyond_a_norm_are_scaled_when_they_are_read(norm_type: float, bench: TorchBench) -> None:
    table = table_of(bench.job)
    net = Embedding(table, max_norm=0.3, norm_type=norm_type)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    rows = rows_in(table, 20)
    ids = torch.arange(20)
    bench.job.begin(0)
    found = net(ids)
    torch.testing.assert_close(found.detach(), plain_like(rows, max_norm=0.3, norm_type=norm_type)(ids).detach())
    found.square().sum().backward()
    optimizer.step()
    bench.job.end()
    norms = np.linalg.norm(rows, norm_type, axis=1)
    assert 0 < (norms > 0.3).sum() < 20
    moved = rows - rows_in(table, 20)
    np.testing.assert_allclose(moved[norms <= 0.3], 2 * rows[norms <= 0.3], rtol=1e-5)
    if norm_type == 2:
        np.testing.assert_allclose(moved[norms > 0.3], 0, atol=1e-5, err_msg="to grow does not make it longer")


# --- rows with and without gradients ---


def test_repeated_ids_and_several_lookups_add_up(bench: TorchBench) -> None:
    table = table_of(bench.job)
    net = Embedding(table)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    before = rows_in(table, 20)
    bench.job.begin(0)
    (net(torch.tensor([1, 1, 2])).sum() + net(torch.tensor([[2], [5]])).sum() + 0 * net([7]).sum()).backward()
    net([9])
    optimizer.step()
    bench.job.end()
    moved = (before - rows_in(table, 20))[:, 0]
    assert moved.round(4).tolist() == [{1: 2, 2: 2, 5: 1}.get(each, 0) for each in range(20)]


def test_padding_reads_its_stored_row_and_gets_no_gradient(bench: TorchBench) -> None:
    tables = [table_of(bench.job, name, unknown=unknown) for name, unknown in (("a", "init"), ("b", "error"))]
    net = nn.ModuleDict({"pad": Embedding(tables[0], padding_idx=0), "other": Embedding(tables[0])})
    strict = Embedding(tables[1], padding_idx=0).eval()
    optimizer = Optimizer(nn.ModuleList([net, strict]), bench.job, fe.SGD(1.0))
    assert strict(torch.tensor([0, 0])).tolist() == [[0, 0, 0]] * 2
    with pytest.raises(UsageError, match="no row for id 7"):
        strict(torch.tensor([0, 7]))
    first = rows_in(tables[0], 1)[0].tolist()
    collection = EmbeddingCollection(dict(net.items()))
    for batch in range(2):
        bench.job.begin(batch)
        optimizer.zero_grad()
        found = collection({"pad": torch.tensor([0, 5]), "other": torch.tensor([[0]])})
        # The first batch creates the row, because another module has a gradient for it.
        expected = [[0.0] * 3, [value - 1 for value in first]][batch]
        assert found["pad"][0].tolist() == pytest.approx(expected, abs=1e-6)
        assert found["other"][0, 0].tolist() == pytest.approx([value - batch for value in first], abs=1e-6)
        (found["pad"].sum() * 8 + found["other"].sum()).backward()
        assert nn.utils.get_total_norm([each.grad for each in net.parameters() if each.grad is not None]) == (
            pytest.approx((3 * 8**2 + 3) ** 0.5)
        )
        optimizer.step()
        bench.job.end()
    np.testing.assert_allclose(rows_in(tables[0], 1)[0], np.array(first) - 2, rtol=1e-6)
    assert tables[0].pull([0, 5], padding_idx=0)[0].tolist() == rows_in(tables[0], 1)[0].tolist()


def test_padding_is_the_stored_row_of_its_own_module(bench: TorchBench) -> None:
    table = table_of(bench.job)
    net = nn.ModuleDict(
        {str(pad): Embedding(table, padding_idx=pad, nulls="padding") for pad in (4, 2)}
        | {"bag": EmbeddingBag(table, padding_idx=2)}
    )
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    before = rows_in(table, 6)
    collection = EmbeddingCollection(dict(net.items()))
    for batch in range(2):
        bench.job.begin(batch)
        optimizer.zero_grad()
        column = pa.array([4, None, 2, 3])
        found = collection({"4": column, "2": column, "bag": torch.tensor([[2, 3]])})
        zero = torch.zeros(3)
        stored = torch.from_numpy(before - 1) if batch else None
        torch.testing.assert_close(found["4"][0].detach(), stored[4] if batch else zero)
        assert torch.equal(found["4"][0], found["4"][1])
        torch.testing.assert_close(found["2"][2].detach(), stored[2] if batch else zero)
        assert torch.equal(found["2"][2], found["2"][1])
        assert torch.equal(found["bag"][0], found["4"][3])
        if not batch:
            (found["4"][[0, 2]].sum() + found["2"][[0, 2]].sum()).backward()
            optimizer.step()
        bench.job.end()
    moved = (before - rows_in(table, 6))[:, 0].round(4).tolist()
    assert moved == [0, 0, 1, 0, 1, 0]


def test_only_padding_creates_no_row(bench: TorchBench) -> None:
    net = nn.Sequential(Embedding(table_of(bench.job), padding_idx=3), nn.Linear(3, 1))
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    net(torch.tensor([3, 3])).sum().backward()
    optimizer.step()
    bench.job.end()
    assert rows_made(bench) == 0


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_divide_gradients_by_the_counts_of_ids(mode: str, bench: TorchBench) -> None:
    table = table_of(bench.job)
    bag = EmbeddingBag(table, mode=mode, scale_grad_by_freq=True, padding_idx=0)
    optimizer = Optimizer(bag, bench.job, fe.SGD(1.0))
    ids = torch.tensor([[1, 1, 2, 0], [2, 3, 0, 0], [1, 4, 4, 4]])
    before = rows_in(table, 6)
    reference = plain_like(before, padding_idx=0, scale_grad_by_freq=True)
    bench.job.begin(0)
    given = bag(ids)
    rows, is_kept = reference(ids), (ids != 0).unsqueeze(2)
    expected = (rows * is_kept).sum(1) / (is_kept.sum(1) if mode == "mean" else 1)
    torch.testing.assert_close(given, expected)
    weights = torch.arange(9.0).reshape(3, 3)
    for each in (given, expected):
        (each * weights).sum().backward()
    optimizer.step()
    bench.job.end()
    np.testing.assert_allclose(before - rows_in(table, 6), reference.weight.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_padding_is_zero_and_has_no_gradient(bench: TorchBench) -> None:
    table = table_of(bench.job)
    net = Embedding(table, padding_idx=0)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    before = rows_in(table, 3)
    bench.job.begin(0)
    found = net(torch.tensor([[0, 1], [2, 0]]))
    assert found[0, 0].tolist() == found[1, 1].tolist() == [0, 0, 0]
    assert torch.equal(found[0, 1], torch.from_numpy(before[1]))
    found.sum().backward()
    optimizer.step()
    bench.job.end()
    assert (before - rows_in(table, 3))[:, 0].round(4).tolist() == [0, 1, 1]
    bench.job.begin(1)
    assert net(torch.tensor([0, 0])).tolist() == [[0, 0, 0]] * 2
    assert net(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2, 3)


def test_strings_and_nulls_are_looked_up(bench: TorchBench) -> None:
    net = Embedding(table_of(bench.job), nulls="padding")
    Optimizer(net, bench.job, fe.SGD(1.0))
    found = net(pa.array(["a", None, "a", "b"]))
    assert found[1].tolist() == [0, 0, 0]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[[0, 3]].detach(), net(["a", "b"]).detach())


def test_frozen_rows_do_not_change_and_may_be_unfrozen(bench: TorchBench) -> None:
    table = table_of(bench.job)
    net = nn.Sequential(Embedding(table), nn.Linear(3, 1))
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    for batch, is_frozen in enumerate((True, False)):
        net[0].requires_grad_(not is_frozen)
        before = rows_in(table, 3)
        bench.job.begin(batch)
        optimizer.zero_grad()
        net(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        bench.job.end()
        assert (before == rows_in(table, 3)).all() == is_frozen


@pytest.mark.parametrize("way", ["eval", "no_grad", "inference", "outside"])
def test_reading_creates_no_row_and_no_parameter(way: str, bench: TorchBench) -> None:
    table = table_of(bench.job)
    net = nn.Sequential(Embedding(table), nn.Linear(3, 1))
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    if way != "outside":
        bench.job.begin(0)
    if way == "eval":
        net.eval()
    with {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(way, contextlib.nullcontext)():
        found = net(torch.tensor([1, 2]))
    if found.requires_grad:
        found.sum().backward()
    assert [name for name, _ in net.named_parameters()] == ["0.rows", "1.weight", "1.bias"]
    optimizer.zero_grad()
    if way != "outside":
        optimizer.step()
        bench.job.end()
    assert rows_made(bench) == 0


def rows_made(bench: TorchBench) -> int:
    return sum(counts.rows for shard in bench.cluster.shards for counts in shard.rows.counts())


def test_training_creates_the_rows_with_a_gradient(bench: TorchBench) -> None:
    net = nn.Sequential(Embedding(table_of(bench.job)), nn.Linear(3, 1))
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    net(torch.tensor([1, 2, 2])).sum().backward()
    optimizer.step()
    bench.job.end()
    assert rows_made(bench) == 2


def test_a_collection_looks_up_all_tables_in_one_round_trip(bench: TorchBench) -> None:
    users, items = table_of(bench.job), table_of(bench.job, "items", 2)
    net = EmbeddingCollection(
        {
            "user": Embedding(users),
            "liked": EmbeddingBag(items, mode="sum", padding_idx=0),
            "item": Embedding(items),
            "unused": Embedding(users),
        }
    )
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    item_rows, user_rows = rows_in(items, 10), rows_in(users, 10)
    before = bench.cluster.shards[0].meter.messages
    bench.job.begin(0)
    lookups = count_lookups(bench)
    found = net(
        {
            "user": torch.tensor([1, 2]),
            "liked": (torch.tensor([5, 0, 5, 6]), torch.tensor([0, 3])),
            "item": torch.tensor([6, 7]),
        }
    )
    assert lookups == [1]
    np.testing.assert_allclose(found["user"].detach(), user_rows[[1, 2]])
    np.testing.assert_allclose(found["liked"].detach(), [2 * item_rows[5], item_rows[6]], rtol=1e-6)
    np.testing.assert_allclose(found["item"].detach(), item_rows[[6, 7]])
    sum(each.sum() for each in found.values()).backward()
    optimizer.step()
    bench.job.end()
    assert bench.cluster.shards[0].meter.messages > before
    moved = (item_rows - rows_in(items, 10))[:, 0].round(4).tolist()
    assert moved == [{5: 2, 6: 2, 7: 1}.get(each, 0) for each in range(10)]


def count_lookups(bench: TorchBench) -> list[int]:
    model, calls = bench.job.trainer.parameters, [0]
    run = model.run

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return run(*args)

    model.run = counted
    return calls


# modes


@pytest.mark.parametrize("mode", [fe.Sync(push_every=2), fe.Async(push_every=2)], ids=["sync", "async"])
def test_rows_of_several_batches_are_one_push(mode: Any, bench: TorchBench) -> None:
    table = table_of(bench.job)
    net = Embedding(table)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0), mode=mode)
    first = rows_in(table, 2)
    moved = []
    for batch in range(4):
        bench.job.begin(batch, records=1 + 2 * (batch % 2))
        optimizer.zero_grad()
        (net(torch.tensor([batch % 2])) * 4).sum().backward()
        optimizer.step()
        bench.job.end()
        moved.append((first - rows_in(table, 2))[:, 0].round(4).tolist())
    # The mean over records: (1 * 4) / 4 of the first id, (3 * 4) / 4 of the second.
    assert moved == [[0, 0], [1, 3], [1, 3], [2, 6]]


def test_each_step_of_a_batch_counts_once(bench: TorchBench) -> None:
    job = JobOfOne(bench)
    table = table_of(job, init=fe.Zeros())
    net = nn.ModuleDict({"one": Embedding(table), "other": Embedding(table)})
    optimizer = Optimizer(net, job, fe.SGD(1.0))
    data = OneByOne(job, [pa.record_batch({"id": [n, n]}) for n in (1, 1, 2) for _ in range(2)], 2)
    for ids in batches(data, "id"):
        optimizer.zero_grad()
        net[("one", "other")[data.step_of_batch]](ids).sum().backward()
        optimizer.step()
    assert rows_in(table, 3)[:, 0].tolist() == [0, -2 * 2 * 2, -2 * 2]


def test_prefetched_rows_cost_no_round_trip(bench: TorchBench) -> None:
    table = table_of(bench.job, init=fe.Zeros())
    net = Embedding(table)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.trainer.parameters.rows.next_ids = lambda: {0: table.asked([2, 1]).distinct}
    bench.job.begin(0)
    net(torch.tensor([1])).sum().backward()
    optimizer.step()
    bench.job.end()
    bench.job.begin(1)
    lookups = count_lookups(bench)
    assert net(torch.tensor([2, 1]))[:, 0].tolist() == [0, -1]
    assert lookups == [0]
    assert net(torch.tensor([1, 2]))[:, 0].tolist() == [-1, 0]
    assert lookups == [1]


def trained_by_four() -> list[bytes]:
    with TorchBench(trainers=4, pservers=2) as bench:
        tables = [table_of(job, rule=fe.Adagrad(0.1)) for job in bench.jobs]
        nets = []
        for table in tables:
            torch.manual_seed(0)
            nets.append(nn.Sequential(Embedding(table), nn.Flatten(), nn.Linear(6, 1)))

        def train(job: BenchJob) -> None:
            number = bench.jobs.index(job)
            optimizer = Optimizer(nets[number], job, fe.Adam(1e-2), mode=fe.Sync(deterministic=True))
            for batch, ids in enumerate(ids_of(5, (4, 2))):
                job.begin(4 * batch + number, 4)
                optimizer.zero_grad()
                nets[number]((ids + number) % 20).square().sum().backward()
                optimizer.step()
                job.end()

        bench.run(train)
        return [rows_in(tables[0], 20).tobytes(), nets[0][2].weight.detach().numpy().tobytes()]


def test_four_deterministic_trainers_get_the_same_bits_twice() -> None:
    assert trained_by_four() == trained_by_four()


def test_two_trainers_share_the_rows() -> None:
    with TorchBench(trainers=2) as bench:
        tables = [table_of(job) for job in bench.jobs]

        def train(job: BenchJob) -> None:
            number = bench.jobs.index(job)
            net = Embedding(tables[number])
            optimizer = Optimizer(net, job, fe.SGD(1.0))
            job.begin(number, records=[3, 1][number])
            (net(torch.tensor([1, 1 + number])) * (1 + number)).sum().backward()
            optimizer.step()
            job.end()

        bench.run(train)
        fresh = tables[0].pull([100])
        moved = rows_in(tables[0], 3)[:, 0]
    with TorchBench() as other:
        table = table_of(other.job)
        Optimizer(Embedding(table), other.job, fe.SGD(1.0))
        assert (table.pull([100]) == fresh).all()
        # (3 * 2 + 1 * 2) / 4 of the first, 1 * 2 / 4 of the second
        assert (rows_in(table, 3)[:, 0] - moved).round(4).tolist() == [0, 2, 0.5]


@pytest.mark.parametrize("mode", [fe.Sync(), fe.Async(), fe.Bounded(staleness=1)], ids=lambda mode: type(mode).__name__)
def test_a_second_batch_sees_the_update_of_the_first_one(mode: Any, bench: TorchBench) -> None:
    table = table_of(bench.job, init=fe.Zeros())
    net = Embedding(table)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0), mode=mode)
    seen = []
    for batch in range(3):
        bench.job.begin(batch)
        optimizer.zero_grad()
        found = net(torch.tensor([1]))
        seen.append(found[0, 0].item())
        found.sum().backward()
        optimizer.step()
        bench.job.end()
    assert seen == [0, -1, -2]


# --- tools of PyTorch ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_float_types_are_trained(dtype: torch.dtype, bench: TorchBench) -> None:
    table = table_of(bench.job)
    net = nn.Sequential(Embedding(table), nn.Linear(3, 1)).to(dtype)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    before = rows_in(table, 2)
    bench.job.begin(0)
    found = net[0](torch.tensor([1]))
    assert found.dtype == dtype
    net[1](found).sum().backward()
    optimizer.step()
    bench.job.end()
    assert (before[1] != rows_in(table, 2)[1]).all()


def test_autocast_works_with_a_scaler_that_skips_overflowing_steps(bench: TorchBench) -> None:
    table = table_of(bench.job, init=fe.Zeros())
    net = nn.Sequential(Embedding(table), nn.Linear(3, 1, bias=False))
    nn.init.ones_(net[1].weight)
    optimizer = Optimizer(net, bench.job, fe.SGD(0.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for batch, factor in enumerate((1.0, float("inf"), 1.0)):
        bench.job.begin(batch)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            rows = net[0](torch.tensor([1, 1]))
            loss = net[1](rows).float().sum() + 0.0
        # Gradients of the rows only.
        scaler.scale(loss + (rows.sum() * (factor - 1) if factor != 1 else 0.0)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        bench.job.end()
    assert rows_in(table, 2)[1].tolist() == [-4.0] * 3
    assert scaler.get_scale() == 2.0


def test_clipping_includes_rows(bench: TorchBench) -> None:
    table = table_of(bench.job, init=fe.Zeros())
    net = nn.ModuleDict({"embedding": Embedding(table, padding_idx=0), "head": nn.Linear(1, 1, bias=False)})
    optimizer = Optimizer(net, bench.job, fe.SGD(0.0))
    bench.job.begin(0)
    (net["embedding"](torch.tensor([0, 1]))[:, 0] * 30).sum().backward()
    net["head"].weight.grad = torch.tensor([[40.0]])
    assert nn.utils.clip_grad_norm_(net.parameters(), 5.0).item() == pytest.approx(50.0)
    optimizer.step()
    bench.job.end()
    assert rows_in(table, 2)[1, 0] == pytest.approx(-3.0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_module_trains_rows(bench: TorchBench) -> None:
    tables = [table_of(bench.job, init=fe.Zeros()), table_of(bench.job, "items", 3, init=fe.Zeros())]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = EmbeddingCollection({"user": Embedding(tables[0])})
            self.item = Embedding(tables[1])
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return ((self.embeddings({"user": ids})["user"] + self.item(ids)) * self.scale).sum()

    net = Net()
    compiled = torch.compile(net, backend="eager")
    optimizer = Optimizer(compiled, bench.job, fe.SGD(0.0))
    assert list(bench.job.trainer.parameters) == ["scale"]
    for batch in range(3):
        bench.job.begin(batch)
        optimizer.zero_grad()
        compiled(torch.tensor([1, 2, 2])).backward()
        optimizer.step()
        bench.job.end()
    for table in tables:
        assert rows_in(table, 3)[:, 0].tolist() == [0, -3, -6]


def test_a_module_with_only_tables_trains(bench: TorchBench) -> None:
    table = table_of(bench.job, init=fe.Zeros())
    net = Embedding(table)
    optimizer = Optimizer(net, bench.job, fe.Adam())
    assert [group["lr"] for group in optimizer.param_groups] == [fe.Adam().lr, 1.0]
    bench.job.begin(0)
    net(torch.tensor([1])).sum().backward()
    optimizer.step()
    bench.job.end()
    assert rows_in(table, 2)[:, 0].tolist() == [0, -1]


def test_a_state_dict_omits_rows(bench: TorchBench) -> None:
    net = nn.Sequential(Embedding(table_of(bench.job)), nn.Linear(3, 1))
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    kept = optimizer.state_dict()
    bench.job.begin(0)
    net(torch.tensor([1])).sum().backward()
    assert list(net.state_dict()) == ["1.weight", "1.bias"]
    net.load_state_dict(net.state_dict())
    optimizer.load_state_dict(kept)
    optimizer.load_state_dict(optimizer.state_dict())
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
    bench.job.end()


def test_rows_in_groups_have_the_settings_of_their_table(bench: TorchBench) -> None:
    net = nn.Sequential(Embedding(table_of(bench.job)), nn.Linear(3, 1))
    optimizer = Optimizer(net, bench.job, fe.SGD(0.5), groups=[{"params": net.parameters(), "lr": 0.25}])
    assert [(len(group["params"]), group["lr"]) for group in optimizer.param_groups] == [(2, 0.25), (1, 1.0)]
    optimizer.param_groups[1]["lr"] = 0.1
    bench.job.begin(0)
    with pytest.raises(UsageError, match=r"lr of group 1 was set to 0.1, but the servers use 1.0"):
        optimizer.step()


def test_a_copy_of_a_module_reads_the_same_table(bench: TorchBench) -> None:
    net = nn.Sequential(Embedding(table_of(bench.job)), nn.Linear(3, 1))
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    net(torch.tensor([1])).sum().backward()
    made = copy.deepcopy(net).eval()
    assert torch.equal(made(torch.tensor([1])), net(torch.tensor([1])))
    assert [name for name, _ in made.named_parameters()] == ["0.rows", "1.weight", "1.bias"]
    optimizer.step()
    bench.job.end()
    with pytest.raises(UsageError, match="cannot be pickled, because the servers have its rows"):
        pickle.dumps(net)


def test_checkpointed_activations_count_once(bench: TorchBench) -> None:
    table = table_of(bench.job, init=fe.Zeros())
    net = Embedding(table)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    torch.utils.checkpoint.checkpoint(
        lambda ids: net(ids).tanh(), torch.tensor([1, 1]), use_reentrant=False
    ).sum().backward()
    optimizer.step()
    bench.job.end()
    assert rows_in(table, 2)[:, 0].tolist() == [0, -2]


def test_lookups_of_a_skipped_batch_are_discarded(bench: TorchBench) -> None:
    table = table_of(bench.job, init=fe.Zeros())
    net = Embedding(table)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    net(torch.tensor([1]))
    bench.job.end()
    assert len(list(net.parameters())) == 1
    bench.job.begin(1)
    net(torch.tensor([2])).sum().backward()
    with pytest.raises(UsageError, match=r"gradients of epoch 1, task 0, batch 1 were not pushed"):
        bench.job.end()
    optimizer.zero_grad()


def test_lookups_of_a_repeated_batch_are_discarded(bench: TorchBench) -> None:
    table = table_of(bench.job, init=fe.Zeros())
    net = Embedding(table)
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    net(torch.tensor([1])).sum().backward()
    # The batch was revoked, so its gradients are not checked.
    bench.job.begin(1)
    net(torch.tensor([2])).sum().backward()
    assert len(list(net.parameters())) == 2
    optimizer.step()
    bench.job.end()
    assert rows_in(table, 3)[:, 0].tolist() == [0, 0, -1]


# --- rejected input ---


def test_a_gradient_that_is_not_finite_is_named_and_nothing_is_pushed(bench: TorchBench) -> None:
    users, items = table_of(bench.job, init=fe.Zeros()), table_of(bench.job, "items", init=fe.Zeros())
    net = nn.ModuleList([Embedding(items), Embedding(users, padding_idx=0)])
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    (net[0](torch.tensor([1])).sum() + net[1](torch.tensor([0, 7])).sum() * float("nan")).backward()
    with pytest.raises(GradientError, match=r"gradient of id 7 of table 'users' has NaN or infinity in epoch 1"):
        optimizer.step()
    optimizer.zero_grad()
    bench.job.end()
    assert not rows_in(items, 2).any()


@pytest.mark.parametrize("mode", [fe.Sync(reduce="sum"), fe.Async(), fe.Sync(reduce="sum", push_every=2)])
@pytest.mark.parametrize("spoilt", ["rows", "dense"])
def test_a_batch_with_a_rejected_gradient_counts_once_when_it_is_repeated(
    mode: Any, spoilt: str, bench: TorchBench
) -> None:
    table = table_of(bench.job, init=fe.Zeros())
    net = nn.ModuleDict({"rows": Embedding(table), "norm": nn.BatchNorm1d(3, momentum=0.5)})
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0), mode=mode)

    def compute(scale: float) -> None:
        rows = net["rows"](torch.tensor([1, 2]))
        # The gradient of both rows is 1, that of the bias 2.
        norm = net["norm"](torch.tensor([[1.0], [3.0]]).expand(2, 3))
        (
            (rows * (scale if spoilt == "rows" else 1)).sum() + norm.sum() * (scale if spoilt == "dense" else 1)
        ).backward()

    bench.job.begin(0)
    current = bench.job.trainer.current
    compute(float("nan"))
    with pytest.raises(GradientError, match="NaN or infinity"):
        optimizer.step()
    bench.job.end()
    assert current.must_repeat
    assert isinstance(current.rejection, GradientError)
    assert net["norm"].running_mean.tolist() == [0.0, 0.0, 0.0], "the value is that of the job"
    bench.job.begin_again(current)
    optimizer.zero_grad()
    for batch in range(2):
        compute(1.0)
        optimizer.step()
        bench.job.end()
        optimizer.zero_grad()
        if not batch:
            bench.job.begin(1)
    assert rows_in(table, 3)[:, 0].tolist() == [0, -2, -2]
    assert net["norm"].bias.tolist() == [-4, -4, -4]
    torch.testing.assert_close(net["norm"].running_mean, torch.full((3,), 2.0 * (1 - 0.5**2)))
    assert net["norm"].num_batches_tracked.item() == 2


def test_gradients_repaired_in_the_same_iteration_are_pushed_with_their_rows(bench: TorchBench) -> None:
    table = table_of(bench.job, init=fe.Zeros())
    net = nn.ModuleDict({"rows": Embedding(table), "norm": nn.BatchNorm1d(1, momentum=0.5)})
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    (net["rows"](torch.tensor([1])).sum() + net["norm"](torch.tensor([[1.0], [3.0]])).sum() * float("inf")).backward()
    with pytest.raises(GradientError, match="'norm"):
        optimizer.step()
    for tensor in net["norm"].parameters():
        tensor.grad.fill_(1.0)
    optimizer.step()
    bench.job.end()
    assert rows_in(table, 2)[:, 0].tolist() == [0, -1]
    assert (net["norm"].bias.item(), net["norm"].running_mean.item()) == (-1, 1)


def test_rows_do_not_change_if_another_gradient_is_not_finite(bench: TorchBench) -> None:
    table = table_of(bench.job, init=fe.Zeros())
    net = nn.Sequential(Embedding(table), nn.Linear(3, 1))
    optimizer = Optimizer(net, bench.job, fe.SGD(1.0))
    bench.job.begin(0)
    net(torch.tensor([1])).sum().backward()
    net[1].weight.grad.fill_(float("inf"))
    with pytest.raises(GradientError, match=r"gradient of '1.weight' has NaN or infinity"):
        optimizer.step()
    bench.job.end()
    assert not rows_in(table, 2).any()


def test_a_table_of_another_job_is_rejected(bench: TorchBench) -> None:
    with TorchBench() as other:
        table = table_of(other.job)
        Optimizer(Embedding(table), other.job, fe.SGD(1.0))
        mine = table_of(bench.job, "items")
        with pytest.raises(UsageError, match="table 'users' belongs to another job"):
            Optimizer(nn.ModuleList([Embedding(mine), Embedding(table)]), bench.job, fe.SGD(1.0))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda _: Embedding(5), r"5 is not a table: pass the result of job.table\(name, dim, ...\)"),
        (lambda table: Embedding(table, max_norm=-1.0), "max_norm is -1.0, but must be greater than 0"),
        (lambda table: Embedding(table, max_norm="1"), "max_norm is '1', but must be greater than 0"),
        (lambda table: EmbeddingBag(table, mode="first"), "mode is 'first', but must be one of sum, mean, max"),
        (lambda table: EmbeddingBag(table, mode="max", scale_grad_by_freq=True), "cannot be combined with mode 'max'"),
        (lambda _: EmbeddingCollection({}), "at least one fe.torch.Embedding"),
        (lambda table: Embedding(table)([1]), "no fe.torch.Optimizer has.*call eval"),
    ],
)
def test_invalid_arguments_of_an_embedding_are_rejected(
    make: Callable[[Table], Any], text: str, bench: TorchBench
) -> None:
    with pytest.raises(UsageError, match=text):
        make(table_of(bench.job))


@pytest.mark.parametrize(
    ("look", "text"),
    [
        (lambda net: net["one"](torch.ones(2)), "ids of table 'users' are float32"),
        (lambda net: net["one"](torch.ones(2, dtype=torch.bfloat16)), "ids of table 'users' are bfloat16"),
        (lambda net: net["one"](torch.ones(2, dtype=torch.bool)), "ids of table 'users' are bool"),
        (lambda net: net["one"](pa.array([1, None])), "have 1 nulls: see nulls='padding'"),
        (lambda net: net["one"](pa.array([[1], [2]])), "are lists, that is, bags: use fe.torch.EmbeddingBag"),
        (lambda net: net["bag"](torch.tensor([1, 2])), "the bags of table 'users' are invalid: offsets"),
        (lambda net: net["bag"](torch.tensor([1, 2]), torch.tensor([1])), "the bags of table 'users' are invalid"),
        (lambda net: net["bag"](torch.tensor([1, 2]), torch.tensor([0, 2, 1])), "invalid: .* must not decrease"),
        (lambda net: net["bag"](torch.tensor([1, 2]), torch.tensor([0, 3])), "invalid: .* must not exceed 2"),
        (lambda net: net["bag"](torch.tensor([1, 2]), torch.tensor([0.0, 1.5])), "offsets must be whole numbers, not"),
        (lambda net: net["bag"](pa.array([[1], [2]]), torch.tensor([0, 1])), "column of lists, which needs no offsets"),
        (lambda net: net["one"](torch.eye(2, dtype=torch.int64).to_sparse()), "are sparse or nested, but must be a de"),
        (
            lambda net: net["bag"](torch.tensor([[1, 2]]), None, torch.ones(1, 2)),
            "are invalid: .*per_sample_weights",
        ),
        (lambda net: net["all"]({"z": [1]}), "there is no embedding 'z', only one"),
    ],
)
def test_invalid_ids_are_rejected(look: Callable[[Any], Any], text: str, bench: TorchBench) -> None:
    table = table_of(bench.job)
    net = nn.ModuleDict({"one": Embedding(table), "bag": EmbeddingBag(table)})
    net["all"] = EmbeddingCollection({"one": net["one"]})
    Optimizer(net, bench.job, fe.SGD(1.0))
    with pytest.raises(UsageError, match=text):
        look(net)


def test_settings_that_apply_only_to_rows_are_rejected(bench: TorchBench) -> None:
    net = nn.Sequential(Embedding(table_of(bench.job)), nn.Linear(3, 1))
    groups = [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[1].parameters()}]
    with pytest.raises(UsageError, match=r"sets lr, but contains only embeddings on tables.*job.table"):
        Optimizer(net, bench.job, fe.SGD(1.0), groups=groups)
    Optimizer(net, bench.job, fe.SGD(1.0), groups=[{"params": net[0].parameters()}, groups[1]])


def test_a_torch_embedding_is_a_parameter_unless_it_rewrites_itself(bench: TorchBench) -> None:
    with pytest.raises(UsageError, match=r"embedding of '0.weight' has max_norm, .* use a table"):
        Optimizer(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), bench.job, fe.SGD(1.0))
    Optimizer(nn.Sequential(nn.Embedding(4, 2, sparse=True)), bench.job, fe.SGD(1.0))
    assert list(bench.job.trainer.parameters) == ["0.weight"]


@pytest.mark.parametrize("mode", [fe.Sync(), fe.Async()], ids=["sync", "async"])
def test_rows_that_are_pushed_later_have_the_rate_that_is_shown(mode: Any, bench: TorchBench) -> None:
    rule = fe.SGD(fe.StepDecay(1.0, 0.5, every=2))
    table = table_of(bench.job, rule=rule)
    net = nn.ModuleDict({"users": Embedding(table), "head": nn.Linear(3, 1)})
    optimizer = Optimizer(net, bench.job, rule, mode=mode)
    rates = []
    for batch in range(8):
        bench.job.begin(batch)
        optimizer.zero_grad()
        loss = net["head"](torch.ones(3)).sum()
        if uses_rows := batch in {4, 7}:
            before = rows_in(table, 1)
            loss = loss + net["users"](torch.tensor([0])).sum()
        loss.backward()
        shown = [group["lr"] for group in optimizer.param_groups]
        optimizer.step()
        bench.job.end()
        assert shown == [0.5 ** (batch // 2)] * 2
        if uses_rows:
            np.testing.assert_allclose(before - rows_in(table, 1), shown[1], rtol=1e-5)
            rates.append(shown[1])
    assert rates == [0.25, 0.125]
