"""Responses of the job's web page: its files and its updates, with nothing from elsewhere."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Iterator

import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.master.effects import Kind
from flightedl.master.history import History, progress_of
from flightedl.master.journal import Journal
from flightedl.master.page.answers import JobPage
from flightedl.messages.status import StatusReply, TaskCounts, TrainerStatus
from flightedl.process.http_page import Asked, HttpPage

STATUS = StatusReply(
    job="demo",
    state="training",
    epoch=1,
    epochs=4,
    tasks=TaskCounts(done=5, total=10),
    metrics={"loss": 0.5},
    trainers=[TrainerStatus(trainer="<b>t</b>", generation=1)],
)


@pytest.fixture
def journal() -> Journal:
    journal = Journal(7, SystemClock())
    journal.add(Kind.MASTER_LEADS, "master", "a master leads")
    return journal


@pytest.fixture
def page(journal: Journal) -> JobPage:
    page = JobPage(lambda: STATUS, journal, SystemClock())
    page.look()
    return page


@pytest.fixture
def port(page: JobPage) -> Iterator[int]:
    with contextlib.closing(HttpPage("page", "127.0.0.1", 0, page.answer)) as served:
        yield served.port


def get(port: int, path: str) -> tuple[int, dict[str, str], bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()


@pytest.mark.parametrize("path", ["/", "/page.css", "/page.js"])
def test_the_files_of_the_page_load_nothing_from_elsewhere(port: int, path: str) -> None:
    status, headers, body = get(port, path)
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    text = body.decode().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|innerHTML|eval\(", text)


def test_every_element_that_the_script_uses_is_on_the_page(port: int) -> None:
    html, script = get(port, "/")[2].decode(), get(port, "/page.js")[2].decode()
    wanted = set(re.findall(r'\$\("(\w+)"\)', script)) | set(re.findall(r'table\("(\w+)"', script))
    assert len(wanted) > 8
    assert wanted <= set(re.findall(r'id="([\w-]+)"', html))


def test_fields_that_the_script_reads_are_in_the_updates(port: int) -> None:
    script = get(port, "/page.js")[2].decode()
    read = set(re.findall(r"\bstatus\.(\w+)", script))
    assert read <= set(StatusReply.__struct_fields__)


def test_the_status_is_available_to_programs(port: int) -> None:
    status, headers, body = get(port, "/status.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body)["job"] == "demo"
    assert get(port, "/../etc/passwd")[0] == 404


def test_a_reader_gets_repeated_updates_and_each_event_once(page: JobPage, journal: Journal) -> None:
    closing = threading.Event()
    parts = page.answer(Asked("/stream", "", closing)).body
    assert not isinstance(parts, bytes)
    first = json.loads(next(parts).removeprefix(b"data: "))
    assert [event["kind"] for event in first["events"]] == ["master_leads"]
    assert first["curves"]["loss"][0][1] == 0.5
    assert first["status"]["trainers"][0]["trainer"] == "<b>t</b>"
    journal.add(Kind.EPOCH_DONE, "", "epoch is done")
    threading.Timer(0.05, closing.set).start()
    assert list(parts) == []
    second = page.answer(Asked("/stream", "", threading.Event())).body
    assert b"epoch_done" in next(iter(second))  # type: ignore[arg-type]


def test_closing_a_page_ends_its_streams(page: JobPage) -> None:
    served = HttpPage("page", "127.0.0.1", 0, page.answer)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=5)) as connection:
        connection.request("GET", "/stream")
        reply = connection.getresponse()
        assert reply.readline().startswith(b"data: ")
        served.close()
        reply.read()


def test_readers_of_the_page_do_not_block_others(port: int) -> None:
    with contextlib.ExitStack() as stack:
        statuses = []
        for _ in range(12):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            stack.enter_context(contextlib.closing(connection))
            connection.request("GET", "/stream")
            statuses.append(connection.getresponse().status)
        assert statuses.count(200) == 8
        assert get(port, "/status.json")[0] == 200


def test_curves_have_few_points_at_any_duration() -> None:
    history, now = History(), 0.0
    for _ in range(20_000):
        if history.is_due(now):
            history.add(STATUS, now, now)
        now += 2.0
    points = history.curves()["loss"]
    assert 100 < len(points) <= 240
    assert points[0][0] == 0.0
    assert points[-1][0] > 0.95 * now


def test_progress_covers_all_epochs() -> None:
    assert progress_of(STATUS) == 0.375
    assert progress_of(StatusReply(job="a", state="waiting")) == 0.0
    assert progress_of(StatusReply(job="a", state="done", epoch=4, epochs=4)) == 1.0
