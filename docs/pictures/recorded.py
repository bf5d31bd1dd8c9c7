"""Pictures of a real job: the tutorial's script runs, and its processes are killed.

``make pictures`` writes them:

* ``kill.svg``: the terminal of ``flightedl run`` while a trainer, a pserver and the master are killed; of several
  successive lines about the progress, the first is kept
* ``top.svg``: the screen of ``flightedl top``
* ``page.png``: the job's web page; needs the program ``chromium``
* ``page-calm-1300.png``, and so on: the top of the page while the job trains, after the death of a pserver and while it
  waits for a frozen trainer, on a screen and on a phone
* ``curve.svg``: the curve of the loss
"""

from __future__ import annotations

import base64
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

from flightedl.adapters.clock import SystemClock
from flightedl.config import CommonSettings, settings
from flightedl.launch.status import JobStatus
from flightedl_tools.top import View
from tests.page.browser import Browser

HERE = Path(__file__).parent
_COLUMNS = 132
#: Longest pause in the recording; longer ones are cut.
_PAUSE_S = 1.2
_RUN = ["run", "train.py", "--trainers", "2", "--pservers", "2", "--checkpoint", "checkpoints"]
#: State of the page -> a script that is true in it.
_STATES = {
    "calm": "document.querySelectorAll('#curves polyline').length > 2 && $('notices').childElementCount === 0",
    "lost": "$('notices').innerText.includes('pserver-1 was lost')",
    "waits": "[...document.querySelectorAll('#notices .now')].some((each) => each.innerText.includes('waits for'))",
}
_WIDTHS = (1300, 400)
_VICTIMS = {3: "trainer-0", 7: "pserver-1", 11: "master"}


@dataclass
class Recording:
    """Lines of a terminal, with the time at which each of them appeared."""

    lines: list[tuple[float, Text]] = field(default_factory=list)

    def add(self, text: str, style: str = "") -> None:
        self.lines.append((time.monotonic(), Text(text, style, no_wrap=True, overflow="ellipsis")))

    def typed(self, text: str) -> None:
        self.add(f"$ {text}", "bold cyan")

    def svg(self, title: str) -> str:
        """Return an animation. Lines that have not appeared yet are faint, so that the picture is never empty."""
        console = terminal()
        for _, text in self.lines:
            console.print(text, no_wrap=True, overflow="ellipsis")
        shown, at_s = [], 0.0
        before = self.lines[0][0]
        for number, (when, _) in enumerate(self.lines):
            at_s += min(when - before, _PAUSE_S)
            before = when
            shown.append(f'[clip-path$="-line-{number})"] {{ animation: appear 1ms {at_s:.1f}s both; }}')
        rules = "\n".join(shown)
        motion = f"@media (prefers-reduced-motion: no-preference) {{\n{rules}\n}}"
        style = f"<style>\n@keyframes appear {{ from {{ opacity: 0.3; }} to {{ opacity: 1; }} }}\n{motion}\n</style>"
        return without_fonts(console.export_svg(title=title)).replace("</svg>", f"{style}</svg>")


def terminal() -> Console:
    """Return a terminal whose content becomes a picture."""
    return Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")


def without_fonts(svg: str) -> str:
    """Remove fonts that the picture would load from another host, and comments."""
    return re.sub(r"@font-face \{.*?\}|<!--.*?-->|^\s*\n", "", svg, flags=re.DOTALL | re.MULTILINE)


def tutorial(name: str) -> str:
    """Return a script of the tutorial."""
    page = (HERE.parent / "start.md").read_text("utf-8")
    found = re.search(rf"^```python {name}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def record(folder: Path) -> Recording:
    """Run the tutorial's job in a folder, kill its processes, and take the pictures while it runs."""
    recording = Recording()
    program = [sys.executable, "-m", "flightedl_tools"]
    recording.typed(f"flightedl {' '.join(_RUN)}")
    pending = dict(_VICTIMS)
    page_url, address, watcher, is_due = "", [], None, threading.Event()
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen([*program, *_RUN], cwd=folder, **piped, text=True) as job:
        assert job.stdout is not None
        for raw in job.stdout:
            line = raw.rstrip().replace(str(folder), "/home/me")
            epoch = re.search(r"epoch (\d+)/", line)
            if epoch is None or "epoch" not in recording.lines[-1][1].plain:
                recording.add(line)
            if found := re.search(r"page is at (\S+)", line):
                page_url = found[1]
            if found := re.search(r"--etcd (\S+) --job (\S+)`", line):
                address = [found[1], found[2]]
                watcher = threading.Thread(target=watch, args=(*address, page_url, is_due))
                watcher.start()
            if epoch is not None and pending and int(epoch[1]) >= min(pending):
                if len(pending) == 1:
                    is_due.set()
                    watcher.join()
                kill(program, pending.pop(min(pending)), address, recording)
        assert job.wait() == 0, "\n".join(text.plain for _, text in recording.lines)
    return recording


def kill(program: list[str], name: str, address: list[str], recording: Recording) -> None:
    """Kill one of the job's processes, whose pid the status shows."""
    where = ["--etcd", address[0], "--job", address[1]]
    shown = subprocess.run([*program, "status", *where], capture_output=True, text=True, timeout=30, check=True).stdout
    found = re.search(rf"^{name} .*?pid (\d+)", shown, re.MULTILINE)
    assert found is not None, shown
    recording.typed(f"kill -9 {found[1]}   # {name}")
    subprocess.run(["kill", f"-{signal.SIGKILL:d}", found[1]], check=True)


def photograph(browser: Browser, due: dict[str, str]) -> None:
    """Take the pictures of the first state of the page that is due and present."""
    name = next((name for name, script in due.items() if browser.run(script)), "")
    for width in _WIDTHS if due.pop(name, "") else ():
        browser.looks(width=width, height=900, scheme="light", is_phone=width < 600)
        save(base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"]), f"page-{name}-{width}.png")
    browser.looks(width=1180, height=1080, scheme="light")


def save(picture: bytes, name: str) -> None:
    """Save a screenshot with few colors, which makes it small."""
    with Image.open(io.BytesIO(picture)) as image:
        image.convert("P", palette=Image.Palette.ADAPTIVE, colors=32).save(HERE / name, optimize=True)


def watch(etcd: str, name: str, page_url: str, is_due: threading.Event) -> None:
    """Watch the job's page and ``top``, and write pictures of both when they are due."""
    view = View()
    with (
        tempfile.TemporaryDirectory() as profile,
        Browser(Path(profile)) as browser,
        JobStatus(settings(CommonSettings, etcd=etcd, job=name), SystemClock()) as status,
    ):
        browser.looks(width=1180, height=1080, scheme="light")
        browser.open(page_url)
        due = dict(_STATES)
        while not is_due.wait(1.0):
            view.refresh(status)
            photograph(browser, due)
        frozen = status.read(10.0).trainers[0].pid
        os.kill(frozen, signal.SIGSTOP)
        try:
            browser.until(_STATES["waits"], 30.0)
            photograph(browser, due)
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert not due, f"the job never was in the states {', '.join(due)}"
        picture = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
    save(picture, "page.png")
    console = terminal()
    console.print(view.screen())
    (HERE / "top.svg").write_text(without_fonts(console.export_svg(title="flightedl top")), "utf-8")


def main() -> None:
    """Write all pictures of a job."""
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / "make_data.py").write_text(tutorial("data"), "utf-8")
        (folder / "train.py").write_text(tutorial("train"), "utf-8")
        subprocess.run([sys.executable, "make_data.py"], cwd=folder, check=True)
        (HERE / "kill.svg").write_text(record(folder).svg("kill everything"), "utf-8")
        shutil.copy(next(folder.glob("runs/*/metrics.svg")), HERE / "curve.svg")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
