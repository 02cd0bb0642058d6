"""Close connections that send their request too slowly, or that are too many: others need their places."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS = 5.0  # seconds in which the head of a request must arrive
BODY = 30.0  # seconds in which the rest of it must arrive
WAITING = 32  # connections that may wait for a request or its body; half of what `dave serve` accepts


class TimeoutProtocol(H11Protocol):
    """uvicorn's HTTP protocol with a limit on how long a request may take to arrive.

    uvicorn itself closes only connections that are idle after an answer; one that sends a byte now and then, or none
    at all, stays open. It also refuses requests once too many connections are open, so that of too many idle ones
    the oldest is closed.
    """

    _timer: asyncio.TimerHandle | None = None
    _timed_request: Any = None  # the request whose body has not arrived yet
    _waiting_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first request."""
        super().connection_made(transport)
        self._start_timer(HEADERS)
        self._close_oldest()

    def data_received(self, data: bytes) -> None:
        """Handle new bytes; start the timer of the body if it is incomplete."""
        super().data_received(data)
        request = self.cycle
        if request is None or request.response_complete:
            return
        if not request.more_body:
            self._cancel_timer()
        elif request is not self._timed_request:
            self._timed_request = request
            self._start_timer(BODY)

    def on_response_complete(self) -> None:
        """Start the timer of the next request of this connection."""
        super().on_response_complete()
        self._start_timer(HEADERS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._cancel_timer()
        super().connection_lost(exc)

    def _close_oldest(self) -> None:
        """Close the connections that have waited longest, so that at most `WAITING` wait."""
        waiting = [one for one in self.connections if isinstance(one, TimeoutProtocol) and one._timer is not None]
        for one in sorted(waiting, key=lambda one: one._waiting_since)[:-WAITING]:
            one.transport.abort()

    def _start_timer(self, seconds: float) -> None:
        self._cancel_timer()
        self._waiting_since = self.loop.time()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
