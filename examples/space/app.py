"""A page of Gradio: a photograph and a class in, the map and its certainty out. The model is that of DAVE_MODEL."""

import os
import tempfile

import gradio
from PIL import Image

import dave_vit
from dave_vit.errors import DaveError

model = dave_vit.load_model(os.environ.get("DAVE_MODEL", "timm:deit_tiny_patch16_224"))


def explain(photo: Image.Image, target: str, samples: float) -> tuple[str, dict[str, float]]:
    """Return the file of the figure of a class, and the probabilities of all classes."""
    try:
        probabilities = model(model.preprocess(photo)).softmax(1)[0].tolist()
        explanation = dave_vit.explain(photo, model, target or None, samples=int(samples))
    except DaveError as error:
        raise gradio.Error(str(error)) from error
    with tempfile.NamedTemporaryFile(suffix=".png", delete=False) as file:
        explanation.save(file.name)
    return file.name, dict(zip(model.class_names, probabilities, strict=True))


page = gradio.Interface(
    explain,
    [
        gradio.Image(type="pil", label="Photograph"),
        gradio.Textbox(label="Class", placeholder="a name or an index; the likeliest class by default"),
        gradio.Slider(2, 50, 20, step=1, label="Samples"),
    ],
    [gradio.Image(type="filepath", label="Map", format="png"), gradio.Label(num_top_classes=5, label="Classes")],
    title="What did the model see?",
    flagging_mode="never",
)

if __name__ == "__main__":
    page.launch()
