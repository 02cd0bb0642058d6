"""Makes the pictures of the web page in docs/figures: python docs/screenshots.py. Needs playwright and chromium."""

from __future__ import annotations

import io
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Browser, Page, sync_playwright

from dave_vit import load_model
from dave_vit.web import Served, create_app

FOLDER = Path(__file__).parent / "figures"
DESKTOP = {"viewport": {"width": 1120, "height": 800}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
WAIT = 240_000  # milliseconds
CAPTION = 44  # pixels below a picture of the tour
SAMPLES = 16

TOUR: list[tuple[str, Callable[[Page], Any]]] = [
    ("An image, an example, or one of your own", lambda page: None),
    ("What the model sees in it, and which pixels speak for it", lambda page: open_example(page)),
    ("Why a trophy and not a backpack: one click", lambda page: page.locator("#classes .versus").nth(1).click()),
    ("Only what is strong", lambda page: page.fill("#above", "40")),
    ("Pixel by pixel", lambda page: (page.fill("#above", "0"), page.click("#zoom-in"))),
    ("Both classes on one colour scale", lambda page: (page.click("#zoom-reset"), page.check("#compare"))),
    ("Under a divider", lambda page: page.select_option("#compare-show", "swipe")),
    ("What they differ in", lambda page: page.select_option("#compare-show", "difference")),
    ("Another method", lambda page: page.select_option("#compare-method", "legrad")),
    ("Back leads back: all of it is in the address", lambda page: [page.go_back() for _ in range(5)]),
]


@contextmanager
def served() -> Iterator[str]:
    """The address of a server with the embedded model."""
    app = create_app([Served(load_model("builtin", device="cpu"))])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def open_example(page: Page) -> None:
    """Chooses the first example."""
    page.get_by_role("button", name="Example 1", exact=True).click()


def settled(page: Page) -> None:
    """Waits until every map that is on its way is done."""
    page.wait_for_timeout(400)
    page.locator('.panel[aria-busy="true"]').first.wait_for(state="detached", timeout=WAIT)
    page.locator("#verdict").wait_for(timeout=WAIT)
    page.mouse.move(0, 0)
    page.wait_for_timeout(600)  # scrolls smoothly


def small(data: bytes, name: str) -> None:
    """Keeps a picture with few colours, which is a third of its size."""
    picture = Image.open(io.BytesIO(data)).convert("RGB").quantize(160, dither=Image.Dither.NONE)
    picture.save(FOLDER / name, optimize=True)
    sys.stdout.write(f"{name}: {(FOLDER / name).stat().st_size // 1000} kB\n")


def shot(browser: Browser, address: str, name: str, **options: Any) -> None:
    """One picture of the page at an address."""
    with browser.new_context(**options) as context:
        page = context.new_page()
        page.goto(address)
        page.locator(".panel .taken").first.wait_for(timeout=WAIT)
        settled(page)
        page.evaluate("scrollTo(0, 0)")
        small(page.screenshot(), name)


def tour(browser: Browser, address: str) -> None:
    """What the page can do, as an animation."""
    frames = []
    with browser.new_context(**DESKTOP) as context:
        page = context.new_page()
        page.goto(address)
        page.fill("#samples", str(SAMPLES))
        for caption, act in TOUR:
            act(page)
            settled(page)
            page.evaluate("scrollTo(0, 0)")
            frames.append(captioned(Image.open(io.BytesIO(page.screenshot())).convert("RGB"), caption))
    path = FOLDER / "page-tour.webp"
    options = {"append_images": frames[1:], "duration": 3000, "loop": 0, "quality": 70, "method": 6}
    frames[0].save(path, save_all=True, **options)
    sys.stdout.write(f"{path.name}: {path.stat().st_size // 1000} kB, {3 * len(frames)} s\n")


def captioned(picture: Image.Image, text: str) -> Image.Image:
    """A picture with a line of text below it."""
    canvas = Image.new("RGB", (picture.width, picture.height + CAPTION), "#2a1c52")
    canvas.paste(picture, (0, 0))
    font = ImageFont.load_default(20)
    ImageDraw.Draw(canvas).text((24, picture.height + 10), text, fill="white", font=font)
    return canvas


def main() -> None:
    """All pictures."""
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser")
    asked = f"#image=example-1&samples={SAMPLES}"
    with served() as base, sync_playwright() as library:
        browser = library.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        against = f"{asked}&against=95&view=signed"
        shot(browser, f"{base}/{against}", "page-desktop.png", **DESKTOP)
        both = f"{asked}&compare=beside&compare-class=95&compare-method=dave"
        shot(browser, f"{base}/{both}", "page-dark.png", color_scheme="dark", **DESKTOP)
        shot(browser, f"{base}/{asked}", "page-phone.png", **PHONE)
        tour(browser, base)
        browser.close()


if __name__ == "__main__":
    main()
