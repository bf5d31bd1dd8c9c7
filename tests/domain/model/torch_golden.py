"""Generate ``golden_optimizers.json``: results of torch.optim for the same gradients. Needs torch, unlike the tests.

``python -m tests.domain.model.torch_golden`` writes the file, with ``--check`` it says how far the file is from torch's
results and changes nothing. The first values and the gradients are the file's own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flightedl.domain.model.optimizers import SGD, Adadelta, Adagrad, Adam, AdamW, Momentum, Optimizer, RMSprop
from flightedl.domain.model.schedules import StepDecay

FILE = Path(__file__).with_name("golden_optimizers.json")

#: Every rule of torch, with and without each of its variants and the weight decay.
RULES: list[Optimizer] = [
    SGD(0.1),
    SGD(0.1, weight_decay=0.01),
    Momentum(0.1, momentum=0.9, weight_decay=0.01),
    Momentum(0.05, momentum=0.8, nesterov=True),
    Momentum(0.05, momentum=0.8, nesterov=True, weight_decay=0.02),
    Adagrad(0.1, initial_accumulator=0.2, weight_decay=0.01),
    Adagrad(0.1),
    Adadelta(),
    Adadelta(0.5, rho=0.8, weight_decay=0.01),
    RMSprop(0.01, alpha=0.95),
    RMSprop(0.01, weight_decay=0.03),
    RMSprop(0.01, momentum=0.7),
    RMSprop(0.01, alpha=0.9, centered=True),
    RMSprop(0.01, alpha=0.9, centered=True, momentum=0.7, weight_decay=0.01),
    Adam(),
    Adam(0.01, weight_decay=0.05),
    Adam(0.02, beta1=0.8, beta2=0.9, amsgrad=True),
    Adam(0.02, amsgrad=True, weight_decay=0.05),
    AdamW(0.01),
    AdamW(0.02, weight_decay=0.1, amsgrad=True),
    AdamW(0.02, weight_decay=0.0),
    Adam(StepDecay(0.1, 0.5, every=2)),
]


def theirs(rule: Optimizer, values: torch.Tensor) -> torch.optim.Optimizer:
    """Return the same rule in torch."""
    common: dict[str, Any] = {"lr": rule.rate_at(0), "weight_decay": rule.weight_decay}
    match rule:
        case SGD():
            return torch.optim.SGD([values], **common)
        case Momentum():
            return torch.optim.SGD([values], momentum=rule.momentum, nesterov=rule.nesterov, **common)
        case Adagrad():
            start = rule.initial_accumulator
            return torch.optim.Adagrad([values], eps=rule.eps, initial_accumulator_value=start, **common)
        case Adadelta():
            return torch.optim.Adadelta([values], rho=rule.rho, eps=rule.eps, **common)
        case RMSprop():
            more = {"alpha": rule.alpha, "eps": rule.eps, "momentum": rule.momentum, "centered": rule.centered}
            return torch.optim.RMSprop([values], **more, **common)
        case Adam():
            kind = torch.optim.AdamW if isinstance(rule, AdamW) else torch.optim.Adam
            betas = (rule.beta1, rule.beta2)
            return kind([values], betas=betas, eps=rule.eps, amsgrad=rule.amsgrad, **common)
    raise NotImplementedError(type(rule).__name__)


def results(rule: Optimizer, dtype: str, start: list[float], gradients: list[list[float]]) -> list[list[float]]:
    """Return the values after each gradient."""
    values = torch.tensor(start, dtype=getattr(torch, dtype), requires_grad=True)
    optimizer = theirs(rule, values)
    found = []
    for version, gradient in enumerate(gradients):
        optimizer.param_groups[0]["lr"] = rule.rate_at(version)
        values.grad = torch.tensor(gradient, dtype=values.dtype)
        optimizer.step()
        found.append(values.detach().tolist())
    return found


def settings(rule: Optimizer) -> dict[str, Any]:
    """Return its JSON without default values."""
    everything = rule.to_json()
    defaults = type(rule)(lr=0.123).to_json()
    return {name: value for name, value in everything.items() if name == "kind" or value != defaults[name]}


def text(golden: dict[str, Any]) -> str:
    """Return the file's text, one line per case."""
    cases = ",\n".join(f"  {json.dumps(case)}" for case in golden["cases"])
    head = ",\n".join(f" {json.dumps(name)}: {json.dumps(golden[name])}" for name in ("source", "start", "gradients"))
    return f'{{\n{head},\n "cases": [\n{cases}\n ]\n}}\n'


def main() -> None:
    """Write the file, or check it."""
    golden = json.loads(FILE.read_text())
    if "--check" in sys.argv[1:]:
        furthest = 0.0
        for case in golden["cases"]:
            rule = Optimizer.from_json(case["optimizer"])
            found = results(rule, case["dtype"], golden["start"], golden["gradients"])
            furthest = max(furthest, float(np.abs(np.array(found) - np.array(case["values"])).max()))
        print(f"{len(golden['cases'])} cases, at most {furthest:g} from torch {torch.__version__}")
        sys.exit(furthest > 1e-6)
    version = torch.__version__.split("+")[0]
    golden["source"] = f"torch {version}, torch.optim, values after each step"
    golden["cases"] = [
        {
            "dtype": dtype,
            "optimizer": settings(rule),
            "values": results(rule, dtype, golden["start"], golden["gradients"]),
        }
        for dtype in ("float32", "float64")
        for rule in RULES
    ]
    FILE.write_text(text(golden))


if __name__ == "__main__":
    main()
