"""The application: routes of the API, responses to errors, and the static page."""

import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from dave_vit._version import __version__
from dave_vit.errors import DataError, DaveError, ImageError, TargetError
from dave_vit.viz.rendering import Scales, View
from dave_vit.web import schema
from dave_vit.web.guard import RequestGuard
from dave_vit.web.images import UploadTooLarge, example_png, read_upload
from dave_vit.web.model_checks import ModelChecks
from dave_vit.web.options import ExplainQuery, build_info
from dave_vit.web.service import ExplainService, ResultExpired, ServedModel
from dave_vit.web.work_queue import Check, QueueFull, WorkItem, WorkQueue

T = TypeVar("T")
Q = TypeVar("Q")
_LOG = logging.getLogger("dave_vit.web")
_STATUS: dict[type[DaveError], int] = {UploadTooLarge: 413, ImageError: 415, QueueFull: 503, ResultExpired: 404}
_SERVER_ERROR = "internal server error; the server's log has the details"
_MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_REPORT_TYPES = {".html": "text/html", ".md": "text/markdown", ".json": "application/json"}
# A report has its style and pictures in itself, and no scripts.
_REPORT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
_BODY = {"requestBody": {"required": True, "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}}}
_FAILURES = {
    404: "the result is no longer kept",
    413: "too many bytes",
    415: "not a readable image, or too many pixels",
    422: "an invalid option",
    503: "busy: the queue is full",
}
_CLIENT_GONE = 499  # nobody reads it; known from nginx
_MAX_FOUND = 20  # classes in the response to a search
_MAX_CANDIDATES = 12  # classes that an ambiguous name may mean
_RETRY_SECONDS = 2  # after which to ask a busy server again


def create_app(
    models: Sequence[ServedModel],
    limits: schema.Limits | None = None,
    *,
    hosts: Collection[str] = (),
    seed: int = 0,
    audit: Path | None = None,
) -> FastAPI:
    """Create the web page and its API.

    Args:
        models: the models to choose among; the first is the default.
        limits: of one request.
        hosts: host names that browsers may use for the server; empty allows any.
        seed: the default seed on the page.
        audit: folder of a report of `dave audit`, which is served under /audit/.
    """
    limits = limits or schema.Limits()
    service = ExplainService(models, limits)
    # files have a worker of their own, so that they need not wait for an explanation to end
    queue, downloads = WorkQueue(limits.waiting), WorkQueue(limits.waiting)
    api = APIRouter(prefix="/api")
    info = build_info([served.model for served in models], limits, seed)
    _add_choices(api, info, service, ModelChecks(service, queue))
    _add_work(api, service, queue)
    _add_results(api, service, downloads)
    app = _empty_app(queue, downloads)
    app.include_router(api)
    app.routes.extend([*_static_routes(), *(_report_routes(audit) if audit else ())])
    for error in (DaveError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(error, _error_response)
    app.add_middleware(RequestGuard, hosts=hosts)
    return app


def _empty_app(*queues: WorkQueue) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        for queue in queues:
            queue.close()

    # FastAPI's own documentation pages load scripts from elsewhere; ours is static/api.html.
    return FastAPI(
        title="DAVE",
        version=__version__,
        description="Explains what a Vision Transformer sees. Errors are JSON with one line under `error`.",
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )


def _add_choices(router: APIRouter, choices: schema.Info, service: ExplainService, checks: ModelChecks) -> None:
    @router.get("/info")
    def info() -> schema.Info:
        """Return models, methods, options, limits and colours."""
        return choices

    @router.get("/classes", responses=_failures(422))
    def classes(search: Annotated[str, Query(max_length=200)] = "", model: str | None = None) -> list[str]:
        """Return the first classes of a model whose name contains a text."""
        text = search.strip().casefold()
        names = service.find_model(model).model.class_names
        return [name for name in names if text in name.casefold()][:_MAX_FOUND]

    @router.get("/examples/{name}.png", response_class=Response, responses=_failures(422))
    def example(name: str) -> Response:
        """Return an example image: PNG."""
        return Response(example_png(name), media_type="image/png")

    @router.get("/verdict", responses=_failures(422))
    async def verdict(request: Request, model: str | None = None) -> schema.Verdict:
        """Return whether a model is explained exactly, as `dave doctor` does."""
        return await checks.verdict(model, request.is_disconnected)

    @router.get("/refusals", responses=_failures(422))
    async def refusals(request: Request, model: str | None = None) -> dict[str, str]:
        """Return the methods that cannot explain a model, each with its reason."""
        return await checks.refusals(model, request.is_disconnected)


def _add_work(router: APIRouter, service: ExplainService, queue: WorkQueue) -> None:
    takes_image: dict[str, Any] = {"openapi_extra": _BODY, "responses": _failures(413, 415, 422, 503)}

    async def read_body(request: Request) -> bytes:
        queue.check_capacity()  # before the body is read
        return await read_upload(request, service.limits.bytes)

    async def call(request: Request, function: Callable[[Check, bytes, Q], T], query: Q) -> T:
        data = await read_body(request)
        return await queue.call(lambda check: function(check, data, query), request.is_disconnected)

    @router.post("/classify", **takes_image)
    async def classify(request: Request, query: Annotated[schema.ClassifyQuery, Query()]) -> schema.Classification:
        """Classify an image, which is the body of the request."""
        return await call(request, service.classify, query)

    @router.post("/generate", **takes_image)
    async def generate(request: Request, query: Annotated[schema.AnswerQuery, Query()]) -> schema.Answer:
        """Let a model write about an image, which is the body of the request; see `word` of `/api/explain`."""
        return await call(request, service.answer, query)

    @router.post("/sources", **takes_image)
    async def sources(request: Request, query: Annotated[schema.SourcesQuery, Query()]) -> list[schema.TracedWord]:
        """Compute where each word of an answer comes from: the image, the prompt, the words before, constants."""
        return await call(request, service.trace, query)

    @router.post("/explain", response_model=schema.ExplainStep, **takes_image)
    async def explain(request: Request, query: Annotated[ExplainQuery, Query()]) -> Any:
        """Compute how much each pixel of an image contributes to a class; the image is the body of the request.

        With `stream` the response is a stream of server-sent events: `queued` with the number of requests before this
        one, `step` with the map after some samples, `failed` with an error. The work stops if the client disconnects.
        """
        work = await run_in_threadpool(service.explain, await read_body(request), query)  # other requests go on
        item = queue.submit(work)
        if not query.stream:
            return await item.last_result(request.is_disconnected)
        events = _stream_events(item, request, lambda: queue.count_ahead(item))
        return StreamingResponse(events, media_type="text/event-stream")


def _add_results(router: APIRouter, service: ExplainService, downloads: WorkQueue) -> None:
    async def attach(request: Request, make_file: Callable[[], tuple[str, bytes]]) -> Response:
        name, data = await downloads.call(lambda check: make_file(), request.is_disconnected)
        media_type = "image/png" if name.endswith("png") else "application/octet-stream"
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(name)}"}
        return Response(data, media_type=media_type, headers=headers)

    @router.get("/results/{token}/{ending}", response_class=Response, responses=_failures(404, 422, 503))
    async def result(
        request: Request, token: str, ending: Literal["panels.png", "overlay.png", "words.png", "npz", "json"]
    ) -> Response:
        """Return a file of a result; the latest results are kept."""
        return await attach(request, lambda: service.read_file(token, ending))

    @router.get("/results/{first}/{second}/both.png", response_class=Response, responses=_failures(404, 422, 503))
    async def both(
        request: Request, first: str, second: str, view: View = "map", scales: Scales = "shared"
    ) -> Response:
        """Return the maps of two results in one figure: PNG."""
        return await attach(request, lambda: service.draw_both(first, second, view, scales))


def _failures(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": schema.Failure, "description": _FAILURES[code]} for code in codes}


async def _stream_events(
    item: WorkItem[schema.ExplainStep], request: Request, count_ahead: Callable[[], int]
) -> AsyncIterator[str]:
    """Yield the steps as server-sent events."""
    try:
        async with aclosing(item.results(request.is_disconnected)) as steps:
            async for step in steps:
                yield _event("step", step) if step is not None else _event("queued", schema.Queued(ahead=count_ahead()))
    except Exception as error:
        if not isinstance(error, DaveError):
            _LOG.exception("request failed")
        yield _event("failed", _failure(error))


def _event(name: str, data: BaseModel) -> str:
    return f"event: {name}\ndata: {data.model_dump_json()}\n\n"


def _failure(error: Exception) -> schema.Failure:
    candidates = error.candidates[:_MAX_CANDIDATES] if isinstance(error, TargetError) else ()
    listed = [schema.ClassCandidate(index=index, name=name) for index, name in candidates]
    return schema.Failure(error=_error_message(error), candidates=listed)


def _error_message(error: Exception) -> str:
    """Return one line that reveals nothing about the server, unless the error was written for users."""
    if isinstance(error, DaveError):
        return " ".join(str(error).split())
    if isinstance(error, RequestValidationError):
        return "; ".join(f"{fault['loc'][-1]}: {fault['msg']}" for fault in error.errors())
    return str(error.detail) if isinstance(error, HTTPException) else _SERVER_ERROR


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_CLIENT_GONE)
    if isinstance(error, DaveError):
        status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 422)
    else:
        status = 422 if isinstance(error, RequestValidationError) else getattr(error, "status_code", 500)
    headers = {"Retry-After": str(_RETRY_SECONDS)} if status == 503 else None
    return JSONResponse(_failure(error).model_dump(), status, headers)


def _static_routes() -> list[Route]:
    """Return a route for each static file: no path of a request is ever opened."""
    addresses = {"index.html": "/", "api.html": "/api"}
    return [
        _file_route(addresses.get(entry.name, f"/static/{entry.name}"), entry, media_type)
        for folder in (files("dave_vit.web") / "static", files("dave_vit.viz") / "static")
        for entry in folder.iterdir()
        if (media_type := _MEDIA_TYPES.get(entry.name.rpartition(".")[2]))
    ]


def _report_routes(folder: Path) -> Iterator[Route]:
    """Yield the pages and records of a report; only the files that it has now are ever opened."""
    if not (folder / "audit.json").is_file():
        raise DataError(f"{folder}: no report of dave audit; looked for audit.json")
    for path in [*folder.glob("*.*"), *folder.glob("classes/*.html")]:
        if media_type := _REPORT_TYPES.get(path.suffix):
            name = path.relative_to(folder).as_posix()
            for address in (name, "") if name == "index.html" else (name,):
                yield _file_route(f"/audit/{address}", path, media_type, {"Content-Security-Policy": _REPORT_POLICY})


def _file_route(address: str, file: Traversable, media_type: str, headers: dict[str, str] | None = None) -> Route:
    return Route(address, lambda request: Response(file.read_bytes(), media_type=media_type, headers=headers))
