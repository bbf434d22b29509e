"""The page at `/` in a real browser, on the real server."""

import json
import math
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from asking import complete
from axe_playwright_python.sync_playwright import Axe
from browser import chromium
from playwright.sync_api import Browser, Page, Route, expect
from running import HTTP, Server, wait_until

from outrider.server.http.routes import live
from outrider.server.http.routes import page as page_routes

QUESTION = "Write a Python function that checks whether a number is prime."
SIZES = {"phone": (390, 844), "laptop": (1366, 768), "wide": (1920, 1080)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def complaints() -> list[str]:
    """The page's console messages; there may be none at the end."""
    return []


@pytest.fixture
def page(browser: Browser, server: Server, complaints: list[str]) -> Iterator[Page]:
    """The opened page, which may request no other host."""
    context = browser.new_context(viewport=dict(zip(("width", "height"), SIZES["laptop"], strict=True)))
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    expect(page.locator("#state")).to_have_text("ready")
    yield page
    context.close()
    assert complaints == []
    assert all(url.startswith(server.url) for url in asked)


def ask(page: Page, question: str = QUESTION, *, tokens: int = 48) -> None:
    page.locator("#tokens").fill(str(tokens))
    page.locator("#prompt").fill(question)
    page.locator("#prompt").press("Enter")


def answered(page: Page) -> None:
    expect(page.locator("#send")).to_have_text("Send")


def traces(body: str) -> list[dict[str, Any]]:
    chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [entry for choice in choices for entry in choice.get("speculation", {}).get("trace", ())]


def test_every_token_has_the_colour_of_the_maker_that_the_server_names(page: Page) -> None:
    with page.expect_response("**/v1/chat/completions") as streamed:
        ask(page)
    answered(page)
    told = traces(streamed.value.text())
    shown = page.locator(".text .token").evaluate_all(
        "tokens => tokens.map(t => [t.textContent, t.dataset.source, t.className, t.dataset.confidence])"
    )
    assert len(told) == 48
    assert {entry["source"] for entry in told} > {"target"}
    assert [(text, source) for text, source, *_ in shown] == [(entry["token"], entry["source"]) for entry in told]
    assert all(kind == f"token {source}" for _, source, kind, _ in shown)
    assert [float(sure) if sure else None for *_, sure in shown] == [entry["confidence"] for entry in told]
    colours = {
        maker: page.locator(f".text .token.{maker}").first.evaluate("t => getComputedStyle(t).backgroundColor")
        for maker in {entry["source"] for entry in told}
    }
    assert len(set(colours.values())) == len(colours)
    drafted = page.locator(".text .token:not(.target)").first
    drafted.hover()
    sure = math.floor(100 * float(drafted.get_attribute("data-confidence")) + 0.5)  # JavaScript rounds a half up
    expect(page.locator("#detail")).to_contain_text(f"{sure} % sure")


def test_a_streaming_answer_is_shown_and_can_be_stopped(page: Page) -> None:
    ask(page, "Write a long story about a dragon and a knight.", tokens=2000)
    text = page.locator(".text")
    expect(text.locator(".token").nth(5)).to_be_attached(timeout=20_000)
    assert text.get_attribute("aria-busy") == "true"
    page.locator("#send").click()
    answered(page)
    assert text.get_attribute("aria-busy") == "false"
    assert text.locator(".token").count() < 1500


def test_side_by_side_both_speeds_and_the_same_text(page: Page) -> None:
    page.locator("#compare").check()
    ask(page)
    expect(page.locator(".verdict")).to_have_text(re.compile(r"× as fast, the same text"))
    assert page.locator(".reply h3 b").count() == 2
    for speed in page.locator(".reply h3 b").all_text_contents():
        assert float(speed.removesuffix(" tok/s")) > 0
    makers = page.locator(".reply").nth(1).locator(".token").evaluate_all("all => all.map(t => t.dataset.source)")
    assert set(makers) == {"target"}


def test_settings_are_sent(page: Page) -> None:
    for name, value in {"temperature": "0.7", "seed": "5", "level": "2.5"}.items():
        page.locator(f"#{name}").fill(value)
    page.locator("#speculation").uncheck()
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, tokens=4)
    answered(page)
    sent = request.value.post_data_json
    assert (sent["temperature"], sent["seed"], sent["min_tokens_per_second"], sent["max_tokens"]) == (0.7, 5, 2.5, 4)
    assert sent["speculation"] == {"enabled": False, "trace": True}


def test_a_refusal_is_shown_in_the_servers_words(page: Page, complaints: list[str]) -> None:
    ask(page, "no " * 5000)
    expect(page.locator(".error")).to_contain_text("context")
    assert [text for text in complaints if "400" not in text] == []
    complaints.clear()  # the browser's own note of the refused request


def test_charts_move_under_load(page: Page, server: Server) -> None:
    ended = threading.Event()

    def load() -> None:
        """Each answer is different, so that calibration changes."""
        while not ended.is_set():
            complete(server, QUESTION, speculate=True, max_tokens=96, temperature=1, min_tokens_per_second=0.5)

    def charts() -> dict[str, tuple[str, str]]:
        pictures = page.locator(".chart").evaluate_all(
            "all => all.map(chart => ['h3', 'figcaption'].map(part => chart.querySelector(part).textContent)"
            ".concat(chart.querySelector('canvas').toDataURL()))"
        )
        return {title: (caption, picture) for title, caption, picture in pictures}

    def still() -> dict[str, str]:
        """Captions of the charts that are unchanged, or without a number yet."""
        return {
            title: now[0]
            for title, now in charts().items()
            if any(new == old for new, old in zip(now, before[title], strict=True))
            or ("–" in now[0] and not title.startswith("Accepted length"))  # a source may not have drafted
        }

    running = page.locator(".chart", has=page.get_by_role("heading", name="Requests", exact=True)).locator("b").first
    expect(running).to_have_text("0")
    before = charts()
    assert len(before) == 8
    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        expect(running).to_have_text("3")
        # Service levels need the first answers; calibration moves ever more slowly.
        deadline = time.monotonic() + 60
        while unmoved := still():
            assert time.monotonic() < deadline, unmoved
            page.wait_for_timeout(100)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_learning_is_charted_on_a_learning_server(page: Page) -> None:
    chart = page.locator(".chart", has=page.get_by_role("heading", name="Learning"))
    expect(page.locator(".chart")).to_have_count(8)
    learning: dict[str, Any] = {"in_use": None, "exchanges": [], "now": 1_700_000_000.5}

    def add(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"learning": learning})

    def drawn(colour: str) -> int:
        return chart.locator("canvas").evaluate(
            """(canvas, name) => {
              const { width, height } = canvas;
              const copy = Object.assign(document.createElement("canvas"), { width, height });
              const context = copy.getContext("2d", { willReadFrequently: true });
              context.drawImage(canvas, 0, 0);
              context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
              const wanted = context.fillStyle.match(/[0-9a-f]{2}/g).map((hex) => parseInt(hex, 16));
              const { data } = context.getImageData(0, 0, width, height);
              const rows = new Set();
              for (let at = 0; at < data.length; at += 4)
                if (wanted.every((value, part) => data[at + part] === value)) rows.add(Math.floor(at / 4 / width));
              return rows.size;
            }""",
            colour,
        )

    page.route("**/outrider/live", add)
    expect(chart.locator("p")).to_have_text("the drafter of the start in use · 0 answers kept · starting")
    expect(chart.locator(".value").nth(1)).to_have_text("put to use 0")
    page.wait_for_function("document.querySelector('.chart.all canvas')")
    assert (drawn("lookup"), drawn("warn")) == (0, 0)

    promoted = {"at": learning["now"] - 600, "event": "promotion", "drafter": "0002", "before": None}
    taken_back = {"at": learning["now"] - 120, "event": "rollback", "drafter": "0002", "before": None}
    learning |= {"in_use": "0002", "answers": 290, "held_out": 22, "phase": "gate", "exchanges": [promoted]}
    expect(chart.locator("p")).to_have_text("drafter 2 in use · 312 answers kept · trying a candidate")
    height = chart.locator(".u-over").bounding_box()["height"]
    wait_until(lambda: drawn("lookup") >= height - 2, 30)
    assert drawn("warn") == 0

    learning |= {"in_use": None, "exchanges": [promoted, taken_back]}
    expect(chart.locator(".value").nth(2)).to_have_text("taken back 1")
    wait_until(lambda: drawn("warn") >= height - 2, 30)
    expect(chart.locator(".value b").first).to_have_text("–")
    ask(page)
    expect(chart.locator(".value b").first).to_have_text(re.compile(r"^\d+\.\d\d$"))
    answered(page)
    page.unroute_all(behavior="ignoreErrors")


def test_all_of_it_by_keyboard(page: Page) -> None:
    def focused() -> str:
        return page.evaluate("document.activeElement.id || document.activeElement.className")

    def tab_to(name: str) -> None:
        for _ in range(20):
            page.keyboard.press("Tab")
            if focused() == name:
                return
        pytest.fail(f"no Tab leads to {name}")

    page.keyboard.press("Tab")
    assert focused() == "skip"
    page.keyboard.press("Enter")
    page.keyboard.type("Say hello.")
    assert page.locator("#prompt").input_value() == "Say hello."
    tab_to("tokens")
    page.keyboard.press("Control+a")
    page.keyboard.type("24")
    page.keyboard.press("Enter")
    answered(page)
    for _ in range(20):
        page.keyboard.press("Shift+Tab")
        if focused() == "text":
            break
    page.keyboard.press("Home")
    first = page.locator(".text .token").first
    expect(first).to_have_class(re.compile(r"\bat\b"))
    page.keyboard.press("ArrowRight")
    expect(first).not_to_have_class(re.compile(r"\bat\b"))
    expect(page.locator("#detail code")).to_have_count(1)
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault_and_the_page_fits_the_screen(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    ask(page, tokens=24)
    answered(page)
    for width, height in SIZES.values():
        page.set_viewport_size({"width": width, "height": height})
        results = Axe().run(page).response
        assert [(problem["id"], problem["nodes"]) for problem in results["violations"]] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_themes(page: Page) -> None:
    def background() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    page.emulate_media(color_scheme="dark")
    dark = background()
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Theme: light")
    light = background()
    assert light != dark
    page.emulate_media(color_scheme="light")
    page.locator("#theme").click()
    assert background() == dark
    page.reload()
    expect(page.locator("#theme")).to_have_text("Theme: dark")


def test_files_come_with_a_strict_policy_and_no_others(server: Server) -> None:
    answer = HTTP.get(server.url)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    script = HTTP.get(f"{server.url}/page/main.js")
    assert (script.status_code, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    for name in ("none.js", "../app.py", "%2e%2e/app.py", "vendor", ""):
        assert HTTP.get(f"{server.url}/page/{name}").status_code == 404


def test_the_chart_library_has_its_licence() -> None:
    assert "MIT" in (page_routes.FOLDER / "vendor" / "uPlot.LICENSE").read_text()


def test_live_numbers(server: Server) -> None:
    time.sleep(live.MIN_INTERVAL_SECONDS)  # the numbers may be this old
    before = HTTP.get(f"{server.url}/outrider/live").json()
    answer = complete(server, "the fox ran, the fox ran, the fox", speculate=True, max_tokens=24, ignore_eos=True)
    now: dict[str, Any] = {}
    while now.get("tokens", 0) < before["tokens"] + 23:  # up to half a second old
        now = HTTP.get(f"{server.url}/outrider/live").json()
    details = answer["usage"]["completion_tokens_details"]
    assert now["accepted"] - before["accepted"] == details["accepted_prediction_tokens"]
    assert now["wasted"] - before["wasted"] == details["rejected_prediction_tokens"]
    assert now["requests"] == {"running": 0, "queued": 0}
    assert now["engines"] == 1
    assert 0 <= now["cache"]["used"] < now["cache"]["size"] == 4096
    curve = now["curve"]
    assert len(curve["tokens"]) == len(curve["throughput"]) > 1
    assert curve["chosen"][1] >= max(curve["throughput"]) - 1e-6


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_api_is_shown_and_can_be_tried(page: Page, server: Server, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size(dict(zip(("width", "height"), SIZES["phone"], strict=True)))
    page.goto(f"{server.url}/docs")
    asked = page.locator(".opblock", has_text="/v1/completions")
    asked.locator(".opblock-summary-control").click()
    asked.locator(".execute").click()
    expect(asked.locator(".live-responses-table tbody .response-col_status")).to_contain_text("200")
    assert page.evaluate("document.documentElement.classList.contains('dark-mode')") == (scheme == "dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES["phone"][0]
    assert "unsafe" not in HTTP.get(f"{server.url}/docs").headers["content-security-policy"]
