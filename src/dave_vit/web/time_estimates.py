"""Connections that send their request too slowly are closed: they would hold places that others need."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS = 10.0  # seconds in which the head of a request must arrive
BODY = 30.0  # seconds in which the rest of it must arrive


class Patient(H11Protocol):
    """uvicorn's protocol with a limit on how long a request may take to arrive.

    uvicorn itself only closes connections that are idle after an answer; one that sends a byte now and then, or none
    at all, stays open.
    """

    _timer: asyncio.TimerHandle | None = None
    _timed: Any = None  # the request whose body is waited for

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._wait(HEADERS)

    def data_received(self, data: bytes) -> None:
        """Takes what arrived, and waits for what is still missing."""
        super().data_received(data)
        request = self.cycle
        if request is None or request.response_complete:
            return
        if not request.more_body:
            self._cancel()
        elif request is not self._timed:
            self._timed = request
            self._wait(BODY)

    def on_response_complete(self) -> None:
        """Begins to wait for the next request of this connection."""
        super().on_response_complete()
        self._wait(HEADERS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no more."""
        self._cancel()
        super().connection_lost(exc)

    def _wait(self, seconds: float) -> None:
        self._cancel()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
