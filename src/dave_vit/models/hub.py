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
    except errors.GatedRepoError as error:
        raise _gated_error(what, fix) from error
    except errors.LocalEntryNotFoundError as error:
        raise _offline_error(what, fix) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise ModelError(f"{what} does not exist on the hub, or is private; check its name, or {fix}") from error
    except OSError as error:  # all other network errors, also as transformers wraps them
        raise _translate_error(what, error, fix, reachable=reachable) from error


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


def _translate_error(what: str, error: OSError, fix: str, *, reachable: bool) -> ModelError:
    text = str(error).lower()
    if "gated" in text:
        return _gated_error(what, fix)
    if not reachable:
        return _offline_error(what, fix)
    if "not a valid model identifier" in text or "404" in text:
        return ModelError(f"{what} does not exist on the hub, or is private; check its name, or {fix}")
    return ModelError(f"{what} cannot be loaded ({first_line(error)[:200]}); {fix}")


def _gated_error(what: str, fix: str) -> ModelError:
    return ModelError(f"{what} is gated: accept its licence on the hub and run `hf auth login`, or {fix}")


def _offline_error(what: str, fix: str) -> ModelError:
    return ModelError(f"{what} is not on this machine and the model hub cannot be reached; {fix}")
