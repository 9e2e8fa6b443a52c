"""The live page in Chromium: every panel under load, what a click opens, 1,000 clients, a phone, the dark, the key."""

import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.page.browser import PHONE, TIMEOUT_MS, Faults, chromium, opened
from tests.page.stand import CLIENTS, HEAVY, LIGHT, SMALL, Stand, load, populate, running

KEY: Final = "the-operators-key"
SCRIPTED: Final = "<img src=x onerror=alert(1)>"
"""A name that a client may choose, and that must stay text. The router writes it as in a URL."""
CHARTS: Final = ("share", "requests", "hits", "gap", "jain")
CONTRAST: Final = 4.5
"""The least ratio of the luminances of small text and its background, by WCAG 2.2 (AA)."""
EVENTS: Final = "**/ui/events"

LOWEST_CONTRAST: Final = """() => {
    const channels = (text) => {
        const given = text.match(/[\\d.]+/g).map(Number);
        const scale = text.startsWith("color(") ? 1 : 255;
        return [...given.slice(0, 3).map((each) => each / scale), given[3] ?? 1];
    };
    const luminance = (text) => {
        const linear = channels(text).slice(0, 3).map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    };
    const behind = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const { backgroundColor } = getComputedStyle(at);
            if (channels(backgroundColor)[3] > 0.99) return backgroundColor;
        }
        return "rgb(255, 255, 255)";
    };
    let lowest = [Infinity, ""];
    for (const element of document.querySelectorAll("body *")) {
        const nodes = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE);
        const text = nodes.map((node) => node.data.trim()).join("");
        if (!text || !element.checkVisibility()) continue;
        const [one, other] = [luminance(getComputedStyle(element).color), luminance(behind(element))];
        const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
        if (ratio < lowest[0]) lowest = [ratio, `${element.tagName} ${element.className}: ${text}`];
    }
    return lowest;
}"""
"""Returns the lowest contrast of any text on the page, and that text."""


NUMBERS_SHOWN: Final = """async (frames) => {
    const { Decisions } = await import("/ui/decisions.js");
    const shown = new Decisions();
    const decision = (number) => ({
        number, time: 0, request: "r", client: "c", worker: "w", why: "", waited_s: 0, cached_tokens: 0, passed_over: 0,
    });
    for (const numbers of frames) shown.show({ decisions: numbers.map(decision) });
    return shown.of("c").map(({ number }) => number);
}"""
"""Returns the numbers of the decisions that are shown after frames with decisions of these numbers."""


EMPTY_EDGES: Final = """(canvas) => {
    const { width, height } = canvas;
    const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
    for (let pixel = 0; pixel < width * height; pixel += 1) {
        const [x, y] = [pixel % width, Math.floor(pixel / width)];
        if ((x === 0 || x === width - 1 || y === height - 1) && data[4 * pixel + 3] !== 0) return false;
    }
    return true;
}"""
"""Returns whether nothing is drawn at the left, the right and the lower edge of a chart."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests, with a new profile."""
    expect.set_options(timeout=TIMEOUT_MS)
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def busy() -> Iterator[Stand]:
    """A router that has had calls of 1,000 clients, and that 1,000 others and a heavy one call now."""
    with running("--client-limit", str(4 * CLIENTS), *SMALL) as stand:
        httpx.post(
            f"{stand.url}/v1/completions", json={"prompt": "Hello", "max_tokens": 1, "user": SCRIPTED}
        ).raise_for_status()
        populate(stand.url)
        with load(stand.url, HEAVY, f"{LIGHT},rate=10"):
            yield stand


def until_live(page: Page) -> None:
    """Wait for the first frame."""
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#policy")).not_to_be_empty()


def check(faults: Faults) -> None:
    assert not faults.found, faults.found


def test_every_panel_has_data_under_load(browser: Browser, busy: Stand) -> None:
    """Charts, tables, heat map and decisions are filled, and nothing is logged or fetched from elsewhere."""
    with opened(browser, busy.url) as (page, faults):
        until_live(page)
        for chart in CHARTS:
            expect(page.locator(f"#{chart}-chart canvas")).to_be_visible()
            expect(page.locator(f"#{chart}-legend li").first).not_to_contain_text("–")
        expect(page.locator("#clients tbody tr")).to_have_count(20)
        expect(page.locator("#clients tfoot")).to_contain_text("the other")
        expect(page.locator("#workers tbody tr")).to_have_count(3)
        expect(page.locator("#heat tbody tr")).to_have_count(20)
        assert page.locator("#heat tbody td.above, #heat tbody td.below").count() > 20
        expect(page.locator("#decisions li").nth(5)).to_be_visible()
        expect(page.locator("#tiles .tile")).to_have_count(8)
        assert not page.locator(".empty:visible").count()
        first = page.locator("#foot").text_content()
        expect(page.locator("#foot")).not_to_have_text(first or "")
        check(faults)


def test_a_click_opens_a_client_a_worker_and_a_request(browser: Browser, busy: Stand) -> None:
    """Each sheet has its facts, a request its time line; links lead from one to another, and back leads back."""
    with opened(browser, busy.url) as (page, faults):
        until_live(page)
        page.locator("#clients tbody a").first.click()
        sheet = page.locator("#details-body")
        expect(sheet).to_contain_text("Wait, p95")
        expect(sheet).to_contain_text("Deficits, cost units")
        sheet.locator("td a").first.click()
        expect(page.locator("#details-title")).to_contain_text("worker")
        expect(sheet).to_contain_text("Prefix cache, since it joined")
        page.go_back()
        expect(page.locator("#details-title")).to_contain_text("client")
        page.keyboard.press("Escape")
        expect(page.locator("#details")).to_be_hidden()
        assert "#" not in page.url
        # Under load the list moves on, so the newest request is opened by its address.
        request = page.locator("#decisions small a").first.get_attribute("href") or ""
        page.evaluate("hash => { location.hash = hash }", request)
        expect(sheet.locator(".timeline ol")).to_contain_text("Arrived")
        expect(sheet.locator(".timeline ol")).to_contain_text("Finished")
        expect(sheet.locator(".timeline ol")).to_contain_text("because:")
        assert sheet.locator(".stages i").count() >= 2
        page.locator("#close").click()
        expect(page.locator("#details")).to_be_hidden()
        check(faults)


def test_an_open_sheet_keeps_the_focus(browser: Browser, busy: Stand) -> None:
    """While the sheet of a client is refreshed, the link that has the focus in it stays, and the facts change."""
    with opened(browser, busy.url) as (page, faults):
        until_live(page)
        page.locator("#clients tbody a").first.click()
        sheet = page.locator("#details-body")
        sheet.locator("td a").first.evaluate("(it) => { it.focus(); window.kept = it; }")
        before = sheet.text_content() or ""
        expect(sheet).not_to_have_text(before)
        assert page.evaluate("document.activeElement === window.kept && window.kept.isConnected")
        check(faults)


def test_labels_of_the_time_axis_are_whole(browser: Browser, busy: Stand) -> None:
    """No label is cut at an edge of a chart: its outermost pixels, and those below the labels, are empty."""
    with opened(browser, busy.url) as (page, faults):
        until_live(page)
        for chart in CHARTS:
            canvas = page.locator(f"#{chart}-chart canvas")
            expect(canvas).to_be_visible()
            assert canvas.evaluate(EMPTY_EDGES), chart
        check(faults)


def test_a_thousand_clients_can_be_ordered_and_searched(browser: Browser, busy: Stand) -> None:
    """The table orders by any column; the search finds each client, opens it, and a name is never run as a script."""
    with opened(browser, busy.url) as (page, faults):
        until_live(page)
        expect(page.locator("#clients-note")).to_contain_text(re.compile(r"of [12]\.\d\dk"))
        page.get_by_role("button", name="p95").click()
        expect(page.locator("#clients th[aria-sort=descending]")).to_have_text("p95")
        for found in (f"team-{CLIENTS - 1:04}", quote(SCRIPTED, safe="")):
            page.locator("#search").fill(found)
            expect(page.locator("#clients tbody tr")).to_have_count(1)
            expect(page.locator("#clients tbody a")).to_have_text(f"user-{found}")
        page.locator("#clients tbody a").click()
        expect(page.locator("#details-title")).to_contain_text(quote(SCRIPTED, safe=""))
        page.keyboard.press("Escape")
        page.locator("#search").fill("nobody has this name")
        expect(page.locator("#clients-empty")).to_have_text("No client has this text in its name.")
        request = (page.locator("#decisions small a").first.text_content() or "").strip()
        page.locator("#search").fill(request)
        page.keyboard.press("Enter")
        expect(page.locator("#details-body .timeline")).to_be_visible()
        check(faults)


def test_a_phone_shows_everything_in_one_column(browser: Browser, busy: Stand) -> None:
    """Nothing is wider than the screen, no row of the table of clients is cut, and a sheet fills the screen."""
    with opened(browser, busy.url, PHONE) as (page, faults):
        until_live(page)
        expect(page.locator("#clients tbody tr")).to_have_count(20)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
        lefts = page.evaluate(
            "[...document.querySelectorAll('.panel')].map((each) => each.getBoundingClientRect().left)"
        )
        assert len(set(lefts)) == 1
        table = page.locator(".clients .scroll")
        assert table.evaluate("(it) => it.scrollWidth <= it.clientWidth")
        page.locator("#workers tbody a").first.click()
        width = page.evaluate("document.querySelector('dialog').getBoundingClientRect().width")
        assert width == PHONE[0]
        check(faults)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_can_be_read_in_both_schemes(browser: Browser, busy: Stand, dark: bool) -> None:
    """The scheme follows the system, and no text has less contrast than WCAG asks for, open sheets included."""
    with opened(browser, busy.url, dark=dark) as (page, faults):
        until_live(page)
        expect(page.locator("#heat tbody tr")).to_have_count(20)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 200) is dark
        for opens in ("", "#worker", "#client"):
            if opens:
                page.locator(f"{opens}s tbody a").first.click()
                expect(page.locator("#details-body dl").first).to_be_visible()
            ratio, text = page.evaluate(LOWEST_CONTRAST)
            assert ratio >= CONTRAST, text
            page.keyboard.press("Escape")
        check(faults)


def test_the_scheme_changes_while_the_page_is_open(browser: Browser, busy: Stand) -> None:
    """The charts, too, are drawn in the colours of the other scheme."""
    with opened(browser, busy.url) as (page, faults):
        until_live(page)
        chart = page.locator("#requests-chart canvas")
        expect(chart).to_be_visible()
        pixels = "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data].join()"
        before = set(re.findall(r"\d+", chart.evaluate(pixels)))
        page.emulate_media(color_scheme="dark")
        expect(page.locator("body")).to_have_css("background-color", "rgb(14, 17, 22)")
        after = set(re.findall(r"\d+", page.locator("#requests-chart canvas").evaluate(pixels)))
        assert before != after
        check(faults)


def test_a_page_without_traffic_says_what_is_missing(browser: Browser) -> None:
    """Each empty panel explains itself; once the router is gone, the page says so, and it goes on by itself."""
    with running(workers=1) as stand, opened(browser, stand.url) as (page, faults):
        until_live(page)
        for chart in CHARTS:
            assert page.locator(f"#{chart}-chart").get_attribute("data-empty")
        for panel in ("clients", "heat", "decisions"):
            expect(page.locator(f"#{panel}-empty")).to_be_visible()
        expect(page.locator("#workers tbody tr")).to_have_count(1)
        assert page.evaluate(LOWEST_CONTRAST)[0] >= CONTRAST
        check(faults)
        page.route(EVENTS, lambda route: route.abort())
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        page.reload()
        expect(page.locator("#state")).to_have_text("reconnecting")
        page.unroute(EVENTS)
        expect(page.locator("#state")).to_have_text("live")


def test_decisions_go_on_after_a_restart_of_the_scheduler(browser: Browser) -> None:
    """Their numbers begin again then; those of one frame that come again in the next one are shown once."""
    with running(workers=1) as stand, opened(browser, stand.url) as (page, faults):
        until_live(page)
        assert page.evaluate(NUMBERS_SHOWN, [[98, 99], [99, 100], [1, 2], [1, 2, 3]]) == [3, 2, 1, 100, 99, 98]
        check(faults)


def test_the_page_asks_for_the_key_where_one_is_set(browser: Browser) -> None:
    """A wrong key is refused, the right one opens the page of several processes, and is kept in this tab only."""
    with running("--admin-key", KEY, "--processes", "2", workers=1) as stand:
        with opened(browser, stand.url) as (page, faults):
            expect(page.locator("#login")).to_be_visible()
            expect(page.locator("#main")).to_be_hidden()
            page.locator("#key").fill("not-the-operators-key")
            page.get_by_role("button", name="Open").click()
            expect(page.locator("#refused")).to_be_visible()
            page.locator("#key").fill(KEY)
            page.get_by_role("button", name="Open").click()
            until_live(page)
            expect(page.locator("#workers tbody tr")).to_have_count(1)
            expect(page.locator("#login")).to_be_hidden()
            assert KEY in page.evaluate("Object.values(sessionStorage)")
            assert not page.evaluate("Object.values(localStorage)")
            assert not page.context.cookies()
            page.reload()
            until_live(page)
            others = [fault for fault in faults.found if "401" not in fault]
            assert not others, others
        with opened(browser, stand.url) as (page, _):
            expect(page.locator("#login")).to_be_visible()
