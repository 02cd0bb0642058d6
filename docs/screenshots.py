"""Makes the pictures of the web page in docs/figures: python docs/screenshots.py [--weights FILE].

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
CAPTION = 44  # pixels below a picture of the tour
SECONDS = 4.5  # of each picture of the tour
SAMPLES = 28


def top(page: Page) -> None:
    """Shows the page from its beginning."""
    page.evaluate("scrollTo(0, 0)")


def shown(selector: str) -> Callable[[Page], Any]:
    """Shows a part of the page."""
    return lambda page: page.locator(selector).first.scroll_into_view_if_needed()


def filled(**values: str) -> Callable[[Page], Any]:
    """Moves sliders and fills fields, by their names."""
    return lambda page: [page.fill(f"#{name}", value) for name, value in values.items()]


def chosen(**values: str) -> Callable[[Page], Any]:
    """Chooses from lists, by their names."""
    return lambda page: [page.select_option(f"#{name.replace('_', '-')}", value) for name, value in values.items()]


def clicked(*selectors: str) -> Callable[[Page], Any]:
    """Clicks."""
    return lambda page: [page.locator(selector).first.click() for selector in selectors]


def example(number: int) -> Callable[[Page], Any]:
    """Chooses an example."""
    return lambda page: page.get_by_role("button", name=f"Example {number}", exact=True).click()


def pointed(page: Page) -> None:
    """Points at the map, as soon as it is in sight."""
    page.locator("canvas.map").hover(position={"x": 90, "y": 150})
    shown(".readout")(page)


def asked(page: Page) -> None:
    """A name that fits several classes."""
    page.fill("#other-class", "cat")
    page.press("#other-class", "Enter")


class Step(NamedTuple):
    """One picture of the tour: what is said under it, what is done, and what is looked at then."""

    caption: str
    act: Callable[[Page], Any]
    look: Callable[[Page], Any] = top


TOUR = [
    Step("dave serve: a page on your own machine, which asks nobody else for anything", lambda page: None),
    Step("An image, or an example: what the model sees in it, and which pixels speak for it", example(1)),
    Step("From the image ...", filled(mix="0")),
    Step("... to the map", filled(mix="100")),
    Step("Only what is strong", filled(mix="60", above="40")),
    Step("Smoother", filled(above="0", smoothing="4")),
    Step("Pixel by pixel", lambda page: (page.fill("#smoothing", "1"), clicked("#zoom-in", "#zoom-in")(page))),
    Step("Every pixel can be read, with its standard error", clicked("#zoom-reset"), pointed),
    Step("How sure the map is: below two standard errors it may be chance", lambda page: None),
    Step("Another class", clicked("#classes label:has-text('tabby')")),
    Step("Another class, by its name: one that fits several offers them", asked),
    Step("Chosen with a click", clicked(".candidates button")),
    Step(
        "Why an Egyptian cat and not a tabby: one click", clicked("#classes label", "#classes .versus:not(:disabled)")
    ),
    Step("Another image", example(2)),
    Step("Why an espresso, and not a cup", clicked("#classes label", "#classes .class:has-text('cup') .versus")),
    Step(
        "What it was made with: files, and the command line that makes the same", lambda page: None, shown(".command")
    ),
    Step(
        "Two classes on one colour scale: a weak one looks weak",
        lambda page: (chosen(view="map", against="rivals")(page), page.check("#compare")),
    ),
    Step("Each on its own scale", chosen(scales="own")),
    Step(
        "Under a divider",
        lambda page: (chosen(scales="shared", compare_show="swipe")(page), page.fill("#divider", "60")),
    ),
    Step("What they differ in", chosen(compare_show="difference")),
    Step("Another method", chosen(compare_show="beside", compare_method="legrad")),
    Step("Maps of this session are a click away", lambda page: page.uncheck("#compare"), shown("#session")),
    Step("Whether the model is explained exactly", clicked("#verdict summary")),
    Step("Methods that cannot explain it are grey, with the reason", clicked("#refused summary"), shown("#refused")),
    Step("Another model: its own examples", chosen(model="builtin")),
    Step(
        "All of it is in the address: Back leads back, and an address can be shared",
        lambda page: [page.go_back() for _ in range(4)],
    ),
]


@contextmanager
def served(weights: str | None) -> Iterator[str]:
    """The address of a server with a model of photographs and the embedded one."""
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


def settled(page: Page) -> None:
    """Waits until every map that is on its way is done."""
    page.wait_for_timeout(400)
    page.locator('.panel[aria-busy="true"]').first.wait_for(state="detached", timeout=WAIT)
    page.locator("#verdict").wait_for(timeout=WAIT)
    page.mouse.move(0, 0)
    page.wait_for_timeout(600)  # scrolls smoothly


def shot(browser: Browser, address: str, name: str, **options: Any) -> None:
    """One picture of the page at an address."""
    with browser.new_context(**options) as context:
        page = context.new_page()
        page.goto(address)
        page.locator(".panel .outputs").first.wait_for(timeout=WAIT)
        settled(page)
        top(page)
        path = FOLDER / f"page-{name}.webp"
        Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(path, quality=88, method=6)
        sys.stdout.write(f"{path.name}: {path.stat().st_size // 1000} kB\n")


def tour(browser: Browser, address: str) -> None:
    """What the page can do, as an animation."""
    frames = []
    with browser.new_context(**DESKTOP) as context:
        page = context.new_page()
        page.goto(address)
        for step in TOUR:
            step.act(page)
            settled(page)
            step.look(page)
            page.wait_for_timeout(300)
            frames.append(captioned(Image.open(io.BytesIO(page.screenshot())).convert("RGB"), step.caption))
    path = FOLDER / "page-tour.webp"
    options = {"append_images": frames[1:], "duration": int(1000 * SECONDS), "loop": 0, "quality": 70, "method": 6}
    frames[0].save(path, save_all=True, **options)
    sys.stdout.write(f"{path.name}: {path.stat().st_size // 1000} kB, {SECONDS * len(frames):.0f} s\n")


def captioned(picture: Image.Image, text: str) -> Image.Image:
    """A picture with a line of text below it."""
    canvas = Image.new("RGB", (picture.width, picture.height + CAPTION), "#2a1c52")
    canvas.paste(picture, (0, 0))
    font = ImageFont.load_default(20)
    ImageDraw.Draw(canvas).text((24, picture.height + 10), text, fill="white", font=font)
    return canvas


def main() -> None:
    """All pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", help="of DeiT-Tiny: a local file instead of a download")
    given = parser.parse_args()
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser")
    image = f"#image=example-cat&samples={SAMPLES}"
    with served(given.weights) as base, sync_playwright() as library:
        browser = library.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        shot(browser, f"{base}/{image}", "desktop", **DESKTOP)
        both = f"{image}&compare=beside&compare-class=287&compare-method=dave"
        shot(browser, f"{base}/{both}", "dark", color_scheme="dark", **DESKTOP)
        shot(browser, f"{base}/{image}", "phone", **PHONE)
        tour(browser, base)
        browser.close()


if __name__ == "__main__":
    main()
