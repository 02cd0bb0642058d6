"""Make the pictures of the web page in docs/figures: python docs/screenshots.py [--weights FILE].

Needs playwright and chromium, and DeiT-Tiny, which is downloaded where no file of its weights is named.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Browser, Page, sync_playwright

from dave_vit import load_model
from dave_vit.web import ServedModel, create_app

FOLDER = Path(__file__).parent / "figures"
PHOTOGRAPHIC = "timm:deit_tiny_patch16_224"
DESKTOP = {"viewport": {"width": 1120, "height": 800}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
WAIT = 240_000  # milliseconds
# Every panel shows its files, or what went wrong.
SETTLED = """() => [...document.querySelectorAll(".panel")].every((panel) =>
    panel.ariaBusy !== "true" && [".outputs", ".alert"].some((part) => !panel.querySelector(part).hidden))"""
CAPTION = 44  # pixels below a picture of the tour
SECONDS = 4.5  # of each picture of the tour


def scroll_to_top(page: Page) -> None:
    """Scroll to the top of the page."""
    page.evaluate("scrollTo(0, 0)")


def scroll_to(selector: str) -> Callable[[Page], Any]:
    """Return an action that scrolls to a part of the page."""
    return lambda page: page.locator(selector).first.scroll_into_view_if_needed()


def fill_fields(**values: str) -> Callable[[Page], Any]:
    """Return an action that sets sliders and fields by their names."""
    return lambda page: [page.fill(f"#{name}", value) for name, value in values.items()]


def select_options(**values: str) -> Callable[[Page], Any]:
    """Return an action that selects options of lists by their names."""
    return lambda page: [page.select_option(f"#{name.replace('_', '-')}", value) for name, value in values.items()]


def click(*selectors: str) -> Callable[[Page], Any]:
    """Return an action that clicks on elements."""
    return lambda page: [page.locator(selector).first.click() for selector in selectors]


def open_example(name: str) -> Callable[[Page], Any]:
    """Return an action that opens an example."""

    def act(page: Page) -> None:
        page.get_by_role("button", name=f"example: {name}").click()
        page.locator("#image-note", has_text=name).wait_for(timeout=WAIT)

    return act


def point_at_map(page: Page) -> None:
    """Point at the map."""
    page.locator("canvas.map").hover(position={"x": 90, "y": 150})
    scroll_to(".readout")(page)


def type_ambiguous_name(page: Page) -> None:
    """Type a name that fits several classes."""
    page.fill("#other-class", "cat")
    page.press("#other-class", "Enter")


class TourStep(NamedTuple):
    """One picture of the tour: its caption, what is done, and what is shown then."""

    caption: str
    act: Callable[[Page], Any]
    show: Callable[[Page], Any] = scroll_to_top


TOUR = [
    TourStep("dave serve: a page on your own machine, which connects to no other server", lambda page: None),
    TourStep("An image or an example: its classes, and which pixels are evidence for one", open_example("cat")),
    TourStep("From the image ...", fill_fields(mix="0")),
    TourStep("... to the map", fill_fields(mix="100")),
    TourStep("Hide weak values", fill_fields(mix="60", above="40")),
    TourStep("Smoother", fill_fields(above="0", smoothing="4")),
    TourStep("Pixel by pixel", lambda page: (page.fill("#smoothing", "1"), click("#zoom-in", "#zoom-in")(page))),
    TourStep("Every pixel can be read, with its standard error", click("#zoom-reset"), point_at_map),
    TourStep("How certain the map is: below two standard errors it may be chance", lambda page: None),
    TourStep("Another class", click("#classes label:has-text('tabby')")),
    TourStep("Another class, by its name: one that fits several offers them", type_ambiguous_name),
    TourStep("Chosen with a click", click(".candidates button")),
    TourStep(
        "Why an Egyptian cat and not a tabby: one click", click("#classes label", "#classes .versus:not(:disabled)")
    ),
    TourStep("Another image", open_example("coffee")),
    TourStep("Why an espresso, and not a cup", click("#classes label", "#classes .class:has-text('cup') .versus")),
    TourStep("Files, and the command line that makes the same map", lambda page: None, scroll_to(".command")),
    TourStep(
        "Two classes on one colour scale: a weak one looks weak",
        lambda page: (
            select_options(view="map", against="rivals")(page),
            page.check("#compare"),
            page.select_option("#compare-class", index=1),
        ),
    ),
    TourStep("Each on its own scale", select_options(scales="own")),
    TourStep(
        "With a divider",
        lambda page: (select_options(scales="shared", compare_show="swipe")(page), page.fill("#divider", "60")),
    ),
    TourStep("Their difference", select_options(compare_show="difference")),
    TourStep("Another method", select_options(compare_show="beside", compare_method="legrad")),
    TourStep("Maps of this session are a click away", lambda page: page.uncheck("#compare"), scroll_to("#session")),
    TourStep("Whether the model is explained exactly", click("#verdict summary")),
    TourStep(
        "Methods that cannot explain it are grey, with the reason", click("#refused summary"), scroll_to("#refused")
    ),
    TourStep("Another model: its own examples", select_options(model="builtin")),
    TourStep(
        "All of it is in the address: Back leads back, and an address can be shared",
        lambda page: [page.go_back() for _ in range(4)],
    ),
]


@contextmanager
def run_server(weights: str | None) -> Iterator[str]:
    """Yield the address of a server with a model of photographs and the embedded one."""
    models = [load_model(PHOTOGRAPHIC, weights, "cpu"), load_model("builtin", device="cpu")]
    app = create_app([ServedModel(model) for model in models])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def wait_until_done(page: Page) -> None:
    """Wait until every map is done."""
    page.wait_for_timeout(400)
    page.wait_for_function(SETTLED, timeout=WAIT)
    page.locator("#verdict").wait_for(timeout=WAIT)
    page.mouse.move(0, 0)
    page.wait_for_timeout(600)  # scrolls smoothly


def take_screenshot(browser: Browser, address: str, name: str, **options: Any) -> None:
    """Save a picture of the page at an address."""
    with browser.new_context(**options) as context:
        page = context.new_page()
        page.goto(address)
        page.locator(".panel .outputs").first.wait_for(timeout=WAIT)
        wait_until_done(page)
        scroll_to_top(page)
        path = FOLDER / f"page-{name}.webp"
        Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(path, quality=88, method=6)
        sys.stdout.write(f"{path.name}: {path.stat().st_size // 1000} kB\n")


def record_tour(browser: Browser, address: str) -> None:
    """Save an animation of what the page can do."""
    frames = []
    with browser.new_context(**DESKTOP) as context:
        page = context.new_page()
        page.goto(address)
        for step in TOUR:
            step.act(page)
            wait_until_done(page)
            step.show(page)
            page.wait_for_timeout(300)
            frames.append(add_caption(Image.open(io.BytesIO(page.screenshot())).convert("RGB"), step.caption))
    path = FOLDER / "page-tour.webp"
    options = {"append_images": frames[1:], "duration": int(1000 * SECONDS), "loop": 0, "quality": 70, "method": 6}
    frames[0].save(path, save_all=True, **options)
    sys.stdout.write(f"{path.name}: {path.stat().st_size // 1000} kB, {SECONDS * len(frames):.0f} s\n")


def add_caption(picture: Image.Image, text: str) -> Image.Image:
    """Return a picture with a line of text below it."""
    canvas = Image.new("RGB", (picture.width, picture.height + CAPTION), "#2a1c52")
    canvas.paste(picture, (0, 0))
    font = ImageFont.load_default(20)
    ImageDraw.Draw(canvas).text((24, picture.height + 10), text, fill="white", font=font)
    return canvas


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", help="of DeiT-Tiny: a local file instead of a download")
    args = parser.parse_args()
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser")
    image = "#image=example-cat"
    with run_server(args.weights) as base, sync_playwright() as library:
        browser = library.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        take_screenshot(browser, f"{base}/{image}", "desktop", **DESKTOP)
        both = f"{image}&compare=beside&compare-class=287&compare-method=dave"
        take_screenshot(browser, f"{base}/{both}", "dark", color_scheme="dark", **DESKTOP)
        take_screenshot(browser, f"{base}/{image}", "phone", **PHONE)
        record_tour(browser, base)
        browser.close()


if __name__ == "__main__":
    main()
