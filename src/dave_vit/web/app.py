"""The application: routes, answers to errors, and the static page."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from dave_vit._version import __version__
from dave_vit.errors import DaveError, ImageError, TargetError
from dave_vit.viz import Scales, View
from dave_vit.web.cards import info
from dave_vit.web.checking import Checks
from dave_vit.web.explaining import Desk, NotKept, Served
from dave_vit.web.guard import Guard
from dave_vit.web.images import TooLarge, example, read_upload
from dave_vit.web.jobs import Busy, Job, Jobs
from dave_vit.web.schema import (
    Answer,
    AskQuery,
    Candidate,
    ExplainQuery,
    Failure,
    Info,
    Limits,
    Look,
    LookQuery,
    Queued,
    Step,
    Verdict,
)

T = TypeVar("T")
_LOG = logging.getLogger("dave_vit.web")
_STATUS: dict[type[DaveError], int] = {TooLarge: 413, ImageError: 415, Busy: 503, NotKept: 404}
_FAILED = "the server failed, which is no fault of yours; its log says why"
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_BODY = {"requestBody": {"required": True, "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}}}
_FAILURES = {
    404: "no longer kept",
    413: "too many bytes",
    415: "no image that can be read, or too many pixels",
    422: "an option that does not fit",
    503: "busy: the queue is full",
}
_GONE = 499  # nobody reads it; known from nginx
_FOUND = 20  # classes in the answer to a search
_MEANT = 12  # classes that an ambiguous name may have meant
_AGAIN = 2  # seconds after which to ask a busy server again


def create_app(
    models: Sequence[Served], limits: Limits | None = None, *, hosts: Collection[str] = (), seed: int = 0
) -> FastAPI:
    """The web page and its API.

    Args:
        models: those that one can choose among; the first is the default.
        limits: of one request.
        hosts: names under which the server may be asked for; empty allows any.
        seed: the one that the page offers.
    """
    limits = limits or Limits()
    desk, jobs, downloads = Desk(models, limits), Jobs(limits.waiting), Jobs(limits.waiting)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        jobs.close()
        downloads.close()

    # FastAPI's own documentation pages load scripts from elsewhere; ours is static/api.html.
    app = FastAPI(
        title="DAVE",
        version=__version__,
        description="Explains what a Vision Transformer saw. Errors are JSON with one line under `error`.",
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.include_router(_choices(info(models, limits, seed), desk), prefix="/api", tags=["choices"])
    app.include_router(_checks(Checks(desk, jobs)), prefix="/api", tags=["choices"])
    app.include_router(_work(desk, jobs), prefix="/api", tags=["work"])
    app.include_router(_results(desk, downloads), prefix="/api", tags=["work"])
    app.routes.extend(_pages())
    for error in (DaveError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(error, _answer)
    app.add_middleware(Guard, hosts=hosts)
    return app


def _choices(choices: Info, desk: Desk) -> APIRouter:
    router = APIRouter()

    @router.get("/info")
    def everything() -> Info:
        """Models, methods, options, examples, limits and colours."""
        return choices

    @router.get("/classes", responses=_failures(422))
    def classes(search: Annotated[str, Query(max_length=200)] = "", model: str | None = None) -> list[str]:
        """The first classes of a model whose name holds some text."""
        wanted = search.strip().casefold()
        names = desk.served(model).model.class_names
        return [name for name in names if wanted in name.casefold()][:_FOUND]

    @router.get("/examples/{name}.png", response_class=Response, responses=_failures(422))
    def picture(name: str) -> Response:
        """An example image: PNG."""
        return Response(example(name), media_type="image/png")

    return router


def _checks(checks: Checks) -> APIRouter:
    """What takes a while to find out, and is kept."""
    router = APIRouter()

    @router.get("/verdict", responses=_failures(422))
    async def verdict(request: Request, model: str | None = None) -> Verdict:
        """Whether a model is explained exactly, as `dave doctor` finds it."""
        return await checks.verdict(model, request.is_disconnected)

    @router.get("/refusals", responses=_failures(422))
    async def refusals(request: Request, model: str | None = None) -> dict[str, str]:
        """The methods that cannot explain a model, each with its reason."""
        return await checks.refusals(model, request.is_disconnected)

    return router


def _work(desk: Desk, jobs: Jobs) -> APIRouter:
    router = APIRouter()

    @router.post("/look", openapi_extra=_BODY, responses=_failures(413, 415, 422, 503))
    async def look(request: Request, query: Annotated[LookQuery, Query()]) -> Look:
        """What the model takes an image for; the image is the body of the request."""
        jobs.check_room()  # before the body is read
        data = await read_upload(request, desk.limits.bytes)
        return await _last(jobs.submit(desk.look(data, query)), request)

    @router.post("/ask", openapi_extra=_BODY, responses=_failures(413, 415, 422, 503))
    async def ask(request: Request, query: Annotated[AskQuery, Query()]) -> Answer:
        """What a model writes about an image, which is the body of the request; see `word` of `/api/explain`."""
        jobs.check_room()
        data = await read_upload(request, desk.limits.bytes)
        return await _last(jobs.submit(desk.ask(data, query)), request)

    @router.post("/explain", response_model=Step, openapi_extra=_BODY, responses=_failures(413, 415, 422, 503))
    async def explain(request: Request, query: Annotated[ExplainQuery, Query()]) -> Any:
        """What a class owes to each pixel of an image; the image is the body of the request.

        With `stream` the answer is a stream of server-sent events: `queued` with the number of requests before this
        one, `step` with the map after some samples, `failed` with an error. A request that goes away stops the work.
        """
        jobs.check_room()
        data = await read_upload(request, desk.limits.bytes)
        job = jobs.submit((desk.explain if query.word is None else desk.explain_word)(data, query))
        if not query.stream:
            return await _last(job, request)
        return StreamingResponse(_events(job, request, partial(jobs.ahead, job)), media_type="text/event-stream")

    return router


def _results(desk: Desk, downloads: Jobs) -> APIRouter:
    """Files have a worker of their own, so that they need not wait for an explanation to end."""
    router = APIRouter()

    @router.get("/results/{token}/{ending}", response_class=Response, responses=_failures(404, 422, 503))
    async def result(
        request: Request, token: str, ending: Literal["panels.png", "overlay.png", "words.png", "npz", "json"]
    ) -> Response:
        """A file of a result; the latest results are kept."""
        name, data = await _last(downloads.submit(desk.file(token, ending)), request)
        return _attached(name, data)

    @router.get("/results/{first}/{second}/both.png", response_class=Response, responses=_failures(404, 422, 503))
    async def both(
        request: Request, first: str, second: str, view: View = "map", scales: Scales = "shared"
    ) -> Response:
        """The maps of two results in one figure: PNG."""
        name, data = await _last(downloads.submit(desk.both(first, second, view, scales)), request)
        return _attached(name, data)

    return router


def _attached(name: str, data: bytes) -> Response:
    return Response(
        data,
        media_type="image/png" if name.endswith("png") else "application/octet-stream",
        headers={"Content-Disposition": f"attachment; filename*=UTF-8''{quote(name)}"},
    )


def _failures(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": Failure, "description": _FAILURES[code]} for code in codes}


async def _last(job: Job[T], request: Request) -> T:
    """The last step of a job."""
    last: T | None = None
    async with aclosing(job.steps(request.is_disconnected)) as steps:
        async for step in steps:
            last = step if step is not None else last
    if last is None:
        raise ClientDisconnect
    return last


async def _events(job: Job[Step], request: Request, ahead: Callable[[], int]) -> AsyncIterator[str]:
    """The steps of a job as server-sent events."""
    try:
        async with aclosing(job.steps(request.is_disconnected)) as steps:
            async for step in steps:
                yield _event("step", step) if step is not None else _event("queued", Queued(ahead=ahead()))
    except Exception as error:
        if not isinstance(error, DaveError):
            _LOG.exception("request failed")
        yield _event("failed", _failure(error))


def _event(name: str, data: BaseModel) -> str:
    return f"event: {name}\ndata: {data.model_dump_json()}\n\n"


def _failure(error: Exception) -> Failure:
    meant = error.candidates[:_MEANT] if isinstance(error, TargetError) else ()
    return Failure(error=_told(error), candidates=[Candidate(index=index, name=name) for index, name in meant])


def _told(error: Exception) -> str:
    """What an error tells to the one who asked: nothing of the server, unless the error was meant for people."""
    if isinstance(error, DaveError):
        return " ".join(str(error).split())
    if isinstance(error, RequestValidationError):
        return "; ".join(f"{fault['loc'][-1]}: {fault['msg']}" for fault in error.errors())
    return str(error.detail) if isinstance(error, HTTPException) else _FAILED


async def _answer(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_GONE)
    if isinstance(error, DaveError):
        status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 422)
    else:
        status = 422 if isinstance(error, RequestValidationError) else getattr(error, "status_code", 500)
    told = _failure(error).model_dump()
    return JSONResponse(told, status, {"Retry-After": str(_AGAIN)} if status == 503 else None)


def _pages() -> list[Route]:
    """The static files, read once: no path that a stranger names is ever opened."""
    addresses = {"index.html": "/", "api.html": "/api"}
    return [
        Route(addresses.get(entry.name, f"/static/{entry.name}"), _page(entry.read_bytes(), kind))
        for entry in (files("dave_vit.web") / "static").iterdir()
        if (kind := _TYPES.get(entry.name.rpartition(".")[2]))
    ]


def _page(data: bytes, kind: str) -> Callable[[Request], Response]:
    return lambda request: Response(data, media_type=kind)
