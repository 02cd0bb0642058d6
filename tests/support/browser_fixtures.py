"""What the tests of the web page in a real browser share: a browser, a server with tiny models, and a visitor."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is absent; run: pip install playwright")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra web: pip install 'dave-vit[web]'")

from dave_vit.models import Adapter  # noqa: E402
from dave_vit.web import Limits, ServedModel, create_app  # noqa: E402
from web_fixtures import SlowModel, adapter, encode_image, make_picture, wait_until  # noqa: E402

expect = playwright.expect

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ("background-networking", "component-update", "sync", "gpu")  # a browser's own errands
ARGS = ["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET)]
STARTING = 60_000  # milliseconds; importing torch on a busy machine takes a while
# As text: a list of two hundred thousand numbers takes a second to arrive.
PIXELS = """canvas => {
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return Array.from(data, (value) => String.fromCharCode(value)).join("");
}"""
LIMITS = Limits(bytes=400_000, waiting=1)


@dataclass
class Visit:
    """A page, with all that it asked for and complained about."""

    page: playwright.Page
    base: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def start(self, address: str = "") -> None:
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda line: self.complaints.append(line.text) if line.type == "error" else None)
        self.page.goto(f"{self.base}/{address}")
        expect(self.page.locator("#examples button").first).to_be_visible()

    def open_picture(self, data: bytes | None = None, name: str = "noise.png") -> None:
        given = encode_image(make_picture()) if data is None else data
        self.page.set_input_files("#file", {"name": name, "mimeType": "image/png", "buffer": given})

    def explain(self, samples: int = 2, data: bytes | None = None) -> playwright.Locator:
        """The panel of a picture."""
        self.page.fill("#samples", str(samples))
        self.open_picture(data)
        return self.wait_finished()

    def wait_finished(self, number: int = 0) -> playwright.Locator:
        panel = self.page.locator(".panel").nth(number)
        expect(panel.locator(".outputs")).to_be_visible(timeout=STARTING)
        return panel

    def pixels(self, selector: str = "canvas.map") -> np.ndarray:
        text = self.page.locator(selector).first.evaluate(PIXELS)
        return np.frombuffer(text.encode("latin-1"), np.uint8).astype(int)


@contextmanager
def run_server(models: Sequence[Adapter]) -> Iterator[str]:
    """The address of a server with these models."""
    app = create_app([ServedModel(model) for model in models], LIMITS)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(name="browser", scope="module")
def launched() -> Iterator[playwright.Browser]:
    if BROWSER is None:
        pytest.skip("chromium is absent; on Debian and Ubuntu run: apt-get install chromium")
    with playwright.sync_playwright() as library:
        started = library.chromium.launch(executable_path=BROWSER, args=ARGS)
        yield started
        started.close()


@pytest.fixture(name="server", scope="module")
def serving() -> Iterator[tuple[str, SlowModel]]:
    """The address of a server whose models are tiny, and the first of them, which can be held up."""
    slow = SlowModel()
    slow.free.set()
    with run_server([slow.model, adapter("other", depth=1)]) as address:
        yield address, slow
        slow.free.set()


@pytest.fixture(name="slow")
def held(server) -> Iterator[SlowModel]:
    model = server[1]
    model.pause = 0.03
    yield model
    model.pause = 0
    model.free.set()


@pytest.fixture(name="tiny")
def served(server) -> str:
    return server[0]


@pytest.fixture(name="visit")
def visiting(browser, tiny) -> Iterator[Visit]:
    with browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True) as context:
        visit = Visit(context.new_page(), tiny)
        visit.start()
        yield visit
        assert {url for url in visit.requests if not url.startswith((f"{visit.base}/", "blob:"))} == set()
