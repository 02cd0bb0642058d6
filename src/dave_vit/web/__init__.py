"""The web page of `dave serve`: static files and a JSON API. Needs the extra `web`."""

from dave_vit.web.app import create_app
from dave_vit.web.schema import Limits
from dave_vit.web.service import ServedModel

__all__ = ["Limits", "ServedModel", "create_app"]
