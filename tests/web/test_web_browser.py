"""The web page in a real browser: what people do with it, what goes wrong, and that it talks to nobody else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from browser_fixtures import STARTING, Visit, expect, held, launched, served, serving, visiting  # noqa: F401
from web_fixtures import NAMES, encode_image, make_picture

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def command() -> Iterator[str]:
    """The address of `dave serve` as people start it, with the embedded model."""
    code = "from dave_vit.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    yield process.stdout.readline().split()[0]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    assert process.stdout.read().strip() == "stopped"


def test_the_embedded_model_from_an_example_to_the_files(browser, command, tmp_path):
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        visit = Visit(context.new_page(), command)
        visit.start()
        page = visit.page
        page.fill("#samples", "6")
        expect(page.locator("#knows")).to_contain_text("only; for photographs: dave serve --model timm:")
        expect(page.locator("#examples button")).to_have_count(8)
        page.get_by_role("button", name="example: trophy").click()
        panel = visit.wait_finished()
        expect(page.locator("#classes label")).to_have_count(5)
        expect(panel.locator(".title")).to_have_text("trophy")
        for label in ("Figure PNG", "Overlay PNG", "Numbers NPZ", "Record JSON"):
            with page.expect_download() as taken:
                panel.get_by_role("link", name=label).click()
            taken.value.save_as(tmp_path / taken.value.suggested_filename)
        with np.load(tmp_path / "example-trophy.npz") as arrays:
            assert arrays["map"].shape == (224, 224)
        with Image.open(tmp_path / "example-trophy.panels.png") as figure:
            assert figure.width > 900
        assert "dave explain example-trophy.png" in panel.locator("code").text_content()
        page.goto(f"{command}/api")
        expect(page.get_by_role("heading", name="POST /api/explain")).to_be_visible()
        assert {url for url in visit.requests if not url.startswith((f"{command}/", "blob:"))} == set()
        assert visit.complaints == []


def test_an_uploaded_image_is_explained_while_samples_arrive(visit, slow):
    counts = []
    visit.page.expose_function("seen", lambda text: counts.append(text))
    visit.page.evaluate(
        """new MutationObserver(() => {
            const text = document.querySelector(".panel .count")?.textContent;
            if (text) seen(text);
        }).observe(document.body, {subtree: true, childList: true, characterData: true})"""
    )
    visit.page.fill("#samples", "48")
    visit.open_picture()
    panel = visit.wait_finished()
    arrived = [int(text.split()[0]) for text in dict.fromkeys(counts) if "samples" in text]
    assert len(arrived) > 3
    assert arrived == sorted(arrived)
    assert arrived[-1] == 48
    expect(panel.locator("canvas.certainty")).to_be_visible()
    assert len(np.unique(visit.pixels("canvas.certainty"))) > 10
    expect(visit.page.locator("#status")).to_contain_text("is done")
    assert visit.complaints == []


def test_another_class_gives_another_map(visit):
    visit.page.fill("#samples", "4")
    visit.open_picture()
    visit.wait_finished()
    first = visit.pixels()
    visit.page.locator("#classes label").nth(1).click()
    name = visit.page.locator("#classes label").nth(1).locator(".name").text_content()
    expect(visit.wait_finished().locator(".title")).to_have_text(name)
    assert np.abs(visit.pixels() - first).max() > 0
    visit.page.fill("#other-class", "catt")
    visit.page.get_by_role("button", name="Explain").click()
    expect(visit.page.locator(".panel .alert")).to_contain_text("did you mean 0 cat")
    visit.page.locator("#classes label").nth(1).click()
    expect(visit.wait_finished().locator(".title")).to_have_text(name)
    assert visit.complaints == []


def test_a_class_that_is_not_among_the_first_joins_them(visit):
    visit.page.fill("#samples", "2")
    visit.open_picture()
    visit.wait_finished()
    names = visit.page.locator("#classes .name")
    other = next(name for name in NAMES if name not in names.all_text_contents())
    for _ in range(2):  # once only
        visit.page.fill("#other-class", other)
        visit.page.press("#other-class", "Enter")
        expect(visit.wait_finished().locator(".title")).to_have_text(other)
        expect(names).to_have_count(6)
        expect(visit.page.get_by_role("radio", name=other)).to_be_checked()


def test_the_slider_goes_from_the_image_to_the_map(visit):
    visit.page.fill("#samples", "4")
    visit.open_picture()
    visit.wait_finished()
    shown = []
    for value in ("0", "50", "100"):
        visit.page.locator("#mix").fill(value)
        shown.append(visit.pixels().reshape(-1, 4)[:, :3])
    seen = np.asarray(make_picture().resize((32, 32))).reshape(-1, 3)
    assert np.abs(shown[0] - seen).max() <= 1  # the image as the model sees it
    darkest = np.array([0x1F, 0x15, 0x3B])
    assert (np.abs(shown[2] - darkest).max(1) <= 1).mean() > 0.3  # where nothing speaks for the class
    assert np.abs(shown[1] - shown[0]).max() > 0


def test_two_methods_and_two_classes_side_by_side(visit):
    visit.page.fill("#samples", "4")
    visit.open_picture()
    visit.wait_finished()
    visit.page.check("#compare")
    visit.wait_finished(1)
    visit.page.select_option("#compare-class", index=1)
    first, second = visit.wait_finished(0), visit.wait_finished(1)
    assert first.locator(".title").text_content() != second.locator(".title").text_content()
    visit.page.select_option("#compare-method", "effective")
    expect(visit.wait_finished(1).locator(".subtitle")).to_contain_text("effective")
    expect(second.locator(".none")).to_be_visible()
    boxes = [panel.bounding_box() for panel in (first, second)]
    assert boxes[0]["y"] == boxes[1]["y"]
    first.locator("canvas.map").hover(position={"x": 40, "y": 60})
    readings = [panel.locator(".readout").text_content() for panel in (first, second)]
    assert re.match(r"x \d+, y \d+: \S+ ± \S+ logit$", readings[0])
    assert readings[1].split(":")[0] == readings[0].split(":")[0]  # the same pixel in both
    assert visit.complaints == []


def test_it_is_used_by_keyboard_alone(visit):
    page = visit.page
    page.fill("#samples", "2")
    visit.open_picture()
    visit.wait_finished()
    before = page.locator(".panel .title").text_content()
    page.locator("#classes input").first.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".panel .title")).not_to_have_text(before)
    panel = visit.wait_finished()
    panel.locator("canvas.map").focus()
    for key in ("ArrowRight", "Shift+ArrowDown"):
        page.keyboard.press(key)
    expect(panel.locator(".readout")).to_have_text(re.compile(r"x 17, y 26: "))
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = {
        "button",
        "radio",
        "checkbox",
        "combobox",
        "spinbutton",
        "slider",
        "textbox",
        "link",
        "image",
        "radiogroup",
    }
    nameless = [
        node
        for node in tree
        if not node["ignored"] and node["role"]["value"] in roles and not node.get("name", {}).get("value")
    ]
    assert nameless == []


def test_what_goes_wrong_is_said_and_leaves_the_page_usable(visit):
    alert = visit.page.locator("#image-alert")
    visit.open_picture(b"no image at all", "notes.png")
    expect(alert).to_contain_text("not an image")
    visit.open_picture(b"x" * 400_001, "large.png")
    expect(alert).to_contain_text("at most 0.4 MB")
    assert not any("large.png" in url for url in visit.requests)  # it was not sent at all
    visit.page.fill("#samples", "2")
    visit.open_picture()
    visit.wait_finished()
    expect(alert).to_be_hidden()
    assert all("415" in text for text in visit.complaints)  # the browser's own line about the status


def test_a_busy_server_is_said_and_asked_again(visit, slow, browser):
    visit.page.fill("#samples", "2")
    visit.open_picture()
    visit.wait_finished()
    with browser.new_context() as context:
        other = Visit(context.new_page(), visit.base)
        other.start()
        slow.free.clear()
        visit.page.check("#compare")  # one waits behind the other
        visit.page.locator("#classes label").nth(1).click()
        expect(visit.page.locator(".panel").nth(0).locator(".count")).to_contain_text("Waiting")
        other.open_picture()
        expect(other.page.locator("#image-alert")).to_contain_text("server is busy")
        slow.free.set()
        visit.wait_finished()
        other.wait_finished()  # by itself
        expect(other.page.locator("#image-alert")).to_be_hidden()


def test_stop_ends_the_work_on_the_server(visit, slow):
    slow.pause = 0.1
    visit.page.fill("#samples", "480")
    visit.open_picture()
    expect(visit.page.locator(".panel .count")).to_contain_text("of 480 samples", timeout=STARTING)
    before = slow.passes
    visit.page.get_by_role("button", name="Stop").click()
    expect(visit.page.locator(".panel .count")).to_have_text("Stopped")
    time.sleep(0.6)
    passes = slow.passes
    time.sleep(0.4)
    assert slow.passes == passes < before + 12
    slow.pause = 0
    visit.page.get_by_role("button", name="Run").click()
    visit.wait_finished()


def test_an_image_is_dropped_and_pasted(visit):
    visit.page.fill("#samples", "2")
    give = """([kind, bytes]) => {
        const transfer = new DataTransfer();
        transfer.items.add(new File([new Uint8Array(bytes)], `${kind}ped.png`, {type: "image/png"}));
        const event = kind === "drop" ? new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true})
            : new ClipboardEvent("paste", {clipboardData: transfer, bubbles: true, cancelable: true});
        document.body.dispatchEvent(event);
    }"""
    for kind in ("drop", "paste"):
        visit.page.evaluate(give, [kind, list(encode_image(make_picture()))])
        expect(visit.page.locator("#image-note")).to_have_text(f"{kind}ped.png")
        visit.wait_finished()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_both_schemes(browser, tiny, scheme):
    with browser.new_context(
        viewport={"width": 360, "height": 740}, color_scheme=scheme, has_touch=True, is_mobile=True
    ) as context:
        visit = Visit(context.new_page(), tiny)
        visit.start()
        visit.page.fill("#samples", "2")
        visit.open_picture(name="a-rather-long-name-of-a-picture-that-somebody-took-yesterday.png")
        visit.wait_finished()
        visit.page.check("#compare")
        visit.wait_finished(1)
        assert visit.page.evaluate("document.documentElement.scrollWidth") == 360
        paper = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", paper))) > 380) == (scheme == "light")
        assert visit.complaints == []
        folder = os.environ.get("DAVE_SCREENSHOTS")  # where to put what the test saw
        if folder:
            visit.page.screenshot(path=Path(folder) / f"phone-{scheme}.png", full_page=True)
