"""The job's page in a real browser, for people who look at it, listen to it or use the keyboard.

All checks share one job and one browser, so they are one test. Its parts follow the life of the job.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from PIL import Image

from .conftest import Shown

pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(90)]

#: Text and contrast with the background (WCAG 2.2, 1.4.3) of each element that has its own text.
_CONTRASTS = """
(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const color = numbers(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("body *")]
    .filter((e) => e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()))
    .map((e) => {
      const [a, b] = [light(numbers(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
      return [e.textContent.trim().slice(0, 40), (a + 0.05) / (b + 0.05)];
    });
})()
"""


def text_of(shown: Shown, selector: str) -> str:
    return str(shown.browser.run(f"document.querySelector({json.dumps(selector)}).innerText"))


def seen_by_readers(shown: Shown) -> list[tuple[str, str]]:
    """Return (role, name) of each element that a screen reader announces, in its order."""
    nodes: list[dict[str, Any]] = shown.browser.call("Accessibility.getFullAXTree")["nodes"]
    return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")]


def it_shows_who_is_there_and_what_failed_with_file_and_error(shown: Shown) -> None:
    assert shown.browser.run("document.title") == "page-demo: training"
    assert "2 of 2" in text_of(shown, "#facts")
    assert "c-" in text_of(shown, "#facts")
    assert 0.4 < shown.browser.run("document.querySelector('#bar').value") < 0.6
    assert "trainer-0" in text_of(shown, "#trainers")
    assert "pserver-0" in text_of(shown, "#servers")
    failed = text_of(shown, "#failed")
    assert "numbers.parquet" in failed
    assert "20 to 29" in failed
    # An error's text is shown as text, not interpreted as HTML.
    assert "ValueError: <b>bad</b> record" in failed
    assert {"loss", "accuracy", "progress"} <= set(text_of(shown, "#curves").split("\n"))
    assert "trainer came" in text_of(shown, "#events")


def it_looks_right_in_light_in_dark_and_on_a_phone(shown: Shown, width: int, scheme: str, is_phone: bool) -> None:
    shown.browser.looks(width=width, height=844, scheme=scheme, is_phone=is_phone)
    picture = shown.browser.screenshot(shown.pictures / f"{scheme}-{width}.png")
    paper = picture.getpixel((1, 1))
    assert isinstance(paper, tuple)
    assert (sum(paper) > 600) == (scheme == "light")
    assert picture.width == width == shown.browser.run("document.documentElement.scrollWidth")
    assert share_of_ink(picture, paper) > 0.01
    # The curves are drawn in the color of lines.
    box = shown.browser.run(
        "(({x, y, width, height}) => [x, y, x + width, y + height])"
        "(document.querySelector('#curves svg').getBoundingClientRect())"
    )
    stroke = shown.browser.run("getComputedStyle(document.querySelector('polyline')).stroke")
    line = tuple(int(part) for part in stroke.removeprefix("rgb(").removesuffix(")").split(","))
    assert any(is_near(color, line) for _, color in picture.crop(tuple(map(int, box))).getcolors(1 << 20) or [])
    faint = [(text, contrast) for text, contrast in shown.browser.run(_CONTRASTS) if contrast < 4.5]
    assert faint == []


def is_near(color: Any, expected: tuple[int, ...]) -> bool:
    return all(abs(a - b) < 8 for a, b in zip(color, expected, strict=True))


def share_of_ink(picture: Image.Image, paper: Any) -> float:
    colors = picture.getcolors(1 << 24) or []
    return 1 - sum(count for count, color in colors if color == paper) / (picture.width * picture.height)


def curves_are_read_and_enlarged_with_the_pointer(shown: Shown) -> None:
    browser = shown.browser
    browser.looks(width=1200, height=844, scheme="light")
    browser.until("document.querySelector('#curves polyline').getAttribute('points').split(' ').length > 5", 30)
    browser.run("document.querySelector('#curves svg').scrollIntoView({block: 'center'})")

    def point(share: float, kind: str = "mouseMoved") -> None:
        # Notices at the top move the curves.
        x, y, width, height = browser.run(
            "(({x, y, width, height}) => [x, y, width, height])"
            "(document.querySelector('#curves svg').getBoundingClientRect())"
        )
        place = {"x": x + share * width, "y": y + height / 2, "button": "left", "clickCount": 1}
        browser.call("Input.dispatchMouseEvent", type=kind, **place)

    shows = "document.querySelector('#curves figure').innerText"
    assert " %" in browser.run(shows)
    point(0.5)
    browser.until(f"/ at \\d\\d:\\d\\d:\\d\\d/.test({shows})")
    whole = browser.run("document.querySelector('#curves figure > p').innerText")
    for share, kind in ((0.0, "mousePressed"), (0.5, "mouseMoved"), (0.6, "mouseReleased")):
        point(share, kind)
    browser.until("document.querySelector('#zoom button') !== null")
    assert browser.run("document.querySelector('#curves figure > p').innerText") != whole
    browser.run("document.querySelector('#zoom button').click()")
    assert browser.run("document.querySelector('#zoom button')") is None


def losses_and_waits_are_named_at_the_top_until_a_minute_after_they_are_over(shown: Shown) -> None:
    """The page's own functions get events of the past and of the future, so that nobody waits for a minute."""
    with urllib.request.urlopen(f"{shown.cluster.page_url}status.json", timeout=10) as reply:
        status = json.load(reply)
    event = {
        "kind": "pserver_gone",
        "who": "pserver-0",
        "text": "pserver is gone index=0 generation=7 process=pserver-3",
    }

    def shows(at: float, events: list[dict[str, Any]], **changes: Any) -> str:
        shown.browser.run(f"events = {json.dumps(events)}; showNotices({json.dumps({**status, **changes})}, {at})")
        return text_of(shown, "#notices")

    shown.browser.run("source.close(); notices.clear()")
    assert shows(1000.0, []) == ""
    gone = {**event, "at": 1001.0}
    lost = shows(1004.0, [gone], pservers=[], waiting_for="1 of 1 pservers")
    assert "pserver-0 was lost (index=0 generation=7 process=pserver-3)" in lost
    assert "(for 3 s)" in lost
    assert shown.browser.run("document.querySelector('#notices').getBoundingClientRect().top") < 200
    assert "The job waits for 1 of 1 pservers (for 4 s)" in shows(1008.0, [gone], waiting_for="1 of 1 pservers")
    back = {**event, "kind": "pserver_came", "at": 1009.0}
    assert shows(1010.0, [back, gone]).count("over since") == 2
    assert shows(1068.0, [back, gone]).count("over since") == 2
    assert shows(1071.0, [back, gone]) == ""
    assert text_of(shown, "#servers tfoot").startswith("total")
    shown.browser.open(shown.cluster.page_url)
    shown.browser.until("document.querySelectorAll('#events tbody tr').length > 0")


def screen_readers_come_across_landmarks_names_and_headings(shown: Shown) -> None:
    shown.browser.looks(width=1200, height=844, scheme="light")
    found = seen_by_readers(shown)
    roles = [role for role, _ in found]
    assert roles.count("banner") == roles.count("main") == 1
    headings = [name for role, name in found if role == "heading"]
    assert headings[0] == "page-demo"
    for name in headings[1:]:
        assert ("region", name) in found
    for role in ("progressbar", "status", "region", "table", "image"):
        names = [name for each, name in found if each == role]
        assert names
        assert role == "status" or all(names)
    assert any(role == "image" and name.startswith("loss: ") and " now, from " in name for role, name in found)
    assert ("columnheader", "error") in found


def tables_are_reached_by_keyboard_in_their_order_and_seen_to_be(shown: Shown) -> None:
    regions = [name for role, name in seen_by_readers(shown) if role == "region"]
    shown.browser.run("document.activeElement.blur()")
    reached = []
    while len(reached) < 20:
        shown.browser.press("Tab")
        name, outline = shown.browser.run(
            "[document.activeElement.getAttribute('aria-label'), getComputedStyle(document.activeElement).outlineStyle]"
        )
        if name is None or name in reached:
            break
        assert outline == "solid", name
        reached.append(name)
    assert {"Trainers and their last reports", "Quarantined batches", "Newest first"} <= set(reached)
    assert reached == sorted(reached, key=regions.index)


def what_happens_arrives_without_a_reload_and_keeps_the_focus(shown: Shown) -> None:
    browser = shown.browser
    browser.run("window.stays = true")
    browser.run("document.querySelector('#events [tabindex]').focus()")
    shown.go_on()
    browser.until("document.querySelector('#state').textContent == 'done'", 30)
    browser.until("document.querySelector('#bar').value == 1")
    assert browser.run("window.stays")
    assert browser.run("document.activeElement.getAttribute('aria-label')") == "Newest first"


def nothing_is_said_in_the_console(shown: Shown) -> None:
    assert shown.browser.complaints == []


def a_master_that_is_gone_is_told(shown: Shown) -> None:
    shown.cluster.kill("master")
    shown.browser.until("document.querySelector('#state').classList.contains('lost')")
    assert "does not answer" in text_of(shown, "#state")


def test_the_page_serves_people_in_every_state_of_the_job(shown: Shown) -> None:
    it_shows_who_is_there_and_what_failed_with_file_and_error(shown)
    for width, scheme, is_phone in ((1200, "light", False), (1200, "dark", False), (390, "dark", True)):
        it_looks_right_in_light_in_dark_and_on_a_phone(shown, width, scheme, is_phone)
    curves_are_read_and_enlarged_with_the_pointer(shown)
    losses_and_waits_are_named_at_the_top_until_a_minute_after_they_are_over(shown)
    screen_readers_come_across_landmarks_names_and_headings(shown)
    tables_are_reached_by_keyboard_in_their_order_and_seen_to_be(shown)
    what_happens_arrives_without_a_reload_and_keeps_the_focus(shown)
    nothing_is_said_in_the_console(shown)
    a_master_that_is_gone_is_told(shown)
