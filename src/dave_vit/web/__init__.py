"""The web page: one static page of our own and a JSON API, for `dave serve`. Needs the extra `web`."""

from dave_vit.web.app import create_app
from dave_vit.web.explaining import Served
from dave_vit.web.schema import Limits

__all__ = ["Limits", "Served", "create_app"]
