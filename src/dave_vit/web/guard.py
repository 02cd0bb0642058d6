"""What every request and every answer passes: who may ask, and what a browser may do with the answer."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'self'; img-src 'self' blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Turns away requests that other pages make, and sets the headers of every answer.

    Args:
        app: what is guarded.
        hosts: names under which the server may be asked for, such as "localhost". A page elsewhere that points a name
            of its own at this machine is turned away by it. A bare address is no such name and always allowed; where
            no names are given, any will do.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        fault = self._fault(Headers(scope=scope))
        app = JSONResponse({"error": fault}, 403) if fault else self._app
        await app(scope, receive, answer)

    def _fault(self, headers: Headers) -> str:
        host = headers.get("host", "")
        origin = headers.get("origin")
        if self._hosts and not self._answers_for(host):
            return f"this server does not answer for the host {host[:80]!r}"
        if origin is not None and (_split(origin).netloc != host or not host):
            return "requests of other pages are not answered"
        return ""

    def _answers_for(self, host: str) -> bool:
        name = (_split(f"//{host}").hostname or "").rstrip(".")
        return name in self._hosts or _is_address(name)


def _split(address: str) -> SplitResult:
    """The parts of an address; none of one that makes no sense."""
    try:
        parts = urlsplit(address)
        parts.hostname, parts.port  # noqa: B018 - these raise where the address is malformed
    except ValueError:
        return SplitResult("", "", "", "", "")
    return parts


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
