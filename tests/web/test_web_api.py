"""The web API with a tiny model: what it answers, what it refuses, and what it never tells."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import shlex
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs the extra web: pip install 'dave-vit[web]'")

from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from starlette.requests import Request

import dave_vit.viz
import dave_vit.web
from dave_vit import cli
from dave_vit.cli.options import ModelOptions
from dave_vit.data.images import LoadedImage
from dave_vit.errors import DataError
from dave_vit.explanations.classes import classify, explain_classes
from dave_vit.explanations.explainer import Explainer
from dave_vit.web import Limits, ServedModel, create_app, service
from dave_vit.web.images import UploadTooLarge, file_name, read_upload
from tiny_models import SIZE
from web_fixtures import NAMES, SlowModel, adapter, encode_image, make_picture, wait_until

STATIC = [
    file for package in (dave_vit.web, dave_vit.viz) for file in (Path(package.__file__).parent / "static").iterdir()
]
LIMITS = Limits(bytes=50_000, pixels=10_000, samples=600, waiting=1, results=2)


@pytest.fixture(scope="module")
def client():
    with TestClient(create_app([ServedModel(adapter())], LIMITS), raise_server_exceptions=False) as client:
        yield client


def explain(client: TestClient, data: bytes | None = None, **options):
    defaults = {"samples": 4, "name": "my cat.png"} | options
    params = {key: value for key, value in defaults.items() if value is not None}
    return client.post("/api/explain", params=params, content=encode_image(make_picture()) if data is None else data)


SERVED = ("index.html", "classes/2.html", "audit.json")


def test_the_report_of_an_audit_is_served_and_nothing_beside_it(tmp_path):
    report = tmp_path / "report"
    (report / "classes").mkdir(parents=True)
    page = '<style>p {}</style><img src="data:image/png;base64,"><a href="classes/2.html">red</a>'
    for name in (*SERVED, "notes.txt"):
        (report / name).write_text(page)
    (tmp_path / "secret.json").write_text("secret")
    with TestClient(create_app([ServedModel(adapter())], hosts=["localhost"], audit=report)) as client:
        client.headers["host"] = "localhost"
        first = client.get("/audit/")
        assert first.text == page
        assert first.headers["content-type"].startswith("text/html")
        assert "img-src data:" in first.headers["content-security-policy"]
        assert "script" not in first.headers["content-security-policy"]
        assert first.headers["x-content-type-options"] == "nosniff"
        assert [client.get(f"/audit/{name}").status_code for name in SERVED] == [200, 200, 200]
        assert client.get("/audit", follow_redirects=True).text == page
        for name in ("notes.txt", "../secret.json", "%2e%2e/secret.json", "classes/"):
            assert client.get(f"/audit/{name}").status_code == 404
        assert client.post("/audit/").status_code == 405
        assert client.get("/audit/", headers={"host": "elsewhere.example"}).status_code == 403


def test_a_folder_without_an_audit_is_refused(tmp_path):
    with pytest.raises(DataError, match="no report of dave audit"):
        create_app([ServedModel(adapter())], audit=tmp_path)


def events(response) -> list[tuple[str, dict]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = [part.split("\n") for part in response.text.split("\n\n") if part]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


def numbers(plane: dict, step: dict) -> np.ndarray:
    flat = np.frombuffer(base64.b64decode(plane["data"]), "<i2") * plane["unit"]
    return flat.reshape(step["height"], step["width"])


def error(response) -> str:
    message = response.json()["error"]
    assert "\n" not in message
    return message


# --- the page


def test_every_file_of_the_page_is_served_under_a_policy(client):
    for path in ("/", "/api", *(f"/static/{file.name}" for file in STATIC if file.suffix != ".html")):
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_asks_nothing_of_others_and_holds_no_inline_script():
    for file in STATIC:
        text = file.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|//\w+\.\w|@import|<script>|<style|\sstyle=|\son\w+=|javascript:", text), file
    linked = re.findall(r'(?:src|href)="(/static/[^"]+)"|from "\./([^"]+)"', "".join(map(Path.read_text, STATIC)))
    assert {Path(one or other).name for one, other in linked} <= {file.name for file in STATIC}


def test_the_choices(client):
    info = client.get("/api/info").json()
    assert [(model["name"], model["classes"]) for model in info["models"]] == [("tiny", len(NAMES))]
    assert info["models"][0]["presets"]["paper"] == {
        "samples": 50,
        "noise": "variance_preserving",
        "noise_level": 0.5,
        "reducer": "mean",
    }
    methods = {method["name"]: method["takes"] for method in info["methods"]}
    assert next(iter(methods)) == "dave"
    assert {"samples", "noise", "noise_level", "reducer", "preset", "seed"} == set(methods["dave"])
    assert methods["effective"] == []
    assert [len(colours) for colours in info["colormaps"].values()] == [256] * 3
    assert info["models"][0]["knows"] == f"This model knows {len(NAMES)} classes."
    photographs = info["models"][0]["examples"]  # no emoji for a model that was not made for them
    assert photographs == ["/api/examples/cat.png", "/api/examples/coffee.png"]
    for path in (photographs[0], "/api/examples/bear.png"):
        with Image.open(io.BytesIO(client.get(path).content)) as image:
            assert image.size == ((224, 224) if path.endswith("bear.png") else (448, 298))
    assert "no example '9'" in error(client.get("/api/examples/9.png"))


def test_a_photograph_is_fitted_in_another_way(client):
    wide = {"content": encode_image(make_picture((80, 24)))}
    before = client.post("/api/classify", **wide).json()
    shown = {fit: client.post("/api/classify", params={"fit": fit}, **wide).json() for fit in ("crop", "pad", "squash")}
    assert len({one["picture"] for one in shown.values()}) == 3
    assert client.post("/api/classify", **wide).json() == before  # the model itself is as it was
    step = client.post("/api/explain", params={"fit": "pad", "samples": 2, "stream": False}, **wide).json()
    assert step["finished"]["command"].count("--fit pad") == 1


def test_a_map_of_tiles_covers_the_photograph(client):
    wide = {"content": encode_image(make_picture((80, 24)))}
    shown = client.post("/api/classify", params={"fit": "tiles"}, **wide).json()
    step = client.post("/api/explain", params={"fit": "tiles", "samples": 2, "stream": False}, **wide).json()
    with Image.open(io.BytesIO(base64.b64decode(shown["picture"]))) as picture:
        assert picture.size == (step["width"], step["height"])
        assert picture.width > 3 * picture.height
    assert shown["crop"] == [0, 0, 1, 1]
    assert step["finished"]["command"].count("--fit tiles") == 1


def test_classes_are_searched(client):
    assert client.get("/api/classes", params={"search": " CAT"}).json() == ["cat", "tiger cat"]
    assert client.get("/api/classes").json() == NAMES


def test_the_interface_is_described(client):
    described = client.get("/api/openapi.json").json()
    paths = {"info", "classes", "examples/{name}.png", "classify", "explain", "results/{token}/{ending}"}
    paths |= {"generate", "sources", "verdict", "refusals", "results/{first}/{second}/both.png"}
    assert set(described["paths"]) == {f"/api/{path}" for path in paths}
    options = {parameter["name"] for parameter in described["paths"]["/api/explain"]["post"]["parameters"]}
    assert {"model", "method", "target", "samples", "noise_level", "reducer", "seed"} <= options
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404


# --- looking and service


def test_a_look_gives_the_top_five_and_what_the_model_sees(client):
    seen = client.post(
        "/api/classify", params={"name": "x.png"}, content=encode_image(Image.new("RGBA", (9, 9), (1, 2, 3, 4)))
    ).json()
    likely = [prediction["probability"] for prediction in seen["top5"]]
    assert likely == sorted(likely, reverse=True)
    assert 5 / 7 < sum(likely) < 1
    assert seen["notes"] == ["transparent areas drawn on white"]
    with Image.open(io.BytesIO(base64.b64decode(seen["picture"]))) as image:
        assert (image.format, image.size) == ("PNG", (SIZE, SIZE))


def test_a_look_tells_of_other_classes_too(client):
    body = {"content": encode_image(make_picture())}
    seen = client.post("/api/classify", params={"also": list(range(len(NAMES)))}, **body).json()
    assert {guess["name"] for guess in seen["top5"] + seen["also"]} == set(NAMES)
    assert client.post("/api/classify", **body).json()["also"] == []


def test_what_is_known_of_a_model_before_the_first_map(client):
    verdict = client.get("/api/verdict").json()
    assert (verdict["exact"], verdict["text"][:5]) == (True, "good:")
    reasons = client.get("/api/refusals").json()
    assert "no B-cos module" in reasons["bcos"]
    assert not {"dave", "effective", "rollout", "integrated_gradients"} & set(reasons)
    for name, reason in reasons.items():
        assert error(explain(client, method=name, samples=None, stream=False)).endswith(reason[-40:])


def test_names_that_fit_several_classes_come_with_these(client):
    failure = explain(client, target="c", stream=False).json()
    assert [one["name"] for one in failure["candidates"]] == ["cat", "tiger cat", "cock"]
    (*_, (name, failure)) = events(explain(client, target="catt"))
    assert (name, failure["candidates"][0]) == ("failed", {"index": 0, "name": "cat"})


def test_a_class_against_another(client):
    answer = explain(client, stream=False, target="hen", against="dog").json()
    files = answer["finished"]["files"]
    assert client.get(files["json"]).json()["against"] == {"index": 2, "name": "dog"}
    assert "--against dog" in answer["finished"]["command"]
    assert "both class" in error(explain(client, stream=False, target="hen", against="hen"))


def test_the_map_refines_until_it_is_what_the_method_gives(client):
    steps = [data for name, data in events(explain(client, samples=48, target="hen", seed=3)) if name == "step"]
    counts = [step["samples"] for step in steps]
    assert counts == sorted(counts)
    assert counts[-1] == steps[-1]["total"] == 48
    explainer = Explainer(adapter(), "dave", samples=48, seed=3)
    classified = classify(explainer.model, LoadedImage("x", make_picture()))
    expected = explain_classes(explainer, classified, classified.pick("hen")).panels[0]
    last = steps[-1]
    assert last["target"]["name"] == "hen"
    for name in ("map", "standard_error", "signed", "certainty"):
        plane, values = last[name], getattr(expected, name)
        np.testing.assert_allclose(numbers(plane, last), values.numpy(), atol=plane["unit"])
    assert last["finished"]
    assert not any(step["finished"] for step in steps[:-1])


def test_the_last_step_alone_for_machines(client):
    step = explain(client, stream=False, method="effective", samples=None).json()
    assert step["standard_error"] is None
    assert (step["samples"], step["total"]) == (1, 1)
    assert (
        step["finished"]["command"]
        == f"dave explain 'my cat.png' --model tiny --target {step['target']['index']} --method effective"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "paper", "noise_level": 0.2, "noise": "additive", "reducer": "trimmed", "seed": 5},
        {"method": "smoothgrad", "target": "top2"},
    ],
    ids=lambda options: options.get("method", "dave"),
)
def test_the_command_line_makes_the_same_result(client, options, tmp_path, monkeypatch):
    finished = explain(client, stream=False, name="-my 'cat'.png", **options).json()["finished"]
    program, *args = shlex.split(finished["command"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ModelOptions, "load", lambda options: adapter())
    make_picture().save(tmp_path / args[1])
    assert (program, cli.run([*args, "--quiet"])) == ("dave", 0)
    with (
        np.load(io.BytesIO(client.get(finished["files"]["npz"]).content)) as ours,
        np.load(next((tmp_path / "dave-out").glob("*.dave.npz"))) as theirs,
    ):
        assert set(ours) == set(theirs)
        for name in ours:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-7)


def test_the_latest_results_can_be_taken_away(client):
    kept = [explain(client, stream=False).json()["finished"]["files"] for _ in range(LIMITS.results + 1)]
    assert client.get(kept[0]["json"]).status_code == 404
    for ending, path in kept[-1].items():
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-disposition"] == f"attachment; filename*=UTF-8''my%20cat.{ending}"
    record = client.get(kept[-1]["json"]).json()
    assert (record["model"], record["samples"], record["image"]["name"]) == ("tiny", 4, "my cat")
    with Image.open(io.BytesIO(client.get(kept[-1]["panels.png"]).content)) as figure:
        assert figure.width > 900
    assert client.get(f"/api/results/{'x' * 16}/json").status_code == 404


def test_two_results_in_one_figure(client):
    tokens = [explain(client, stream=False, target=name).json()["finished"]["token"] for name in ("hen", "dog")]
    answer = client.get(f"/api/results/{tokens[0]}/{tokens[1]}/both.png", params={"view": "signed"})
    assert answer.headers["content-disposition"].endswith("my%20cat.both.png")
    with Image.open(io.BytesIO(answer.content)) as figure:
        assert figure.width > 2 * figure.height
    assert client.get(f"/api/results/{tokens[0]}/{'x' * 16}/both.png").status_code == 404


def test_a_prompt_to_a_model_that_writes_nothing(client):
    answer = client.post("/api/generate", params={"prompt": "what is it?"}, content=encode_image(make_picture()))
    assert (answer.status_code, error(answer)) == (422, "this model writes no text; a prompt is for models that do")
    assert "writes no text" in error(explain(client, word=1, stream=False))
    sources = client.post("/api/sources", params={"answer": "a cat"}, content=encode_image(make_picture()))
    assert "writes no text" in error(sources)


# --- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "tine"}, "did you mean tiny"),
        ({"method": "dav"}, "did you mean dave"),
        ({"method": "effective"}, "takes no samples"),
        ({"samples": 601}, "at most 600"),
        ({"samples": 0}, "samples: "),
        ({"noise": "pink"}, "noise: "),
        ({"noise_level": 1.5}, "noise level 1.5"),
        ({"reducer": "mode"}, "unknown reducer"),
        ({"preset": "papre"}, "did you mean paper"),
        ({"preset": "/etc/hostname.toml"}, "unknown preset"),
        ({"preset": "mine.toml", "method": "equivariant"}, "unknown preset"),
        ({"weights": "/etc/passwd"}, "weights: "),
    ],
)
def test_a_wrong_option_is_one_line(client, options, words):
    answer = explain(client, **options)
    assert answer.status_code == 422
    assert words in error(answer)


@pytest.mark.parametrize(
    ("target", "words"), [("catt", "did you mean 0 cat"), ("9", "classes 0 to 6"), ("all-top5", "one at a time")]
)
def test_a_wrong_target_is_one_line(client, target, words):
    answer = explain(client, target=target, stream=False)
    assert answer.status_code == 422
    assert words in error(answer)
    (*_, (name, failure)) = events(explain(client, target=target))
    assert (name, words in failure["error"]) == ("failed", True)


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"", 415, "empty"),
        (b"%PDF-1.4 no image", 415, "not an image"),
        (encode_image(make_picture(), "JPEG")[:400], 415, "damaged or cut off"),
        (encode_image(Image.new("1", (500, 500))), 415, "500 x 500 pixels"),
        (encode_image(make_picture(), "PPM"), 415, "not an image"),
        (b"x" * 50_001, 413, "too large"),
    ],
    ids=["empty", "text", "cut", "bomb", "format", "large"],
)
def test_what_is_no_fit_image_is_refused(client, data, status, words):
    for path in ("/api/classify", "/api/explain?stream=false"):
        answer = client.post(path, content=data)
        assert answer.status_code == status
        assert words in error(answer)


def test_a_body_of_unknown_length_is_not_read_beyond_the_limit():
    sent = []

    async def receive() -> dict:
        sent.append(10_000)
        return {"type": "http.request", "body": b"x" * 10_000, "more_body": True}

    with pytest.raises(UploadTooLarge):
        asyncio.run(read_upload(Request({"type": "http", "headers": []}, receive), 50_000))
    assert sum(sent) == 60_000


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/app.py", "/static/"]
)
def test_no_path_is_read(client, path):
    assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1:8000", "origin": "http://evil.example"}, 403),
        ({"host": "127.0.0.1:8000", "origin": "null"}, 403),
    ],
)
def test_other_pages_and_other_names_are_turned_away(headers, status):
    app = create_app([ServedModel(adapter())], hosts=("127.0.0.1",))
    answer = TestClient(app, base_url="http://127.0.0.1").get("/api/classes", headers=headers)
    assert answer.status_code == status


def test_nothing_of_the_server_is_told(tmp_path, monkeypatch):
    served = ServedModel(adapter(f"hf:{tmp_path}"), weights=True, classes=True)
    with TestClient(create_app([served]), raise_server_exceptions=False) as client:
        step = explain(client, stream=False).json()
        responses = [client.get("/api/info").text, json.dumps(step)]
        responses += [client.get(step["finished"]["files"][ending]).text for ending in ("json", "npz")]
        monkeypatch.setattr(service, "classify", lambda *args: 1 / len(str(tmp_path)[:0]))
        answer = explain(client, stream=False)
        responses += [answer.text, explain(client).text]
        assert answer.status_code == 500
    assert "internal server error" in responses[-1]
    assert str(tmp_path.parent) not in "".join(responses)
    assert f"--model hf:{tmp_path.name} --weights FILE --classes FILE" in step["finished"]["command"]


@pytest.mark.parametrize(
    ("given_name", "expected"),
    [("a/b\\c.png", "c.png"), ("../..", "image"), ("\x00\n", "image"), ("-rf.png", "rf.png"), ("é" * 99, "é" * 80)],
)
def test_names_of_files_are_names(given_name, expected):
    assert file_name(given_name) == expected


# --- the queue


def test_a_full_queue_is_said_and_empties_again():
    slow = SlowModel()
    with TestClient(create_app([ServedModel(slow.model)], LIMITS)) as client, ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(explain, client) for _ in range(3)]
        busy = next(as_completed(asked, timeout=10)).result()  # the others wait for the model
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "2")
        assert "busy" in error(busy)
        assert client.post("/api/classify", content=encode_image(make_picture())).status_code == 503
        time.sleep(0.3)  # both are told where they stand meanwhile
        slow.free.set()
        served = [events(one.result()) for one in asked if one.result() is not busy]
        assert sorted(answer[0][1]["ahead"] for answer in served) == [0, 1]
        assert all(answer[-1][1]["finished"] for answer in served)
        assert explain(client).status_code == 200


@pytest.mark.parametrize("method", ["dave", "integrated_gradients"])
def test_a_request_that_goes_away_stops_computing(method):
    slow = SlowModel(pause=0.02)
    slow.free.set()
    options = "method=dave&samples=600&stream=true" if method == "dave" else f"method={method}&stream=false"
    app = create_app([ServedModel(slow.model)], LIMITS)

    async def leave_early() -> None:
        incoming: asyncio.Queue = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": encode_image(make_picture()), "more_body": False})

        async def send(message) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/api/explain", "query_string": options.encode()}
        scope |= {
            "headers": [],
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "http",
        }
        asking = asyncio.create_task(app(scope, incoming.get, send))
        await asyncio.to_thread(wait_until, lambda: slow.passes >= 3)
        incoming.put_nowait({"type": "http.disconnect"})
        incoming.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(asking, 5)

    asyncio.run(leave_early())
    time.sleep(0.1)
    done = slow.passes
    time.sleep(0.2)
    assert slow.passes == done
    assert done < 15  # both would take at least 13 more
    assert len(slow.model._forward_pre_hooks) == 1  # its own


# --- hostile bytes

SEEDS = [encode_image(make_picture((20, 12)), kind) for kind in ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_malformed_images_never_break_the_server(client, data):
    seed = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(seed) - 1))
        seed[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        seed = seed or bytearray(b"x")
    cut = data.draw(st.integers(0, len(seed)))
    answer = client.post("/api/classify", content=bytes(seed[:cut] if data.draw(st.booleans()) else seed))
    assert answer.status_code in (200, 415)
    assert "error" in answer.json() or len(answer.json()["top5"]) == 5


# --- the command


@pytest.fixture
def serving(monkeypatch):
    """`dave serve` up to the point where it would wait for requests."""
    started = []
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: started.append((self.config, sockets[0])))
    monkeypatch.setattr(ModelOptions, "load", lambda options: adapter(options.spec))
    return started


def test_serve_binds_to_this_machine(serving, capsys):
    assert (
        cli.run(["serve", "--port", "0", "--model", "one", "--model", "two", "--weights", "w.pth", "--seed", "7"]) == 0
    )
    (config, listening), shown = serving[0], capsys.readouterr()
    host, port = listening.getsockname()
    listening.close()
    assert host == "127.0.0.1"
    assert f"http://127.0.0.1:{port}" in shown.out
    client = TestClient(config.app, base_url="http://localhost")
    info = client.get("/api/info").json()
    assert ([model["name"] for model in info["models"]], info["seed"]) == (["one", "two"], 7)
    assert client.get("/api/info", headers={"host": "evil.example"}).status_code == 403


def test_serve_warns_where_others_can_connect(serving, capsys):
    assert cli.run(["serve", "--port", "0", "--host", "0.0.0.0"]) == 0
    serving[0][1].close()
    assert "without a password" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "a", "--weights", "x", "--weights", "y"], "2 --weights for 1 --model"),
        (["--model", "a", "--model", "a"], "each name once"),
        (["--host", "nowhere.invalid"], "give another --port or --host"),
    ],
)
def test_serve_tells_what_is_wrong_in_one_line(serving, args, words, capsys):
    assert cli.run(["serve", "--port", "0", *args]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_a_port_that_is_taken_is_one_line(serving, capsys):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.run(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen" in capsys.readouterr().err


def test_certainty_has_one_scale_in_figures_and_on_the_page(client):
    step = explain(client, samples=4, stream=False).json()
    assert step["certainty"]["limit"] == 5
