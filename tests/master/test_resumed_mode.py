"""A changed mode is part of a checkpoint."""

from __future__ import annotations

import msgspec

from flightedl.domain.checkpoint.manifest import Manifest, ShardFile
from flightedl.domain.consistency.modes import Async, Mode, Sync
from flightedl.domain.master.differences import require_same
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.model.sharding import plan_for
from flightedl.master.resuming import redeclared
from flightedl.messages.base import encode
from flightedl.messages.declarations import DeclaredModel, JobDeclaration, ModelDeclaration, ParameterDeclaration


def test_a_resumed_job_continues_in_its_mode() -> None:
    plan = plan_for([ParameterSpec("w", (40_000,))], 1)
    declared = ModelDeclaration(
        parameters=[ParameterDeclaration(name="w", shape=[40_000], dtype="float32")],
        optimizer=SGD(lr=1.0).to_json(),
        mode=Sync().to_json(),
    )
    changed = Async(push_every=4)
    model = DeclaredModel(declaration=declared, pservers=1, plan_hash=plan.hash, mode=changed.to_json())
    file = ShardFile(
        index=0,
        generation=7,
        name="c-1/shard-0-of-1.arrow",
        size_bytes=1,
        hash="0" * 32,
        blocks=plan.block_count,
        lowest_version=0,
        highest_version=0,
    )
    manifest = Manifest(
        job="j",
        number=1,
        plan_hash=plan.hash,
        pserver_count=1,
        cut_for=1,
        round=None,
        created_s=0.0,
        shards=(file,),
        declaration=msgspec.Raw(encode(JobDeclaration(model=model))),
    )
    resumed = redeclared(Manifest.decode(manifest.encode()), 3).model
    assert resumed is not None
    assert Mode.from_json(resumed.present_mode) == changed
    # The script still has the mode with which the job began.
    require_same("model", resumed.declaration, declared)
