import ast
import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import flightedl.examples

SCRIPT = Path(flightedl.examples.__file__).parent / "twenty_lines.py"


def write_parquet(table, path):
    pq.write_table(table, f"{path}.parquet", row_group_size=2000)


def write_csv(table, path):
    pyarrow.csv.write_csv(table, f"{path}.csv")


def write_json_lines(table, path):
    Path(f"{path}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in table.to_pylist()))


@pytest.mark.parametrize("write", [write_parquet, write_csv, write_json_lines])
def test_the_example_learns_from_files_of_every_format(write, job, tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(2):
        x = random.standard_normal((8000, 2))
        label = x[:, 0] - 2 * x[:, 1] + 0.5 * random.standard_normal(8000) > 0
        table = pa.table({"label": label.astype(np.int64), "first": x[:, 0], "second": x[:, 1].astype(np.float32)})
        write(table, folder / f"part-{number}")
    (folder / "_SUCCESS").touch()
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(folder)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert job.losses[-1] < 0.5 * job.losses[0]
    with np.load(job.output_dir / "model.npz", allow_pickle=False) as saved:
        assert saved["w"][0] > 0.5
        assert saved["w"][1] < -0.5


def test_the_readme_shows_the_example():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = next(block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "sys.argv" in block)
    assert ast.dump(ast.parse(shown)) == ast.dump(ast.Module(ast.parse(SCRIPT.read_text()).body[1:], []))


def test_the_example_has_about_twenty_lines():
    code = SCRIPT.read_text().rpartition('"""\n')[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 22
