"""The web server against those who mean no good, and against their own clumsiness: raw sockets, odd headers."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra web: pip install 'dave-vit[web]'")

import uvicorn
from fastapi.testclient import TestClient

from dave_vit.cli.serve import LOOPBACK, allowed_names
from dave_vit.web import Limits, ServedModel, create_app, request_timeouts, service
from web_fixtures import SlowModel, adapter, encode_image, make_picture, wait_until


@contextlib.contextmanager
def running(app) -> Iterator[int]:
    """The port of a real server, as `dave serve` runs it."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="critical", http=request_timeouts.TimeoutProtocol, limit_concurrency=64)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        assert wait_until(lambda: server.started)
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)


def ask(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


@pytest.mark.parametrize(
    "header",
    ["Host: [", "Host: ]", "Host: a]b", "Host: [::1", "Host: 127.0.0.1:99999", "Host: 127.0.0.1\r\nOrigin: http://["],
)
def test_headers_that_make_no_sense_are_turned_away_like_any_other(header):
    app = create_app([ServedModel(adapter())], hosts=LOOPBACK)
    with running(app) as port:
        answer = ask(port, f"GET /api/classes HTTP/1.1\r\n{header}\r\nConnection: close\r\n\r\n".encode())
    status, headers = answer.split(b"\r\n", 1)
    assert b" 403 " in status or b" 400 " in status, answer
    if b" 403 " in status:  # 400 is h11's own, before any application
        assert b"content-security-policy" in headers.lower()
    assert b"Traceback" not in answer


@pytest.mark.parametrize(
    ("host", "status"),
    [("192.0.2.7:8000", 200), ("[2001:db8::1]:8000", 200), ("box", 200), ("box.:80", 200), ("rebound.example", 403)],
)
def test_a_public_server_answers_for_addresses_and_its_own_names_only(host, status):
    app = create_app([ServedModel(adapter())], hosts=allowed_names("0.0.0.0", ["Box"]))
    answer = TestClient(app).get("/api/classes", headers={"host": host})
    assert answer.status_code == status


def test_slow_senders_lose_their_connection(monkeypatch):
    monkeypatch.setattr(request_timeouts, "HEADERS", 0.5)
    monkeypatch.setattr(request_timeouts, "BODY", 0.8)
    silent = b""
    half_a_head = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    half_a_body = b"POST /api/classify HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\nabc"
    second_head = b"GET /api/classes HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /"
    with running(create_app([ServedModel(adapter())], hosts=LOOPBACK)) as port, ThreadPoolExecutor(4) as threads:
        start = time.monotonic()
        waits = [threads.submit(_closed_after, port, sent) for sent in (silent, half_a_head, half_a_body, second_head)]
        assert all(wait.result() - start < 8 for wait in waits)
        whole = ask(port, b"GET /api/classes HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert whole.startswith(b"HTTP/1.1 200")


def test_idle_connections_do_not_keep_others_out():
    """As many as the server accepts, all silent: the oldest are closed, and a request is answered at once."""
    app = create_app([ServedModel(adapter())], hosts=LOOPBACK)
    with running(app) as port, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(64)]
        time.sleep(0.3)
        answer = ask(port, b"GET /api/classes HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        with contextlib.suppress(ConnectionResetError):
            assert idle[0].recv(1) == b""  # closed
        idle[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):  # still open
            idle[-1].recv(1)


def test_a_request_is_checked_off_the_event_loop(monkeypatch):
    started, go_on = threading.Event(), threading.Event()

    def check(self, data, query):
        started.set()
        assert go_on.wait(10)
        raise service.ResultExpired("enough")

    monkeypatch.setattr(service.ExplainService, "explain", check)
    data = encode_image(make_picture())
    post = POST.format("false", len(data)).encode() + data
    with running(create_app([ServedModel(adapter())], hosts=LOOPBACK)) as port, ThreadPoolExecutor(1) as threads:
        slow = threads.submit(ask, port, post)
        try:
            assert started.wait(5)
            other = ask(port, b"GET /static/app.js HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert other.startswith(b"HTTP/1.1 200")
            assert not slow.done()
        finally:
            go_on.set()
        assert slow.result().startswith(b"HTTP/1.1 404")


def test_the_samples_of_a_preset_are_limited():
    client = TestClient(create_app([ServedModel(adapter())], Limits(samples=20)))
    answer = client.post("/api/explain", params={"preset": "paper"}, content=encode_image(make_picture()))
    assert answer.status_code == 422
    assert answer.json()["error"] == "50 samples; this server takes at most 20"


def _closed_after(port: int, sent: bytes) -> float:
    """When the server closed a connection on which this was all that came."""
    with socket.create_connection(("127.0.0.1", port), timeout=15) as connection:
        connection.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(65536):
                pass
    return time.monotonic()


def test_a_long_answer_is_not_cut_off(monkeypatch):
    monkeypatch.setattr(request_timeouts, "HEADERS", 0.3)
    monkeypatch.setattr(request_timeouts, "BODY", 0.3)
    slow = SlowModel(pause=0.4)
    slow.free.set()
    data = encode_image(make_picture())
    head = f"POST /api/classify HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    with running(create_app([ServedModel(slow.model)], hosts=LOOPBACK)) as port:
        assert ask(port, head.encode() + data).startswith(b"HTTP/1.1 200")


def test_a_full_queue_is_said_before_the_body_is_read():
    slow = SlowModel()
    limits = Limits(waiting=0)
    data = encode_image(make_picture())
    head = b"POST /api/explain HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with (
        running(create_app([ServedModel(slow.model)], limits, hosts=LOOPBACK)) as port,
        ThreadPoolExecutor(1) as threads,
    ):
        first = threads.submit(ask, port, head % len(data) + data)
        try:
            assert wait_until(lambda: slow.passes > 0)
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(head % len(data) + data[:10])  # the rest never comes
                assert b" 503 " in connection.recv(65536).split(b"\r\n")[0]
        finally:
            slow.free.set()
        assert first.result().startswith(b"HTTP/1.1 200")


def test_downloads_do_not_wait_for_explanations():
    slow = SlowModel()
    slow.free.set()
    with TestClient(create_app([ServedModel(slow.model)])) as client, ThreadPoolExecutor(1) as threads:
        question = {"samples": 2, "stream": False}
        first = client.post("/api/explain", params=question, content=encode_image(make_picture())).json()
        slow.free.clear()
        passes = slow.passes
        second = threads.submit(client.post, "/api/explain", params=question, content=encode_image(make_picture()))
        try:
            assert wait_until(lambda: slow.passes > passes)  # the worker is held inside of the model
            for path in first["finished"]["files"].values():
                assert client.get(path).status_code == 200
            assert not second.done()
        finally:
            slow.free.set()
        assert second.result().status_code == 200


def test_one_who_leaves_stops_the_work_before_preprocessing(monkeypatch):
    slow, decoding, go_on = SlowModel(), threading.Event(), threading.Event()
    slow.free.set()
    read = service.read_picture

    def held(*args):
        decoding.set()
        assert go_on.wait(10)
        return read(*args)

    monkeypatch.setattr(service, "read_picture", held)
    prepared: list[int] = []
    monkeypatch.setattr(type(slow.model), "preprocess", lambda self, image: prepared.append(1))
    data = encode_image(make_picture())
    head = b"POST /api/explain HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(data)
    with running(create_app([ServedModel(slow.model)], hosts=LOOPBACK)) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(head + data)
            assert decoding.wait(5)
        time.sleep(0.6)  # longer than the pulse at which the server looks
        go_on.set()
        time.sleep(0.3)
    assert prepared == []
    assert slow.passes == 0


POST = (
    "POST /api/explain?samples=2&stream={} HTTP/1.1\r\n"
    "Host: 127.0.0.1\r\nConnection: close\r\nContent-Length: {}\r\n\r\n"
)


@pytest.mark.slow
def test_hundreds_of_requests_at_once():
    """Each is answered or turned away, none breaks the server, and it answers as before afterwards."""
    data = encode_image(make_picture())
    explain = POST.format("false", len(data)).encode() + data
    look = b"GET /api/classes HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    at_once = request_timeouts.WAITING  # of more that have not sent their request yet, the server closes the oldest
    with running(create_app([ServedModel(adapter())], hosts=LOOPBACK)) as port, ThreadPoolExecutor(at_once) as threads:
        answers = list(threads.map(lambda number: ask(port, explain if number % 2 else look), range(400)))
        codes = Counter(answer.split(b" ")[1].decode() for answer in answers)
        print(f"400 requests by {at_once} at once: {dict(codes)}")
        assert codes.keys() <= {"200", "503"}
        assert codes["200"] > 200
        assert ask(port, explain).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_dozens_of_streams_that_break_off():
    slow, data = SlowModel(), encode_image(make_picture())
    slow.free.set()
    with running(create_app([ServedModel(slow.model)], hosts=LOOPBACK)) as port:
        for _ in range(60):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(POST.format("true", len(data)).encode() + data)
                connection.recv(64)
        whole = POST.format("false", len(data)).encode() + data
        assert wait_until(lambda: ask(port, whole).startswith(b"HTTP/1.1 200"))
        done = slow.passes
        time.sleep(0.3)
        assert slow.passes == done  # nobody computes for those who left


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks memory up in /proc")
def test_the_page_does_not_grow_over_many_explanations():
    data = encode_image(make_picture())

    def explain(client: TestClient, times: int) -> int:
        for _ in range(times):
            assert client.post("/api/explain", params={"samples": 2, "stream": False}, content=data).status_code == 200
        gc.collect()
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) // 1024

    with TestClient(create_app([ServedModel(adapter())])) as client:
        before, after = explain(client, 20), explain(client, 50)
    print(f"{before} MB after 20 explanations on the page, {after} MB after 70")
    assert after - before < 15


@pytest.mark.filterwarnings("ignore:Glyph")
def test_names_with_formulas_can_be_taken_away(monkeypatch):
    model = adapter()
    model.class_names = [f"${name}^_y$" for name in model.class_names]
    with TestClient(create_app([ServedModel(model)])) as client:
        question = {"samples": 2, "stream": False, "name": "$x^_y$.png"}
        step = client.post("/api/explain", params=question, content=encode_image(make_picture())).json()
        files = step["finished"]["files"]
        assert len(files) == 4
        for path in files.values():
            assert client.get(path).status_code == 200
