"""Random modules, optimizers and groups, trained by servers and by PyTorch, which must agree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import flightedl as fe
from flightedl.torch import Embedding, EmbeddingBag, Optimizer

from .bench import TorchBench

IDS = 6
Made = tuple[Any, Callable[[Any], torch.optim.Optimizer]]


def rates() -> st.SearchStrategy[float]:
    return st.sampled_from([0.5, 0.03125])


@st.composite
def optimizers(draw: st.DrawFn) -> Made:
    """Return a rule of the servers, and a function that makes PyTorch's optimizer with the same settings."""
    lr, decay = draw(rates()), draw(st.sampled_from([0.0, 0.25]))
    common = {"lr": lr, "weight_decay": decay}
    # With a small eps, an update divides rounding errors by each other.
    eps = {"eps": 2.0**-6}
    kind, flag = (
        draw(st.sampled_from(["sgd", "momentum", "adagrad", "adadelta", "rmsprop", "adam", "adamw"])),
        draw(st.booleans()),
    )
    betas = draw(st.sampled_from([(0.9, 0.999), (0.5, 0.75)]))
    adam = {"beta1": betas[0], "beta2": betas[1], "amsgrad": flag, **eps}
    optim = torch.optim
    match kind:
        case "sgd":
            return fe.SGD(**common), lambda p: optim.SGD(p, **common)
        case "momentum":
            more = {"momentum": 0.5, "nesterov": flag}
            return fe.Momentum(**common, **more), lambda p: optim.SGD(p, **common, **more)
        case "adagrad":
            start = 0.5 * flag
            return (
                fe.Adagrad(**common, **eps, initial_accumulator=start),
                lambda p: optim.Adagrad(p, **common, **eps, initial_accumulator_value=start),
            )
        case "adadelta":
            return fe.Adadelta(**common, **eps, rho=0.5), lambda p: optim.Adadelta(p, **common, **eps, rho=0.5)
        case "rmsprop":
            more = {"centered": flag, "momentum": 0.5 * draw(st.booleans()), **eps}
            return fe.RMSprop(**common, **more), lambda p: optim.RMSprop(p, **common, **more)
        case "adam":
            return fe.Adam(**common, **adam), lambda p: optim.Adam(p, **common, betas=betas, amsgrad=flag, **eps)
        case _:
            return fe.AdamW(**common, **adam), lambda p: optim.AdamW(p, **common, betas=betas, amsgrad=flag, **eps)


@st.composite
def lookups(draw: st.DrawFn, *, is_bag: bool) -> tuple[Any, ...]:
    """Return the arguments of a module's ``forward``: repeated ids, empty bags, and every form of bags."""
    flat = torch.tensor(draw(st.lists(st.integers(0, IDS - 1), min_size=1, max_size=8)))
    if not is_bag:
        return (draw(st.sampled_from([flat, flat.reshape(1, -1, 1), flat[0], flat[:0], flat.int()])),)
    if draw(st.booleans()):
        return (flat.reshape(1, -1).repeat(2, 1),)
    cuts = draw(st.lists(st.integers(0, len(flat)), max_size=3))
    return flat, torch.tensor([0, *sorted(cuts)])


@st.composite
def forms(draw: st.DrawFn) -> tuple[bool, dict[str, Any], list[tuple[Any, ...]]]:
    """Return whether a module is a bag, its settings, and the arguments of three calls."""
    is_bag = draw(st.booleans())
    more: dict[str, Any] = {"padding_idx": draw(st.sampled_from([None, 0, 3]))}
    if is_bag:
        more["mode"] = draw(st.sampled_from(["sum", "mean", "max"]))
        more["include_last_offset"] = draw(st.booleans())
    else:
        more["scale_grad_by_freq"] = draw(st.booleans())
    calls = draw(st.lists(lookups(is_bag=is_bag), min_size=3, max_size=3))
    if more.get("include_last_offset"):
        calls = [(each[0], torch.cat([each[1], torch.tensor([len(each[0])])])) if each[1:] else each for each in calls]
    if more.get("mode") == "sum":
        calls = [
            each
            if draw(st.booleans())
            else (each[0], each[1] if each[1:] else None, torch.ones(each[0].shape).cumsum(-1))
            for each in calls
        ]
    return is_bag, more, calls


def trained(
    bench: TorchBench, ours: nn.Module, optimizer: Any, theirs: nn.Module, reference: Any, calls: list[Any]
) -> None:
    for batch, call in enumerate(calls):
        bench.job.begin(batch)
        for net, each in ((ours, optimizer), (theirs, reference)):
            each.zero_grad()
            net["head"].requires_grad_(batch != 1)
            (net["head"](net["rows"](*call)) - 1).square().sum().backward()
            each.step()
        bench.job.end()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(forms(), optimizers(), rates(), st.booleans())
def test_torch_embeddings_are_trained_as_by_torch(form: Any, made: Made, lr: float, has_groups: bool) -> None:
    (is_bag, more, calls), (rule, make) = form, made
    torch.manual_seed(0)
    kind = nn.EmbeddingBag if is_bag else nn.Embedding
    ours = nn.ModuleDict({"rows": kind(IDS, 2, **more), "head": nn.Linear(2, 2)})
    theirs = copy.deepcopy(ours)
    groups = [
        [{"params": [*net["rows"].parameters()], "lr": lr}, {"params": [*net["head"].parameters()]}]
        for net in (ours, theirs)
    ]
    with TorchBench() as bench:
        optimizer = Optimizer(ours, bench.job, rule, groups=groups[0] if has_groups else None)
        reference = make(groups[1] if has_groups else theirs.parameters())
        trained(bench, ours, optimizer, theirs, reference, calls)
        for name, value in theirs.named_parameters():
            torch.testing.assert_close(ours.get_parameter(name), value, rtol=1e-4, atol=1e-4, msg=name)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(forms(), rates(), st.sampled_from(["sgd", "adagrad"]))
def test_rows_of_tables_are_trained_like_torch_embeddings(form: Any, lr: float, kind: str) -> None:
    is_bag, more, calls = form
    rule = fe.SGD(lr) if kind == "sgd" else fe.Adagrad(lr, eps=2.0**-6)
    torch.manual_seed(0)
    with TorchBench(pservers=2) as bench:
        table = bench.job.table("t", 2, optimizer=rule, init=fe.Uniform(0.5))
        ours = nn.ModuleDict({"rows": (EmbeddingBag if is_bag else Embedding)(table, **more), "head": nn.Linear(2, 2)})
        optimizer = Optimizer(ours, bench.job, rule)
        plain = (nn.EmbeddingBag if is_bag else nn.Embedding)(IDS, 2, **more)
        with torch.no_grad():
            plain.weight.copy_(torch.from_numpy(table.pull(np.arange(IDS))))
            if more["padding_idx"] is not None:
                plain.weight[more["padding_idx"]] = 0
        theirs = nn.ModuleDict({"rows": plain, "head": copy.deepcopy(ours["head"])})
        make = torch.optim.SGD if kind == "sgd" else partial(torch.optim.Adagrad, eps=2.0**-6)
        reference = make(theirs.parameters(), lr=lr)
        trained(bench, ours, optimizer, theirs, reference, calls)
        rows = table.pull(np.arange(IDS), padding_idx=more["padding_idx"])
        torch.testing.assert_close(torch.from_numpy(rows), plain.weight.detach(), rtol=1e-4, atol=1e-4)


def test_both_kinds_of_modules_are_compared() -> None:
    """A strategy that draws only one kind would prove nothing about the other."""
    found: set[tuple[bool, Any]] = set()

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(forms())
    def collect(form: Any) -> None:
        found.add((form[0], form[1].get("mode")))

    collect()
    assert found >= {(False, None), (True, "sum"), (True, "mean"), (True, "max")}
