"""Model families: one file each, which registers itself in `FAMILIES`; all files of this folder are imported."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dave_vit._internal.registry import Registry, import_all
from dave_vit.models.adapter import Adapter


@dataclass(frozen=True)
class Family:
    """How the models of a family are loaded, and how the command line describes them.

    Attributes:
        load: ``load(name, weights, classes)`` returns a model; weights are a local file, "random", or None for the
            published ones; classes are names, a file of them, or None. It may also take ``prompts=``, sentences that
            become the classes, and ``prepare=``, the preprocessing of models that come without one.
        form: how a spec is written, such as "timm:NAME"; by default the family's name and ":NAME".
        summary: one line of help.
        extra: the extra of this package that installs the library, if one is needed.
        backbone: ``backbone(name, weights, class_names)`` returns a model with an untrained head for these classes and
            the path of that head inside of ``.model``; None where the family's models cannot be probed.
    """

    load: Callable[..., Adapter]
    form: str = ""
    summary: str = ""
    extra: str | None = None
    backbone: Callable[[str, str | None, Sequence[str]], tuple[Adapter, str]] | None = None

    def takes(self, option: str) -> bool:
        """Return whether ``load`` has an argument of this name."""
        return option in inspect.signature(self.load).parameters


FAMILIES: Registry[Family] = Registry("model family")


def family_forms() -> dict[str, Family]:
    """Return all families by the form of their specs, for help texts."""
    names = sorted(FAMILIES, key=lambda name: (name != "builtin", name == "module"))  # the default first
    return {FAMILIES[name].form or f"{name}:NAME": FAMILIES[name] for name in names}


import_all(__name__)  # each file imports its library inside of its functions: most users have only some of them
