"""Access to model hubs that fails at once, and in one line, where there is no network."""

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

_SECONDS = 3.0  # longest wait for the hub's first answer


@lru_cache
def _is_reachable(address: str) -> bool:
    """Whether a server can be reached, found out once; behind a proxy, whether the proxy can."""
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
    """Downloads inside, or an error in one line.

    Without a network only files already in the cache are used, so nothing is tried again and again for minutes.

    Args:
        what: the model, for the error message.
        address: where it is published; Hugging Face's hub by default.
        fix: what helps without a download.
    """
    from huggingface_hub import constants, errors

    wanted = address or constants.ENDPOINT
    reachable = not (constants.HF_HUB_OFFLINE and address is None) and _is_reachable(wanted)
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
    except OSError as error:  # all other errors of networks, and what transformers makes of them
        raise _translate_error(what, error, fix, reachable=reachable) from error


@contextmanager
def _offline() -> Iterator[None]:
    """The hub's client uses its cache only, and other downloads give up soon."""
    from huggingface_hub import constants

    before, patience = constants.HF_HUB_OFFLINE, socket.getdefaulttimeout()
    constants.HF_HUB_OFFLINE = True
    socket.setdefaulttimeout(_SECONDS)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # of downloads that cannot come
            yield
    finally:
        constants.HF_HUB_OFFLINE = before
        socket.setdefaulttimeout(patience)


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
