"""A position in the data is sufficient to resume, without any other state of the previous start."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flightedl as fe
from flightedl.errors import UsageError
from tests.support.etcd_server import EtcdServer

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(120)]

RECORDS = 300


def test_a_position_is_resumed_with_another_batch_size_and_a_new_master(
    etcd: EtcdServer, job_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"id": range(RECORDS)}), path, row_group_size=20)
    seen: Counter[int] = Counter()
    state = None
    for job, starts in ((job_name, ((8, 5), (16, 4))), (f"{job_name}-new", ((32, None),))):
        # etcd has no keys of a job with another name.
        with fe.local(pservers=0, job=job, etcd=etcd.address) as cluster:
            for batch_size, count in starts:
                with cluster.connect() as session:
                    data = session.dataset(path, batch_size=batch_size, shuffle=True, seed=3, group="auto")
                    if state is not None:
                        data.load_state_dict(state)
                    for batch in islice(data, count):
                        assert batch.num_rows <= batch_size
                        seen.update(batch["id"].to_pylist())
                    state = data.state_dict()
                    assert data.is_over == (count is None)
    assert seen == Counter(range(RECORDS))
    assert "flightedl: a global batch of 16 records mixes records of about 15 of 15 chunks" in capsys.readouterr().err


def test_options_that_a_group_cannot_have_are_rejected(etcd: EtcdServer, job_name: str, tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"id": range(RECORDS)}), path)
    with fe.local(pservers=0, job=job_name, etcd=etcd.address) as cluster, cluster.connect() as job:
        for more, sentence in (
            ({"follow": True}, "follow is not available for the ranks of a group"),
            ({"steps_per_batch": 2}, "steps_per_batch is not available for the ranks of a group"),
            ({"explicit_done": True}, "explicit_done is not available for the ranks of a group"),
            ({"remainder": "keep"}, "remainder is 'keep', but must be one of split, drop, pad"),
            ({"group": None, "remainder": "pad"}, r"options of a group were given \(remainder\): leave them out"),
            ({"group": None, "lanes": 4, "shuffle_bytes": 9}, r"given \(lanes\)"),
            ({"group": None, "shuffle_bytes": 9}, "shuffle_bytes= applies to files that are read with shuffle=True"),
            ({"group": None, "remainder": "split", "lanes": None, "readers": 1}, "readers= are the processes"),
            ({"records_per_task": 20}, "records_per_task is not available for the ranks of a group"),
            ({"global_batch": 8}, "give either batch_size, or global_batch"),
            ({"global_batch": 0, "batch_size": None}, "global_batch is 0"),
            ({"global_batch": 2, "batch_size": None, "group": (1, 3)}, "must be at least 3, the number of ranks"),
            ({"lanes": 3}, "lanes is 3, but must divide the global batch of 8 records"),
            ({"group": "torchft", "lanes": 2}, 'group="torchft" has no lanes: leave it out'),
            ({"group": "torch"}, "group is 'torch'"),
            ({"group": "torchft", "remainder": "pad"}, 'group="torchft" has no remainder'),
            ({"group": (3, 2)}, "a rank is from 0"),
        ):
            with pytest.raises(UsageError, match=sentence):
                job.dataset(path, **({"group": "auto", "batch_size": 8} | more))
        with pytest.raises(UsageError, match="fewer records"):
            job.dataset(path, batch_size=RECORDS, group=(0, 2), remainder="drop")
