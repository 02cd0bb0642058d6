"""Prompts as the processors of transformers take them: where the photographs stand in the text."""

import re
from typing import Any

from dave_vit.errors import OptionError

_SLOT = "<image>"  # of a photograph in a prompt


def split_prompt(prompt: str, slot: Any, images: int) -> list[str]:
    """Return the text before the first photograph, and the text after each; without slots these come first."""
    slots = [slot, _SLOT] if isinstance(slot, str) else [_SLOT]
    parts = re.split("|".join(map(re.escape, slots)), prompt)
    if images == 1 and len(parts) > 1:
        raise OptionError(
            f"the prompt has an image slot of its own, {slot}; leave it out: a prompt is about one photograph, "
            "whose slot is put where the model expects it, or about several with --together"
        )
    if len(parts) not in (1, images + 1):
        raise OptionError(f"the prompt has {len(parts) - 1} of {images} image slots; give one for each file, or none")
    return parts if len(parts) > 1 else [*[""] * images, prompt]


def format_prompt(processor: Any, parts: list[str]) -> str:
    """Return a prompt, with a photograph after each of its parts but the last, as the model was trained with."""
    if getattr(processor, "chat_template", None):
        content = [{"type": "text", "text": parts[0]}] if parts[0] else []
        for part in parts[1:]:
            content += [{"type": "image"}, *([{"type": "text", "text": part}] if part else [])]
        message = [{"role": "user", "content": content}]
        return str(processor.apply_chat_template(message, add_generation_prompt=True))
    if hasattr(processor, "num_query_tokens") or hasattr(processor, "task_prompts_with_input"):
        return parts[-1]  # BLIP-2 and Florence-2 put the image first by themselves
    return str(getattr(processor, "image_token", "")).join(parts)
