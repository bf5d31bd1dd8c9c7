"""Processes of a job as shown by ``flightedl status``."""

from __future__ import annotations

from msgspec.structs import replace

from flightedl.messages.status import ConsumerStatus, GroupStatus, ServerStatus, StatusReply, TableCounts, TrainerStatus
from flightedl_tools.status import facts, processes, rows_of


def shown(server: ServerStatus) -> list[str]:
    table = processes(StatusReply(job="demo", state="training", pservers=[server], pservers_desired=1))
    return [str(next(iter(column.cells))) for column in table.columns]


def test_rejected_calls_are_counted_by_code_except_usual_ones() -> None:
    server = ServerStatus(
        index=0,
        address="h:1",
        generation=7,
        state="serving",
        blocks=2,
        lowest_version=3,
        highest_version=4,
        size_bytes=2_000_000,
        refused_calls={"not_ready": 90, "message": 2, "gradient": 1},
    )
    versions = "3-4 (2 blocks, 2.0 MB, 3 calls refused: 1 gradient, 2 message)"
    assert shown(server) == ["pserver-0", "h:1", "7", "serving", versions]


def test_the_lag_of_a_standby_is_shown() -> None:
    server = ServerStatus(index=0, address="h:1", generation=7, state="serving", standby_lag_s=0.44)
    assert shown(server)[3] == "serving, standby 0.4 s behind"
    server = ServerStatus(index=0, address="h:1", generation=7, state="serving", standby="h:2")
    assert shown(server)[3] == "serving, standby without a copy"


def test_a_pserver_is_shown_with_its_process_if_that_has_another_number() -> None:
    server = ServerStatus(index=0, address="h:1", generation=7, state="serving", process="pserver-3")
    assert shown(server)[0] == "pserver-0 (process pserver-3)"
    assert shown(replace(server, process="pserver-0"))[0] == "pserver-0"


def test_a_trainer_is_shown_with_its_launcher_name_and_process() -> None:
    trainers = [
        TrainerStatus(trainer="h-31-aa", generation=8, name="trainer-1", host="h", pid=31),
        TrainerStatus(trainer="h-77-bb", generation=7, name="trainer-0", host="h", pid=77),
        TrainerStatus(trainer="k-5-cc", generation=9, host="k", pid=5),
    ]
    master = ServerStatus(index=0, address="h:1", generation=2, state="serving", pid=12)
    table = processes(StatusReply(job="demo", state="training", master=master, trainers=trainers))
    names, places = (list(column.cells) for column in table.columns[:2])
    assert names == ["master", "k-5-cc", "trainer-0", "trainer-1"]
    assert places == ["h:1 pid 12", "k pid 5", "h pid 77, h-77-bb", "h pid 31, h-31-aa"]


def test_the_transport_of_a_trainers_values_is_shown() -> None:
    trainers = [
        TrainerStatus(trainer=f"t{number}", generation=number, host="h", pservers=of, shared_pservers=shared)
        for number, (shared, of) in enumerate([(2, 2), (1, 2), (0, 2), (0, 0)])
    ]
    table = processes(StatusReply(job="demo", state="training", trainers=trainers))
    assert list(table.columns[-1].cells) == [
        "0 records, values in shared memory",
        "0 records, values in shared memory to 1 of 2 pservers",
        "0 records, values over TCP",
        "0 records",
    ]


def test_blocks_of_a_silent_pserver_are_not_shown() -> None:
    server = ServerStatus(index=0, address="h:1", generation=7, state="not reached")
    assert shown(server) == ["pserver-0", "h:1", "7", "not reached", ""]


def test_a_table_is_shown_with_its_missing_data() -> None:
    some = TableCounts(name="users", rows=1200, size_bytes=3 << 20)
    assert rows_of(some) == "1,200 rows, 3.0 MiB"
    more = some.plus(TableCounts(name="users", reads=8, hits=6, refused=2, waiting=1000))
    assert rows_of(more) == (
        "1,200 rows, 3.0 MiB, 75% of reads found one, 1,000 wait for admission, 2 refused: no memory"
    )


def test_the_start_of_a_group_is_shown() -> None:
    group = GroupStatus(phase="running", ranks=4, starts=2, incarnation=9)
    reply = StatusReply(job="demo", state="training", group=group)
    assert ("group", "4 ranks, running, start 2") in facts(reply)
    assert "group" not in dict(facts(StatusReply(job="demo", state="training")))


def test_consumers_are_shown_with_their_lag() -> None:
    found = [
        ConsumerStatus(name="serving", host="h", pid=31, behind=2, age_s=0.44),
        ConsumerStatus(name="files", host="k", pid=5),
    ]
    shown = facts(StatusReply(job="demo", state="training", consumers=found))
    assert [value for name, value in shown if name == "consumer"] == [
        "serving on h, pid 31, 2 changes and 0.4 s behind",
        "files on k, pid 5, has no complete copy yet",
    ]
