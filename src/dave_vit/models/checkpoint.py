"""Checkpoints of transformers, on the hub or in a local folder: configuration, processors and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dave_vit.errors import DaveError, ModelError, first_line, import_optional
from dave_vit.models.adapter import Traits, square_side
from dave_vit.models.prepare import Prepare
from dave_vit.models.state import RANDOM, Weights, hub_access, read_weights

T = TypeVar("T")
HEAD = "classifier"
"""Name of the head of all image classifiers."""
# Files that describe the preprocessing of images; the second one holds a tokenizer's settings as well.
_PREPROCESSING = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# By the configuration's problem type; transformers assumes single labels where it is None.
_COMPETE = {None: True, "single_label_classification": True, "multi_label_classification": False}


@dataclass(frozen=True)
class Checkpoint:
    """A model on the hub or in a local folder.

    Attributes:
        name: on the hub, or the folder.
        config: the configuration of transformers.
        weights: weights that replace the checkpoint's own, "random", or None.
    """

    name: str
    config: Any
    weights: Weights | str | None

    @classmethod
    def open(cls, name: str, weights: str | None, **options: Any) -> Checkpoint:
        """Read the configuration, and the weights if they are a file."""
        file = weights if weights in (None, RANDOM) else read_weights(str(weights))
        return cls(name, import_transformers().AutoConfig.from_pretrained(name, **options), file)

    @property
    def spec(self) -> str:
        """The spec under which the model is loaded."""
        return f"hf:{self.name}"

    @property
    def architectures(self) -> tuple[str, ...]:
        """The classes of transformers that the configuration names."""
        return tuple(getattr(self.config, "architectures", None) or ())

    def find(self, by_suffix: Mapping[str, T]) -> T | None:
        """Return the value of the suffix of an architecture's name; None where there is none."""
        found = (value for end, value in by_suffix.items() if any(one.endswith(end) for one in self.architectures))
        return next(found, None)

    @property
    def is_backbone(self) -> bool:
        """Whether the checkpoint has no head, and the user gave no weights of one."""
        is_bare = all(name.endswith("Model") for name in self.architectures or ("",))
        return is_bare and not isinstance(self.weights, Weights) and not hasattr(self.config, "text_config")

    @property
    def has_text_encoder(self) -> bool:
        """Whether it is an image and text model, not a classifier made of its image encoder."""
        is_classifier = any("Classification" in name for name in self.architectures)
        return hasattr(self.config, "text_config") and not is_classifier

    @property
    def has_processor(self) -> bool:
        """Whether a local folder describes the preprocessing of images."""
        return any((Path(self.name) / name).is_file() for name in _PREPROCESSING)

    @property
    def labels(self) -> list[str]:
        """Names of the classes."""
        return [label for _, label in sorted(self.config.id2label.items())]

    def facts(self, *, compete: bool | None = None) -> dict[str, Any]:
        """Return the spec and the traits, with the side of the patches of the model or of its image encoder."""
        body = getattr(self.config, "vlm_config", self.config)
        encoder = getattr(body, "vision_config", None) or getattr(body, "encoder", None) or body
        traits = Traits(patch=square_side(getattr(encoder, "patch_size", None)), compete=compete)
        return {"spec": self.spec, "traits": traits}

    @property
    def do_labels_compete(self) -> bool | None:
        """Whether classes compete, by the loss that the configuration names; None where it is unknown."""
        return _COMPETE.get(self.config.problem_type)

    def load_part(self, auto_class: str) -> Any:
        """Load a processor or tokenizer."""
        try:
            return getattr(import_transformers(), auto_class).from_pretrained(self.name)
        except (OSError, ValueError) as error:
            if not Path(self.name).is_dir():
                raise
            part = auto_class.removeprefix("Auto")
            raise ModelError(
                f"{self.spec} cannot be used as an image model: its {part} cannot be read; save it there with "
                "save_pretrained, as the model"
            ) from error

    def build_with_head(self, class_name: str, head: str = "class", advice: str = "give a trained model") -> Any:
        """Load the model and refuse it where its head has no trained weights; transformers would draw them."""
        model, missing = self.build(class_name)
        if missing:
            raise ModelError(f"{self.spec} has no trained {head} head ({missing[0]} is missing); {advice}")
        return model

    def build(self, class_name: str, num_labels: int | None = None) -> tuple[Any, list[str]]:
        """Load the model and the names of missing head weights; transformers converts names of older versions."""
        model_class, config = getattr(import_transformers(), class_name), self.config
        if type(config) not in getattr(model_class, "_model_mapping", {type(config): None}):
            raise ModelError(
                f"{self.spec}: transformers has no {class_name.removeprefix('AutoModelFor')} class for "
                f"{config.model_type} models; explain a similarity, --score similarity:FILE, or load it from timm"
            )
        if self.weights == RANDOM:
            return model_class.from_config(config), []
        options = {"config": config, "ignore_mismatched_sizes": True, "output_loading_info": True}
        if isinstance(self.weights, Weights):
            empty = model_class.from_config(config)
            config.num_labels = num_labels or self.weights.count_classes(empty, config.num_labels) or config.num_labels
            model, info = type(empty).from_pretrained(None, state_dict=dict(self.weights.state), **options)
        else:
            model, info = model_class.from_pretrained(self.name, **options)
        mismatched = {key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]}
        missing = sorted({*info["missing_keys"], *mismatched})
        body = [key for key in missing if not key.startswith(HEAD)]
        if body:
            source = self.weights.path if isinstance(self.weights, Weights) else self.spec
            raise ModelError(f"{source}: weights of another model ({len(body)} missing or unfit, such as {body[0]!r})")
        return model, missing


@contextmanager
def loading_errors(name: str, prepare: Prepare | None = None) -> Iterator[None]:
    """Turn errors of transformers into one line; the hub is not contacted for a local folder."""
    folder = Path(name)
    is_local = folder.is_dir()
    if is_local and not (folder / "config.json").is_file():
        raise ModelError(f"{name}: config.json is missing; save model and image processor there with save_pretrained")
    if is_local and not Checkpoint(name, None, None).has_processor and not (prepare and prepare.complete):
        raise ModelError(
            f"{name}: {_PREPROCESSING[0]} is missing; save the image processor there with save_pretrained, or say what "
            "it does, such as --size 224 --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5"
        )
    if not is_local and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelError(f"{name}: no such folder; give the folder of a saved model, or its name on the hub")
    try:
        with nullcontext() if is_local else hub_access(f"hf:{name}"), quiet():
            yield
    except DaveError:
        raise
    except Exception as error:  # processors of other models fail in any way
        raise ModelError(f"hf:{name} cannot be used as an image model: {first_line(error)[:200]}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and reports of transformers; what matters in them is raised."""
    logging = import_transformers().utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def import_transformers() -> Any:
    """Import the library, or raise an error that says how to install it."""
    return import_optional("transformers", extra="hf")
