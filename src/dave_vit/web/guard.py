"""Checks of every request, and security headers of every response."""

from collections.abc import Collection
from contextlib import suppress
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


class RequestGuard:
    """Rejects requests of other sites, and sets the headers of every response.

    Starlette's TrustedHostMiddleware is not used: it cannot allow every IP address, does not know "host." with the
    trailing dot of a full name, and does not check the origin.

    Args:
        app: the guarded application.
        hosts: allowed host names, such as "localhost"; empty allows any. This rejects a site whose own name was pointed
            at this machine (DNS rebinding). A bare IP address cannot be pointed elsewhere and is always allowed.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        fault = self._find_fault(Headers(scope=scope))
        app = JSONResponse({"error": fault}, 403) if fault else self._app
        await app(scope, receive, send_with_headers)

    def _find_fault(self, headers: Headers) -> str:
        host = headers.get("host", "")
        origin = headers.get("origin")
        if self._hosts and not self._is_allowed(host):
            return f"this server does not answer for the host {host[:80]!r}"
        if origin is not None and (_split(origin).netloc != host or not host):
            return "this server does not answer requests of other sites"
        return ""

    def _is_allowed(self, host: str) -> bool:
        name = (_split(f"//{host}").hostname or "").rstrip(".")
        with suppress(ValueError):
            return name in self._hosts or ip_address(name) is not None
        return False


def _split(address: str) -> SplitResult:
    """Split an address; all parts of a malformed one are empty."""
    try:
        parts = urlsplit(address)
        parts.hostname, parts.port  # noqa: B018 - these raise where the address is malformed
    except ValueError:
        return SplitResult("", "", "", "", "")
    return parts
