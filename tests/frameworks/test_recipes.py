"""The documented recipes for accelerate, Lightning, JAX and optax run unchanged with the real packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from flightedl.errors import UsageError

from ..torch.bench import TorchBench
from ..torch.page import JobOfOne, prepare, run_blocks

# Warnings of these packages are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("package", ["accelerate", "lightning"])
def test_a_recipe_for_pytorch_runs(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch)
    names: dict[str, object] = {"__name__": "__main__"}
    run_blocks("torch.md", "torch", names, only=1)
    run_blocks("torch.md", package, names)


def test_the_recipe_for_jax_and_optax_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch)
    run_blocks("frameworks.md", "jax")


#: Common first attempts: preparing the data too, or a training_step with a batch.
AHEAD = {
    "accelerate": """
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
data = fe.torch.IterableDataset(job.dataset("data/*.parquet", batch_size=50), transform=features)
loader = DataLoader(data, batch_size=None)
net, optimizer, loader = accelerator.prepare(net, fe.torch.Optimizer(net, job, fe.Adam(lr=1e-2)), loader)
for x, label in loader:
    optimizer.zero_grad()
    accelerator.backward(functional.cross_entropy(net(x), label))
    optimizer.step()
""",
    "lightning": """
import lightning


class Lit(lightning.LightningModule):
    def __init__(self, net, job):
        super().__init__()
        self.net, self.job = net, job

    def training_step(self, batch, number):
        x, label = batch
        return functional.cross_entropy(self.net(x), label)

    def configure_optimizers(self):
        return fe.torch.Optimizer(self.net, self.job, fe.Adam(lr=1e-2))


trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
trainer.fit(Lit(net, job), fe.torch.IterableDataset(job.dataset("data/*.parquet", batch_size=50), transform=features))
""",
}


@pytest.mark.parametrize(
    ("package", "text"),
    [
        ("accelerate", r"accelerate's prepared loaders request a batch ahead.*to accelerator.prepare"),
        ("lightning", r"Lightning requests a batch ahead.*next\(dataloader_iter\)"),
    ],
)
def test_scripts_that_prefetch_are_rejected_before_the_first_push(
    package: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path, monkeypatch)
    names: dict[str, object] = {"__name__": "__main__"}
    run_blocks("torch.md", "torch", names, only=1)
    with TorchBench() as bench:
        names["job"] = job = JobOfOne(bench)
        with pytest.raises(UsageError, match=text):
            exec(AHEAD[package], names)
        assert job.trainer is not None
        assert set(job.trainer.parameters.versions.values()) == {0}
