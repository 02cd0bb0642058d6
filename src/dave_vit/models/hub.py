"""Access model hubs; without a network, fail at once and in one line."""

from __future__ import annotations

import io
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import lru_cache
from urllib.parse import urlparse

from dave_vit.errors import ModelError, first_line

_SECONDS = 3.0  # timeout of the first connection


@lru_cache
def _is_reachable(address: str) -> bool:
    """Return whether a server, or the proxy before it, can be reached; tested once."""
    proxies = (os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    parts = urlparse(next(filter(None, proxies), address))
    try:
        port = parts.port or (80 if parts.scheme == "http" else 443)
        with socket.create_connection((parts.hostname or "", port), timeout=_SECONDS):
            return True
    except OSError:
        return False


@contextmanager
def hub_access(
    what: str, address: str | None = None, *, fix: str = "give a local file with --weights FILE"
) -> Iterator[None]:
    """Allow downloads inside the context; raise errors in one line.

    Without a network only cached files are used, so nothing is retried for minutes.

    Args:
        what: the model, for the error message.
        address: where it is published; Hugging Face's hub by default.
        fix: advice that works without a download.
    """
    from huggingface_hub import constants, errors

    host = address or constants.ENDPOINT
    reachable = not (constants.HF_HUB_OFFLINE and address is None) and _is_reachable(host)
    try:
        # torch announces downloads on standard output, where results go
        with redirect_stdout(sys.stderr) if reachable else _offline():
            yield
    except (OSError, errors.EntryNotFoundError) as error:  # OSError: also as transformers wraps network errors
        raise ModelError(f"{what} {_reason(error, reachable=reachable)} {fix}") from error


@contextmanager
def _offline() -> Iterator[None]:
    """Make the hub's client use its cache only, and other downloads give up soon."""
    from huggingface_hub import constants

    before, timeout = constants.HF_HUB_OFFLINE, socket.getdefaulttimeout()
    constants.HF_HUB_OFFLINE = True
    socket.setdefaulttimeout(_SECONDS)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # reports of downloads that fail
            yield
    finally:
        constants.HF_HUB_OFFLINE = before
        socket.setdefaulttimeout(timeout)


def _reason(error: Exception, *, reachable: bool) -> str:
    from huggingface_hub import errors

    text = str(error).lower()
    absent = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError)
    is_absent = isinstance(error, absent)  # their texts speak of gated models too
    if isinstance(error, errors.GatedRepoError) or (not is_absent and "gated" in text):
        return "is gated: accept its licence on the hub and run `hf auth login`, or"
    if isinstance(error, errors.LocalEntryNotFoundError) or (not is_absent and not reachable):
        return "is not on this machine and the model hub cannot be reached;"
    if is_absent or "not a valid model identifier" in text or "404" in text:
        return "does not exist on the hub, or is private; check its name, or"
    return f"cannot be loaded ({first_line(error)[:200]});"
