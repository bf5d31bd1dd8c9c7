"""Logged values, their files and pictures: few points, and no loss except the last moments of a killed process."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from flightedl.client.progress import LoggedValues, require_files
from flightedl.config import TrainerSettings
from flightedl.curves.drawing import draw
from flightedl.curves.files import PointFile, read_points, write_merged
from flightedl.curves.gathering import Gathering, Point
from flightedl.curves.merging import curves_of
from flightedl.curves.tensorboard import EventFile
from flightedl.curves.terminal import chart
from flightedl.curves.vector import svg
from flightedl.errors import DataError, NotFoundError, UsageError
from flightedl.launch.results import keep_curves
from flightedl_tools.main import run_command_line
from tests.support.clock import FakeClock


def point(trainer: str, at: float, records: int, value: float, name: str = "loss", weight: float = 1.0) -> Point:
    return Point(at, trainer, 1, records // 10, records, name, value, weight)


def test_a_point_has_the_weighted_mean_and_the_progress_of_its_interval() -> None:
    gathering = Gathering("t", 0.0)
    gathering.add({"loss": 1.0}, 10, 1, 0.01, 100.01)
    gathering.add({"loss": 4.0}, 20, 1, 0.02, 100.02, 1, 10)
    assert gathering.take(0.05) == []
    gathering.add({"loss": 9.0}, 1, 2, 0.2, 100.2, 2, 30)
    assert gathering.take(0.2) == [Point(100.02, "t", 1, 1, 10, "loss", 3.0, 30.0)]
    assert gathering.take(0.21, is_end=True) == [Point(100.2, "t", 2, 2, 30, "loss", 9.0, 1.0)]


def test_a_repeated_batch_counts_again() -> None:
    gathering = Gathering("t", 0.0)
    for value in (1.0, 2.0):
        gathering.add({"loss": value}, 10, 1, 0.01, 1.0)
    (found,) = gathering.take(0.02, is_end=True)
    assert (found.value, found.weight) == (1.5, 20.0)


def test_a_week_produces_few_points() -> None:
    gathering, now, count = Gathering("t", 0.0), 0.0, 0
    while now < 7 * 86_400:
        gathering.add({"loss": 1.0}, 1, 1, now, now)
        count += len(gathering.take(now))
        now += 0.1 if now < 200 else 20.0
    assert 2_000 < count < 12_000


def test_points_are_read_in_order_of_time_without_broken_lines(tmp_path: Path) -> None:
    first, second = PointFile(tmp_path, "a"), PointFile(tmp_path, "b")
    first.append([point("a", 1.0, 10, 0.5)])
    second.append([point("b", 2.0, 10, math.inf)])
    first.append([point("a", 3.0, 20, 0.25, 'odd, "name"')])
    with (tmp_path / "metrics" / "a.csv").open("a") as file:
        file.write("4.0,a,1,2,3")
    found = read_points(tmp_path)
    assert [each.at for each in found] == [1.0, 2.0, 3.0]
    assert found[2].name == 'odd, "name"'
    write_merged(tmp_path, found)
    assert read_points(tmp_path / "metrics.parquet") == found


def test_a_file_without_logged_values_is_reported(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="has no logged values: name the output directory"):
        read_points(tmp_path)
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="its first line is not at,trainer"):
        read_points(other)
    (tmp_path / "other.parquet").write_bytes(b"?")
    with pytest.raises(DataError, match="cannot be read as logged values"):
        read_points(tmp_path / "other.parquet")


def test_a_curve_counts_the_records_of_all_trainers() -> None:
    points = [point("a", 1.0, 10, 1.0), point("b", 2.0, 30, 2.0), point("a", 3.0, 20, 3.0)]
    assert curves_of(reversed(points)) == {"loss": [(10.0, 1.0), (40.0, 2.0), (50.0, 3.0)]}
    assert curves_of(points, "seconds")["loss"][-1] == (2.0, 3.0)
    many = [point("a", at, at * 10, 1.0, weight=2.0) for at in range(1000)]
    assert len(curves_of(many, limit=100)["loss"]) == 100


def test_a_chart_spans_its_full_area() -> None:
    lines = chart([(0.0, 0.0), (0.5, math.nan), (1.0, 1.0)], (0.0, 0.0), (1.0, 1.0), 10, 2)
    assert lines == ["⠀⠀⠀⠀⠀⠀⠀⠀⠀⠈", "⡀⠀⠀⠀⠀⠀⠀⠀⠀⠀"]
    assert chart([(0.0, 1.0), (1.0, 1.0)], (0.0, 1.0), (1.0, 1.0), 3, 1) == ["⣀⣀⣀"]


def test_a_picture_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    path = draw(tmp_path / "x.png", {"loss": {"run": [(0.0, 1.0), (1.0, math.nan)]}}, x_label="records")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [each.name for each in tmp_path.iterdir()] == ["x.png"]
    with pytest.raises(UsageError, match="no curves"):
        draw(path, {}, x_label="")
    with pytest.raises(UsageError, match="cannot be written to"):
        draw(tmp_path / "absent" / "x.png", {"a": {}}, x_label="")


def test_png_requires_matplotlib_and_svg_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    panels = {"loss": {"run": [(0.0, 1.0), (1.0, 2.0)]}}
    assert draw(tmp_path / "x.svg", panels, x_label="records").exists()
    with pytest.raises(UsageError, match=r"not named \.svg needs matplotlib, .*: pip install 'matplotlib"):
        draw(tmp_path / "x.png", panels, x_label="records")


def test_a_vector_picture_interrupts_curves_at_values_that_are_not_finite() -> None:
    curve = [(0.0, 1.0), (10.0, 2.0), (20.0, math.nan), (30.0, 1.5), (40.0, math.inf), (50.0, 3.0)]
    one = {"a <b>": curve, "c": [(0.0, 2.0)]}
    text = svg({"loss": one, "rate": {"a <b>": [(0.0, 0.0)] * 40}}, x_label="records")
    root = ET.fromstring(text)
    loss, rate = root.findall("{*}g")
    lines = [line.get("points", "").split() for line in loss.findall("{*}polyline")]
    assert [len(points) for points in lines] == [2, 1, 1, 1]
    places = [tuple(map(float, point.split(","))) for line in lines[:3] for point in line]
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    # Greater values are drawn higher.
    assert places[3][1] < places[1][1] < places[2][1] < places[0][1]
    assert len(loss.findall("{*}circle")) == 5
    assert not rate.findall("{*}circle")
    texts = [each.text for each in loss.findall("{*}text")]
    assert {"loss", "records", "a <b>", "c", "0", "10", "50", "1.5", "3"} <= set(texts)


@pytest.mark.parametrize("value", [0.0, 7.0, -1e-300, 1e300, math.nan])
def test_a_vector_picture_of_one_value_can_be_drawn(value: float) -> None:
    ET.fromstring(svg({"x": {"run": [(3.0, value)]}, "none": {}}, x_label="records"))


def test_a_run_ends_with_one_file_of_values_and_a_picture(tmp_path: Path) -> None:
    assert list(keep_curves(tmp_path)) == []
    PointFile(tmp_path, "a").append([point("a", 1.0, 10, 0.5)])
    (line,) = keep_curves(tmp_path)
    assert line.startswith("curves of loss are in ")
    assert (tmp_path / "metrics.parquet").exists()
    assert (tmp_path / "metrics.svg").exists()


def test_a_trainer_writes_while_it_runs_and_continues_when_it_cannot_write(
    tmp_path: Path, fake_clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    logged = LoggedValues(TrainerSettings(output_dir=str(tmp_path)), "t", fake_clock)
    logged.add({"loss": 1.0}, 10, 0, 0, 0)
    fake_clock.advance(0.2)
    logged.write()
    assert [each.value for each in read_points(tmp_path)] == [1.0]
    logged.add({"loss": 3.0}, 10, None, 1, 10)
    logged.write(is_end=True)
    assert [each.epoch for each in read_points(tmp_path)] == [1, 1]
    (tmp_path / "file").write_text("")
    broken = LoggedValues(TrainerSettings(output_dir=str(tmp_path / "file")), "t", fake_clock)
    for _ in range(2):
        broken.add({"loss": 1.0}, 1, 0, 0, 0)
        broken.write(is_end=True)
    assert caplog.text.count("no longer written to files") == 1


def test_tensorboard_shows_each_trainer_as_a_separate_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "torch", None
    )  # tensorboardX would import an installed torch, which takes seconds.
    events = EventFile(tmp_path, "t")
    events.append([point("t", 1.5, 70, 0.25)])
    events.close()
    (file,) = (tmp_path / "tensorboard" / "t").iterdir()
    content, found = file.read_bytes(), []
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        found.append(content[12 : 12 + size])
        content = content[16 + size :]
    (event,) = (each for each in found if b"loss" in each)
    assert struct.pack("<d", 1.5) in event
    assert struct.pack("<f", 0.25) in event


def test_tensorboard_files_without_output_dir_or_package_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="need a directory: also set output_dir"):
        require_files(TrainerSettings(tensorboard=True))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UsageError, match=r"pip install 'tensorboardX"):
        require_files(TrainerSettings(tensorboard=True, output_dir="x"))
    with pytest.raises(UsageError, match=r"pip install 'matplotlib"):
        draw(Path("x.png"), {"a": {}}, x_label="")


def test_the_command_compares_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run, scale in (("one", 1.0), ("two", 2.0)):
        PointFile(tmp_path / run / "out", "t").append(
            [point("t", at, int(at) * 10, scale / at) for at in (1.0, 2.0, 4.0)]
        )
    runs = [str(tmp_path / run / "out") for run in ("one", "two")]
    assert run_command_line(["plot", *runs]) == 0
    text = capsys.readouterr().out
    assert "loss  one/out: 0.25 at the end" in text
    assert "loss  two/out: 0.5 at the end" in text
    assert "40 records of all trainers" in text
    assert run_command_line(["plot", *runs, "--json", "--by", "seconds", "--output", str(tmp_path / "a.png")]) == 0
    assert '"two/out":{"loss":[[0.0,2.0],[1.0,1.0],[3.0,0.5]]}' in capsys.readouterr().out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert run_command_line(["plot", runs[0], "--metric", "absent"]) == 2
    assert "has no values named absent; it has loss" in capsys.readouterr().err
