"""One Vision Transformer's weights in the spelling of each library."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

State = dict[str, Tensor]

_TORCHVISION = {
    "cls_token": "class_token",
    "pos_embed": "encoder.pos_embedding",
    "patch_embed.proj.": "conv_proj.",
    "blocks.": "encoder.layers.encoder_layer_",
    "norm1.": "ln_1.",
    "norm2.": "ln_2.",
    "attn.qkv.": "self_attention.in_proj_",
    "attn.proj.": "self_attention.out_proj.",
    "mlp.fc1.": "mlp.0.",
    "mlp.fc2.": "mlp.3.",
    "head.": "heads.head.",
}
_TRANSFORMERS = {
    "cls_token": "vit.embeddings.cls_token",
    "pos_embed": "vit.embeddings.position_embeddings",
    "patch_embed.proj.": "vit.embeddings.patch_embeddings.projection.",
    "blocks.": "vit.encoder.layer.",
    "norm1.": "layernorm_before.",
    "norm2.": "layernorm_after.",
    "attn.proj.": "attention.output.dense.",
    "mlp.fc1.": "intermediate.dense.",
    "mlp.fc2.": "output.dense.",
    "head.": "classifier.",
}


def _renamed(key: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        key = key.replace(old, new)
    return key


def to_torchvision(state: State) -> State:
    final = {"norm.weight": "encoder.ln.weight", "norm.bias": "encoder.ln.bias"}
    return {final.get(key) or _renamed(key, _TORCHVISION): value for key, value in state.items()}


def to_transformers(state: State) -> State:
    """As published checkpoints spell it: queries, keys and values apart."""
    final = {"norm.weight": "vit.layernorm.weight", "norm.bias": "vit.layernorm.bias"}
    result = {}
    for key, value in state.items():
        if ".attn.qkv." not in key:
            result[final.get(key) or _renamed(key, _TRANSFORMERS)] = value
            continue
        start, end = _renamed(key, _TRANSFORMERS).split("attn.qkv.")
        for name, part in zip(("query", "key", "value"), value.chunk(3), strict=True):
            result[f"{start}attention.attention.{name}.{end}"] = part.clone()
    return result


def save_transformers(
    folder: Path, state: State, *, size: int, patch: int, heads: int, eps: float = 1e-6, labels: list[str] | None = None
) -> Path:
    """A folder as ``save_pretrained`` would have left it."""
    from safetensors.torch import save_file

    dim, count = state["norm.weight"].shape[0], state["head.weight"].shape[0]
    config = {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": dim,
        "num_hidden_layers": sum(key.endswith("norm1.weight") for key in state),
        "num_attention_heads": heads,
        "intermediate_size": state["blocks.0.mlp.fc1.weight"].shape[0],
        "image_size": size,
        "patch_size": patch,
        "layer_norm_eps": eps,
        "id2label": dict(enumerate(labels or [f"LABEL_{index}" for index in range(count)])),
    }
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": size, "width": size},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    save_file(to_transformers(state), folder / "model.safetensors", {"format": "pt"})
    return folder
