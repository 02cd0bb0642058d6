"""CLIP and SigLIP from both sides: what a picture has of a sentence, and what each word of it has of the picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dave_vit.engine import gradient
from dave_vit.engine.rule_sets.effective import EFFECTIVE
from dave_vit.models.adapter import Adapter, Preprocessing
from dave_vit.models.inputs import WithEmbeddings, with_embeddings
from dave_vit.models.traits import Traits
from dave_vit.models.zero_shot import ZeroShot


class Sentences(Adapter):
    """A classifier whose classes are sentences, of transformers.

    Args:
        classifier: the similarity of pictures with the sentences.
        preprocess: from a picture to an input tensor.
        names: of the sentences.
        tokenizer: of words.
        tokens: of the sentences, as the model takes them.
        spec: the name under which the model was loaded.
        traits: what else is known of it.
    """

    def __init__(
        self,
        classifier: ZeroShot,
        preprocess: Preprocessing,
        names: Sequence[str],
        *,
        tokenizer: Any,
        tokens: dict[str, Tensor],
        spec: str,
        traits: Traits,
    ) -> None:
        super().__init__(classifier, preprocess, names, spec=spec, traits=traits)
        self.tokenizer, self.tokens = tokenizer, tokens

    def of_words(self, inputs: Tensor, sentence: int = 0) -> WithEmbeddings:
        """The model of the embedded words of one sentence ``[1, L, D]``; the picture ``[1, C, H, W]`` is constant."""
        both: Any = self.model.model
        said = {name: values[sentence : sentence + 1].to(inputs.device) for name, values in self.tokens.items()}
        return with_embeddings(both, pixel_values=inputs, **said)

    def words(self, inputs: Tensor, sentence: int = 0) -> list[tuple[str, float]]:
        """What each token of a sentence adds to its similarity with a picture, marks and filling left out.

        Args:
            inputs: a picture ``[1, C, H, W]``.
            sentence: its number.
        """
        model = self.of_words(inputs, sentence)
        weight = gradient(model, model.embedded, similarity, rules=EFFECTIVE).weight
        shares = (weight * model.embedded).sum(-1)[0].tolist()  # [L]
        numbers = self.tokens["input_ids"][sentence].tolist()
        said = [pair for pair in zip(numbers, shares, strict=True) if pair[0] not in self.tokenizer.all_special_ids]
        return [(str(self.tokenizer.decode([number])).strip(), share) for number, share in said]


def similarity(output: Any) -> Tensor:
    """Of each row's own sentence and picture."""
    logits: Tensor = output.logits_per_image
    return logits.diagonal()
