"""The web page as people keep it open: its address, two classes or models against each other, and ways of looking."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import writer_folders
from browser_fixtures import STARTING, Visit, expect, held, launched, run_server, served, serving, visiting  # noqa: F401
from dave_vit import create_method, load_model
from dave_vit.data.builtin import compose_scene
from dave_vit.explanations.evidence import SOURCES, Part, compute_evidence
from dave_vit.viz.colors import COLORMAPS
from dave_vit.viz.widget import read_script, widget_traits
from web_fixtures import NAMES, adapter, encode_image, make_picture

pytestmark = pytest.mark.slow


RENDER = """async ([script, traits]) => {
    const { default: widget } = await import(`data:text/javascript,${encodeURIComponent(script)}`);
    const binary = ["map", "signed", "certainty", "pictures"];
    const views = Object.fromEntries(binary.map((name) => [name, new DataView(new Uint8Array(traits[name]).buffer)]));
    const el = document.createElement("div");
    document.body.replaceChildren(el);
    await widget.render({ model: { get: (name) => views[name] ?? traits[name] }, el });
}"""


def shares(visit: Visit, selector: str = "canvas.map") -> np.ndarray:
    """Colours of each pixel, [pixels, 3]."""
    return visit.pixels(selector).reshape(-1, 4)[:, :3].astype(int)


def test_the_address_brings_everything_back(visit):
    page = visit.page
    visit.explain()
    first, opened = page.locator(".panel .title").text_content(), visit.pixels()
    page.locator("#classes label").nth(2).click()
    expect(page.locator(".panel .title")).not_to_have_text(first)
    visit.wait_finished()
    page.select_option("#method", "effective")
    expect(visit.wait_finished().locator(".subtitle")).to_contain_text("effective")
    chosen, shown = page.locator(".panel .title").text_content(), visit.pixels()
    page.reload()
    expect(visit.wait_finished().locator(".title")).to_have_text(chosen)
    expect(page.locator("#method")).to_have_value("effective")
    np.testing.assert_array_equal(visit.pixels(), shown)
    page.go_back()
    page.go_back()
    expect(visit.wait_finished().locator(".title")).to_have_text(first)
    expect(page.locator("#method")).to_have_value("dave")
    np.testing.assert_array_equal(visit.pixels(), opened)
    page.go_back()
    expect(page.locator("#empty")).to_be_visible()
    expect(page.locator(".panel")).to_have_count(0)
    assert visit.complaints == []


BACK_TWICE = """async () => {
    for (let step = 0; step < 2; step++) {
        const followed = new Promise((done) => addEventListener("hashchange", done, {once: true}));
        history.back();
        await followed;
    }
}"""


def test_quick_steps_back_end_where_the_address_says(visit):
    page, busy = visit.page, visit.page.locator(".panel[aria-busy=true]")
    visit.explain(4)
    page.locator("#classes label").nth(2).click()
    page.check("#compare")
    page.select_option("#compare-class", label=page.locator("#classes .name").nth(3).text_content())
    page.select_option("#compare-show", "difference")
    expect(busy).to_have_count(0)
    titles, shown = page.locator(".panel .title").all_text_contents(), visit.pixels("canvas.both")
    page.uncheck("#compare")
    page.select_option("#model", "other")
    expect(page.locator(".panel code")).to_contain_text("--model other")
    page.evaluate(BACK_TWICE)  # the second before the image was looked at again for the first
    expect(page.locator(".panel code").first).to_contain_text("--model tiny")
    expect(busy).to_have_count(0)
    expect(page.locator(".panel .title")).to_have_text(titles)
    np.testing.assert_array_equal(visit.pixels("canvas.both"), shown)


def test_an_address_is_shared(visit, browser):
    page = visit.page
    page.fill("#samples", "2")
    page.get_by_role("button", name="example: coffee").click()
    visit.wait_finished()
    page.locator("#classes .versus").nth(1).click()
    title = visit.wait_finished().locator(".title")
    expect(title).to_contain_text(", not ")
    with browser.new_context() as context:
        other = Visit(context.new_page(), visit.base)
        other.start(page.url.removeprefix(f"{visit.base}/"))
        expect(other.wait_finished().locator(".title")).to_have_text(title.text_content())
        expect(other.page.locator("#samples")).to_have_value("2")
        np.testing.assert_array_equal(other.pixels(), visit.pixels())
        other.page.goto(f"{visit.base}/#image=elsewhere&method=rollout&model=nothing")
        expect(other.page.locator("#image-alert")).to_contain_text("addresses hold all choices, but no images")
        expect(other.page.locator("#method")).to_have_value("rollout")


def test_the_model_is_examined_and_methods_that_cannot_run_are_grey(visit):
    page = visit.page
    expect(page.locator("#verdict summary")).to_have_text("Explained exactly", timeout=30_000)
    page.locator("#verdict summary").click()
    expect(page.locator("#verdict p")).to_contain_text("the linear map of this model (preset exact) is exact")
    expect(page.locator("#knows")).to_have_text(f"This model knows {len(NAMES)} classes.")
    grey = page.locator("#method option[disabled]")
    reason = re.compile("no B-cos module")
    expect(grey.and_(page.locator("[value=bcos]"))).to_have_attribute("title", reason, timeout=30_000)
    expect(page.locator("#method option:not([disabled])").and_(page.locator("[value=rollout]"))).to_have_count(1)
    page.locator("#refused summary").click()
    expect(page.locator("#refused li").first).to_contain_text("bcos: bcos explains B-cos networks")


def test_why_this_and_not_that_with_one_click(visit):
    page = visit.page
    visit.explain(4)
    names = page.locator("#classes .name").all_text_contents()
    plain = visit.pixels()
    page.get_by_role("button", name=f"Why {names[0]} and not {names[1]}?").click()
    expect(visit.wait_finished().locator(".title")).to_have_text(f"{names[0]}, not {names[1]}")
    expect(page.locator("#view")).to_have_value("signed")
    expect(page.locator("#against option:checked")).to_have_text(names[1])
    expect(page.locator(".panel figure .low").first).to_have_text(re.compile("^\N{MINUS SIGN}"))
    page.fill("#mix", "100")
    red, _, blue = shares(visit).T
    assert (red - blue > 30).any()  # orange: against
    assert (blue - red > 30).any()  # violet: for
    assert "--against" in page.locator(".panel code").text_content()
    page.locator("#classes .versus[aria-pressed=true]").click()
    expect(visit.wait_finished().locator(".title")).to_have_text(names[0])
    page.select_option("#view", "map")
    page.fill("#mix", "50")
    np.testing.assert_array_equal(visit.pixels(), plain)


def test_a_class_is_set_against_another_by_the_list(visit):
    visit.explain()
    names = visit.page.locator("#classes .name").all_text_contents()
    visit.page.select_option("#against", label=names[2])
    expect(visit.wait_finished().locator(".title")).to_have_text(f"{names[0]}, not {names[2]}")
    expect(visit.page.locator("#classes .versus").nth(2)).to_have_attribute("aria-pressed", "true")
    visit.page.select_option("#against", "rivals")
    expect(visit.wait_finished().locator(".title")).to_have_text(names[0])
    expect(visit.page.locator(".panel .subtitle")).to_contain_text("against its rivals")


def test_names_that_fit_several_classes_are_offered_as_buttons(visit):
    page = visit.page
    visit.explain()
    page.fill("#other-class", "c")
    page.press("#other-class", "Enter")
    offered = page.locator(".panel .candidates button")
    expect(offered).to_have_text(["cat", "tiger cat", "cock"])
    expect(page.locator(".panel .retry")).to_be_hidden()
    expect(page.locator(".panel canvas.map")).to_be_visible()  # the last map, under its own name
    expect(page.locator(".panel .title")).to_have_text(page.locator("#classes .name").first.text_content())
    offered.nth(1).click()
    expect(visit.wait_finished().locator(".title")).to_have_text("tiger cat")
    expect(page.get_by_role("radio", name="tiger cat")).to_be_checked()


def test_certainty_is_shown_and_what_it_means(visit):
    panel = visit.explain(12)
    figure = panel.locator("figure").nth(1)
    expect(figure.locator(".strong")).to_have_text("Certainty")
    expect(figure.locator(".meaning")).to_contain_text("below 2 it may be chance")
    assert len(np.unique(visit.pixels("canvas.certainty"))) > 10
    visit.page.fill("#samples", "1")
    visit.page.press("#samples", "Enter")
    expect(panel.locator(".notes")).to_contain_text("draw more")


def test_two_classes_have_one_colour_scale(visit):
    page = visit.page
    visit.explain(4)
    page.check("#compare")
    page.select_option("#compare-class", index=1)
    limits = [visit.wait_finished(number).locator("figure .limit").first for number in (0, 1)]
    assert limits[0].text_content() == limits[1].text_content()
    page.select_option("#scales", "own")
    expect(limits[1]).not_to_have_text(limits[0].text_content())
    page.select_option("#compare-method", "rollout")
    page.select_option("#scales", "shared")
    expect(visit.wait_finished(1).locator(".subtitle")).to_contain_text("rollout")
    expect(limits[1]).not_to_have_text(limits[0].text_content())  # of another unit: never one scale
    expect(page.locator("#scales")).to_be_disabled()
    expect(page.locator("#scales-field")).to_be_hidden()
    page.select_option("#compare-show", "difference")
    expect(page.locator("#pair .strong")).to_have_text("Maps of methods with different units have no difference.")
    expect(page.locator("canvas.both")).to_be_hidden()


def test_what_is_weak_is_hidden_and_what_is_fine_is_smoothed(visit):
    page = visit.page
    panel = visit.explain(4, encode_image(Image.new("RGB", (32, 32), "grey")))  # all that is seen is the map
    page.fill("#mix", "100")
    assert panel.get_attribute("aria-busy") == "false"  # the field of samples was left, with what the map was made of
    whole = shares(visit)
    page.fill("#above", "60")
    expect(page.locator("#above-value")).to_have_text("60 %")
    darkest = np.array([0x1F, 0x15, 0x3B])
    dark = [(np.abs(pixels - darkest).max(1) <= 1).mean() for pixels in (whole, shares(visit))]
    assert dark[1] > dark[0]
    page.fill("#above", "0")
    page.fill("#mix", "50")
    steps = []
    for smoothing in ("0", "5"):
        page.fill("#smoothing", smoothing)
        colours = shares(visit).reshape(32, 32, 3)
        steps.append(np.abs(np.diff(colours, axis=1)).mean() / colours.std((0, 1)).mean())  # maps fill the whole scale
    assert steps[1] < steps[0]
    assert "smoothing=5" in page.url


def test_maps_are_zoomed_and_moved_together(visit):
    page = visit.page
    panel = visit.explain()
    expect(page.locator("#verdict")).to_be_visible()  # the last thing to arrive above the map moves it
    stage, canvas = panel.locator(".stage").first.bounding_box(), panel.locator("canvas.map")
    expect(canvas).not_to_have_css("image-rendering", "pixelated")
    page.click("#zoom-in")
    boxes = [panel.locator(f"canvas.{name}").bounding_box() for name in ("map", "certainty")]
    assert [round(box["width"] / stage["width"], 2) for box in boxes] == [2, 2]
    expect(canvas).to_have_css("image-rendering", "pixelated")
    page.mouse.move(stage["x"] + 100, stage["y"] + 100)
    page.mouse.down()
    page.mouse.move(stage["x"] + 130, stage["y"] + 140, steps=4)
    page.mouse.up()
    moved = canvas.bounding_box()
    assert abs(moved["x"] - boxes[0]["x"] - 30) <= 1
    assert abs(moved["y"] - boxes[0]["y"] - 40) <= 1
    page.mouse.move(moved["x"] + 0.5 * moved["width"], moved["y"] + 0.5 * moved["height"])
    expect(panel.locator(".readout")).to_contain_text("x 16, y 16")
    canvas.focus()
    page.keyboard.press("0")
    assert canvas.bounding_box()["width"] == stage["width"]


def test_two_models_their_divider_their_difference_and_one_figure(visit, tmp_path):
    page = visit.page
    visit.explain(4)
    page.check("#compare")
    expect(page.locator("#compare-class option:checked")).to_have_text(
        page.locator(".panel .title").first.text_content()
    )
    page.select_option("#compare-model", "other")
    expect(visit.wait_finished(1).locator(".subtitle")).to_contain_text("other")
    first, second = (shares(visit, f".panel:nth-child({number}) canvas.map") for number in (1, 2))
    assert np.abs(first - second).max() > 0
    page.select_option("#compare-show", "swipe")
    page.fill("#divider", "100")
    np.testing.assert_array_equal(shares(visit, "canvas.both"), first)
    page.fill("#divider", "0")
    np.testing.assert_array_equal(shares(visit, "canvas.both"), second)
    page.select_option("#compare-show", "difference")
    expect(page.locator("#pair .strong")).to_contain_text(" minus ")
    red, _, blue = shares(visit, "canvas.both").T
    assert (red - blue > 30).any()
    assert (blue - red > 30).any()
    with page.expect_download() as taken:
        page.locator("#pair .joint a").click()
    assert taken.value.suggested_filename == "noise.both.png"
    assert all("503" in text for text in visit.complaints)  # asked again by itself


def test_earlier_maps_of_the_session_are_a_click_away(visit):
    page = visit.page
    visit.explain()
    first = page.locator(".panel .title").text_content()
    page.locator("#classes label").nth(1).click()
    expect(page.locator("#session button")).to_have_count(2)
    page.get_by_role("button", name=f"Back to {first}").click()
    expect(visit.wait_finished().locator(".title")).to_have_text(first)
    expect(page.locator("#classes input").first).to_be_checked()


def test_back_shows_the_earlier_map_at_once(visit):
    page = visit.page
    visit.explain()
    first = page.locator(".panel .title").text_content()
    page.locator("#classes label").nth(1).click()
    expect(visit.wait_finished().locator(".title")).not_to_have_text(first)
    computed = [url for url in visit.requests if "/api/explain" in url]
    page.go_back()
    expect(visit.wait_finished().locator(".title")).to_have_text(first)
    assert [url for url in visit.requests if "/api/explain" in url] == computed


def test_a_photograph_is_fitted_in_another_way(visit):
    page = visit.page
    visit.explain(data=encode_image(make_picture((80, 24))))
    page.fill("#mix", "0")
    cropped = visit.pixels()
    page.locator("#classes label").nth(1).click()
    visit.wait_finished()
    chosen = page.locator(".panel .title").text_content()
    page.select_option("#fit", "pad")
    expect(page.locator(".panel code")).to_contain_text("--fit pad")
    expect(page.locator(".panel .title")).to_have_text(chosen)
    assert np.abs(visit.pixels() - cropped).max() > 0
    assert "fit=pad" in page.url
    page.reload()
    expect(visit.wait_finished().locator("code")).to_contain_text("--fit pad")
    assert visit.complaints == []


def test_on_a_phone_the_map_is_in_sight_after_an_upload(browser, tiny):
    with browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True) as context:
        visit = Visit(context.new_page(), tiny)
        visit.start()
        expect(visit.page.locator("#tour")).to_be_in_viewport(ratio=1)
        panel = visit.explain()
        expect(panel.locator("canvas.map")).to_be_in_viewport(ratio=1)
        visit.page.locator("#examples button").first.tap()
        expect(visit.page.locator("#image-note")).to_contain_text("example")
        expect(visit.wait_finished().locator("canvas.map")).to_be_in_viewport(ratio=1)


def test_on_a_phone_the_map_comes_first_and_is_in_sight_when_an_option_changes(browser, tiny):
    with browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True) as context:
        visit = Visit(context.new_page(), tiny)
        visit.start()
        panel = visit.explain()
        order = [visit.page.locator(name).bounding_box()["y"] for name in (".panel canvas.map", "#classes", "#method")]
        assert order == sorted(order)
        visit.page.locator("#method").scroll_into_view_if_needed()
        visit.page.select_option("#method", "effective")
        expect(panel.locator("canvas.map")).to_be_in_viewport(ratio=0.5)


def test_two_fingers_zoom_the_map_and_not_the_page(browser, tiny):
    with browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True) as context:
        visit = Visit(context.new_page(), tiny)
        visit.start()
        panel = visit.explain()
        canvas = panel.locator("canvas.map")
        canvas.scroll_into_view_if_needed()
        box, touch = canvas.bounding_box(), context.new_cdp_session(visit.page)

        def fingers(kind: str, *across: float) -> None:
            points = [{"x": box["x"] + part * box["width"], "y": box["y"] + box["height"] / 2} for part in across]
            touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        fingers("touchStart", 0.4, 0.6)
        for step in range(1, 6):
            fingers("touchMove", 0.4 - 0.04 * step, 0.6 + 0.04 * step)  # three times as far apart
        fingers("touchEnd")
        zoomed = canvas.bounding_box()
        assert abs(zoomed["width"] / box["width"] - 3) < 0.1
        assert abs(zoomed["x"] - (box["x"] - box["width"])) < 5  # the middle stays where it is
        assert visit.page.evaluate("visualViewport.scale") == 1
        fingers("touchStart", 0.5)
        fingers("touchMove", 0.6)
        fingers("touchMove", 0.7)
        fingers("touchEnd")
        assert canvas.bounding_box()["x"] > zoomed["x"] + 0.1 * box["width"]


def test_zooming_in_shows_the_photograph_itself_and_the_factor(visit):
    photograph = make_picture((96, 96))  # which the model sees in 32 x 32 pixels
    visit.explain(data=encode_image(photograph))
    visit.page.locator("#mix").fill("0")
    size = "canvas => [canvas.width, canvas.height]"
    assert visit.page.locator("canvas.map").evaluate(size) == [32, 32]
    visit.page.click("#zoom-in")
    expect(visit.page.locator("#zoom-reset")).to_have_text("2\N{MULTIPLICATION SIGN}")
    expect(visit.page.locator("canvas.map")).to_have_attribute("width", "96")
    assert np.abs(shares(visit).reshape(96, 96, 3) - np.asarray(photograph)).max() <= 1
    visit.page.click("#zoom-reset")
    expect(visit.page.locator("#zoom-reset")).to_have_text("1\N{MULTIPLICATION SIGN}")
    assert visit.page.locator("canvas.map").evaluate(size) == [32, 32]


def test_the_first_visit_is_guided_once(visit):
    page, tour = visit.page, visit.page.locator("#tour")
    expect(tour).to_contain_text("1 of 4. Choose an image")
    page.click("#tour-next")
    visit.wait_finished()  # of an example, since there was no image
    for number in (2, 3, 4):
        expect(tour).to_contain_text(f"{number} of 4.")
        expect(page.locator(".tour-target")).to_have_count(1)
        page.click("#tour-next")
    expect(tour).to_be_hidden()
    page.goto("about:blank")
    page.goto(visit.base)
    expect(page.locator("#examples button").first).to_be_visible()
    expect(tour).to_be_hidden()
    page.evaluate("localStorage.clear()")
    page.reload()
    page.click("#tour-skip")
    expect(tour).to_be_hidden()
    assert visit.complaints == []


@pytest.fixture
def writing(tmp_path) -> Iterator[str]:
    """The address of a server whose model answers questions."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    with run_server([load_model(f"hf:{writer_folders.save('LLaVA', tmp_path)}", device="cpu")]) as address:
        yield address


def test_a_model_that_writes_is_asked_and_its_words_are_explained(browser, writing):
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        visit = Visit(context.new_page(), writing)
        visit.start()
        page = visit.page
        expect(page.locator("#knows")).to_contain_text("writes about images")
        page.select_option("#method", "effective")
        visit.open_picture(encode_image(make_picture((120, 80))))
        expect(page.locator("#classes-card")).to_be_hidden()
        page.fill("#prompt", "what is on the table ?")
        page.press("#prompt", "Enter")
        words = page.locator("#answer button")
        expect(words.nth(2)).to_be_visible()
        assert page.locator(".panel").count() == 0
        words.nth(1).click()
        panel = visit.wait_finished()
        expect(panel.locator(".title")).to_have_text(words.nth(1).text_content())
        assert page.locator("canvas.map").evaluate("canvas => [canvas.width, canvas.height]") == [120, 80]
        first = visit.pixels()
        assert "--prompt 'what is on the table ?' --words 2" in panel.locator("code").text_content()
        words.nth(2).click()
        expect(words.nth(2)).to_have_attribute("aria-pressed", "true")
        expect(panel.locator("code")).to_contain_text("--words 3")
        assert np.abs(visit.pixels() - first).max() > 0
        page.go_back()
        expect(panel.locator("code")).to_contain_text("--words 2")
        np.testing.assert_array_equal(visit.pixels(), first)
        with page.expect_download() as taken:
            panel.get_by_role("link", name="Word PNG").click()
        assert taken.value.suggested_filename == "noise.words.png"
        assert visit.complaints == []


def test_words_are_marked_by_where_they_come_from(browser, monkeypatch):
    """The shade, the line and the numbers of each word are those of Python; here the second word lost its evidence."""
    writer, picture = load_model("builtin-captions", device="cpu"), compose_scene(0, "pair", seed=62_000).image
    answered = writer.with_prompt(Image.fromarray(picture))
    found, chances = compute_evidence(answered, answered.scores(range(3))), answered.probabilities()
    found[1] = replace(found[1], parts=found[1].parts | {"image": Part(0.5, 0.3)})
    monkeypatch.setattr("dave_vit.web.service.find_evidence", lambda *_: found)
    with run_server([writer]) as address, browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        visit = Visit(context.new_page(), address)
        visit.start()
        visit.page.select_option("#method", "effective")
        visit.open_picture(encode_image(Image.fromarray(picture)))
        words = visit.page.locator("#answer button")
        expect(visit.page.locator("#answer-note")).to_contain_text("Underlined: not grounded", timeout=STARTING)
        assert words.all_text_contents() == [word.text for word in answered.words]
        lines = words.evaluate_all("all => all.map((one) => getComputedStyle(one).textDecorationLine)")
        assert lines == ["none", "underline", "none"]
        shades = [one.evaluate("one => getComputedStyle(one).backgroundColor") for one in words.all()]
        for shade, evidence in zip(shades, found, strict=True):
            red, green, blue, _ = COLORMAPS["dave_signed"](round(255 * (0.5 + evidence.image_share / 2)))
            bytes_ = list(map(int, re.findall(r"\d+", shade)))
            np.testing.assert_allclose(bytes_, 255 * np.array([red, green, blue]), atol=1)
        words.nth(1).click()
        panel = visit.wait_finished()
        expect(panel.locator(".title")).to_have_text(answered.words[1].text)
        expect(panel.locator(".subtitle")).to_contain_text(f"{100 * chances[1]:.1f} % likely")
        values = [found[1].parts[source] for source in SOURCES]
        shown = [f"{part.value:+.2f} ± {part.standard_error:.2f}".replace("-", "\N{MINUS SIGN}") for part in values]
        expect(panel.locator(".source .value")).to_have_text(shown)
        expect(panel.locator(".ungrounded-note")).to_contain_text("Not grounded in the image: ")
        assert visit.complaints == []


def test_the_widget_of_notebooks_draws_with_the_same_controls(browser):
    model = adapter()
    traits = widget_traits(create_method("dave", model, samples=4).explain(model.preprocess(make_picture()), [[0, 1]]))
    plain = {name: list(value) if isinstance(value, bytes) else value for name, value in traits.items()}
    with browser.new_context() as context:
        page = context.new_page()
        page.evaluate(RENDER, [read_script(), plain])
        drawn = Visit(page, "")
        first, output = shares(drawn, "canvas.dave-map"), page.locator("output")
        assert len(np.unique(first)) > 10
        expect(page.get_by_label("Image to map")).to_have_value("0.5")
        expect(page.locator("canvas.dave-bar")).to_be_visible()
        number = output.text_content().partition(": 0")[2]
        assert number.endswith(" logit")
        page.locator("select").first.select_option(NAMES[1])
        expect(output).to_have_text(f"{NAMES[1]}: 0{number}")  # one scale for both
        page.get_by_label("Colours").select_option("own")
        limits = [number, output.text_content().partition(": 0")[2]]
        page.locator("select").first.select_option(NAMES[0])
        limits.append(output.text_content().partition(": 0")[2])
        assert len(set(limits)) == 2  # each its own, and the larger one was shared
        page.get_by_label("Colours").select_option("shared")
        width = page.locator("canvas.dave-map").bounding_box()["width"]
        page.get_by_role("button", name="+").click()
        assert page.locator("canvas.dave-map").bounding_box()["width"] == 2 * width
        page.get_by_label("View").select_option("signed")
        signed = shares(drawn, "canvas.dave-map")
        assert np.abs(signed - first).max() > 0
        page.get_by_label("Image to map").fill("0")
        seen = np.asarray(Image.open(io.BytesIO(traits["pictures"]))).reshape(-1, 3).astype(int)
        assert np.abs(shares(drawn, "canvas.dave-map") - seen).max() <= 1
        page.get_by_label("View").select_option("certainty")
        expect(page.locator("output")).to_have_text(f"{NAMES[0]}: 05.00 standard errors or more")
        expect(page.locator(".dave-chance")).to_have_text(
            f"{NAMES[0]}: {100 * traits['probabilities'][0]:.1f} % likely"
        )
