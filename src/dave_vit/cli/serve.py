"""`dave serve`: the web page."""

from __future__ import annotations

import socket
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dave_vit.cli.common import Output, command
from dave_vit.cli.options import ModelOptions, Models, Plugins, Quiet, Seed, flag, option
from dave_vit.errors import OptionError, import_optional

if TYPE_CHECKING:
    from dave_vit.web import ServedModel


LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CONNECTIONS = 64


class ServedOptions(ModelOptions):
    """The models that the page offers, and their preprocessing."""

    spec: Models = None  # type: ignore[assignment]
    weights: list[str] | None = option(
        "--weights FILE", "Load local weights for the first --model, the second, and so on."
    )  # type: ignore[assignment]


@command(
    "dave serve",
    "dave serve --port 9000 --model builtin --model timm:vit_base_patch16_224",
    "dave serve --model deit_tiny_patch16_224 --weights mine.safetensors --classes names.txt",
    "dave serve --model mine.py:build --plugin methods.py",
    "dave serve --audit dave-audit",
)
def serve(
    *,
    models: ServedOptions,
    port: Annotated[int, flag("--port -p", "Port to listen on; 0 takes any free one.", min=0, max=65535)] = 8000,
    host: Annotated[str, flag("--host", "Address to listen on; 0.0.0.0 accepts other machines.")] = "127.0.0.1",
    name: Annotated[
        list[str] | None, flag("--name HOST", "Accept requests for this host name too; repeatable.")
    ] = None,
    audit: Annotated[Path | None, flag("--audit REPORT", "Show a report of dave audit at /audit too.")] = None,
    seed: Seed = 0,
    plugins: Plugins = None,
    quiet: Quiet = False,
) -> None:
    """Explain images in the browser.

    Serves one page and a JSON API until Ctrl-C. Nothing is loaded from elsewhere, images stay in memory, and only this
    machine can connect unless --host says otherwise.
    """
    create_app = import_optional("dave_vit.web", "fastapi", extra="web").create_app
    uvicorn = import_optional("uvicorn", extra="web")
    from dave_vit.web.request_timeouts import TimeoutProtocol

    output = Output(quiet=quiet)
    listening = _listen(host, port)
    served = _models(models)
    names = allowed_names(host, name or [])
    application = create_app(served, hosts=names, seed=seed, audit=audit)
    if host not in LOOPBACK:
        output.note(f"listening on {host}: anyone who can reach this machine can use it without a password")
        output.note(f"it answers requests for its IP addresses and for {', '.join(names)}; add another with --name")
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}"
    output.print(f"{address}{'' if audit is None else '/audit/'}  (Ctrl-C ends it)")
    limits: dict[str, Any] = {"limit_concurrency": _CONNECTIONS, "timeout_graceful_shutdown": 2}
    config = uvicorn.Config(application, log_level="warning", http=TimeoutProtocol, server_header=False, **limits)
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:  # how one ends a server
        output.print("stopped")


def allowed_names(host: str, further: list[str]) -> tuple[str, ...]:
    """Return the host names that requests may use; a name that somebody else points at this machine is refused."""
    own = () if host in LOOPBACK else (host, socket.gethostname(), socket.getfqdn())
    return tuple(dict.fromkeys(name.lower().rstrip(".") for name in (*LOOPBACK, *own, *further)))


def _listen(host: str, port: int) -> socket.socket:
    """Open the socket before any model is loaded, so that a port in use is reported at once."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, TypeError, ValueError) as error:  # the last two of names that no host can have
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"cannot listen on {host}:{port} ({reason}); give another --port or --host") from error


def _models(options: ServedOptions) -> list[ServedModel]:
    from dave_vit.web import ServedModel

    specs, weights = options.spec or ["builtin"], options.weights or []
    if len(weights) > len(specs):
        raise OptionError(f"{len(weights)} --weights for {len(specs)} --model; give one --model for each")
    if options.prepare is not None and len(specs) > 1:
        raise OptionError("--fit, --size, --mean, --std and --crop belong to one --model; give exactly one")
    if options.fit == "tiles":
        raise OptionError("--fit tiles makes several inputs of an image, and the page shows one; use pad or squash")
    pairs = zip_longest(specs, weights)
    chosen = [ModelOptions(**{**vars(options), "spec": spec, "weights": file}) for spec, file in pairs]
    return [ServedModel(one.load(), weights=one.weights is not None, classes=one.classes is not None) for one in chosen]
