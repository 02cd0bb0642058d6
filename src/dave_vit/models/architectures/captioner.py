"""The embedded captioner: the embedded Vision Transformer and a small decoder, both classes of transformers."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dave_vit.data.builtin import CLASS_NAMES

END, START, AND = "<end>", "<start>", "and"
MAX_LENGTH = 8  # tokens of a caption, with start and end
_ENCODER = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
_DECODER = {"n_embd": 192, "n_layer": 2, "n_head": 3, "n_positions": MAX_LENGTH, "activation_function": "gelu"}
# Parameter names of the embedded model and of published transformers checkpoints.
_KEYS = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj.": "embeddings.patch_embeddings.projection.",
    "blocks.": "encoder.layer.",
    "norm1.": "layernorm_before.",
    "norm2.": "layernorm_after.",
    "attn.proj.": "attention.output.dense.",
    "mlp.fc1.": "intermediate.dense.",
    "mlp.fc2.": "output.dense.",
}


def vocabulary() -> list[str]:
    """Return all words in the order of their token ids."""
    return [END, START, AND, *sorted({word for name in CLASS_NAMES for word in name.split()})]


def caption(names: Sequence[str]) -> str:
    """Return the caption of objects."""
    return f" {AND} ".join(names)


def build_encoder(transformers: Any, state: Mapping[str, Tensor]) -> Any:
    """Build the embedded model without its head as a transformers model, which converts the parameter names."""
    config = transformers.ViTConfig(**_ENCODER, layer_norm_eps=1e-6, image_size=224, patch_size=16)
    named = _rename_keys(state)
    return transformers.ViTModel.from_pretrained(None, config=config, state_dict=named, add_pooling_layer=False)


def _rename_keys(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = {}
    for key, value in state.items():
        for old, new in _KEYS.items():
            key = key.replace(old, new)
        key = f"layernorm.{key.removeprefix('norm.')}" if key.startswith("norm.") else key
        start, joint, end = key.partition("attn.qkv.")
        if not joint:
            named[key] = value
            continue
        for part, rows in zip(("query", "key", "value"), value.chunk(3), strict=True):
            named[f"{start}attention.attention.{part}.{end}"] = rows.clone()
    return {key: value for key, value in named.items() if not key.startswith("head.")}


def build_decoder(transformers: Any) -> Any:
    """Build two layers that attend to the words so far and to the image tokens, initialised at random."""
    marks = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    config = transformers.GPT2Config(
        vocab_size=len(vocabulary()), add_cross_attention=True, is_decoder=True, use_cache=False, **_DECODER, **marks
    )
    return transformers.GPT2LMHeadModel(config)


def build_tokenizer(transformers: Any) -> Any:
    """Build a tokenizer of words separated by spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary())}, unk_token=END))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = {"eos_token": END, "pad_token": END, "bos_token": START}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **marks)


def build_captioner(transformers: Any, state: Mapping[str, Tensor]) -> Any:
    """Build encoder and decoder as one model.

    Args:
        transformers: the library.
        state: weights of the embedded model.
    """
    encoder, decoder = build_encoder(transformers, state), build_decoder(transformers)
    model = transformers.VisionEncoderDecoderModel(encoder=encoder, decoder=decoder)
    model.config.decoder_start_token_id, model.config.eos_token_id, model.config.pad_token_id = 1, 0, 0
    return model.eval()
