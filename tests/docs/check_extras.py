"""Install the wheel with each extra alone and use what it adds: `make test-extras`. Not collected with the tests."""

from __future__ import annotations

import resource
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_newcomer import ROOT, find_uv, install, run_checked

EXTRAS = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
EVALUATE = """
from dave_vit.cli import run
assert run("evaluate --metric energypg --methods {} --limit 2 --out run".split()) == 0
"""
# What a user of each extra does first.
USES = {
    "hf": """
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor
small = ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96)
ViTForImageClassification(small).save_pretrained("folder")
ViTImageProcessor().save_pretrained("folder")
from dave_vit.cli import run
assert run("doctor --model hf:folder".split()) == 0
""",
    "clip": """
import dave_vit
model = dave_vit.load_model("openclip:ViT-B-32", "random", prompts=["a cat", "a dog"])
assert dave_vit.create_method("gradcam", model).attribute("photo.jpg", "a cat").isfinite().all()
""",
    "bcos": """
import dave_vit
model = dave_vit.load_model("bcos:vitc_ti_patch1_14", "random")
assert dave_vit.create_method("input_x_gradient", model).attribute("photo.jpg", 0).isfinite().all()
""",
    "eval": EVALUATE.format("saliency,attention_flow,vit_cx"),
    "cluster": EVALUATE.format("saliency --engine ray"),
    "web": """
import threading, time, urllib.request
import uvicorn
import dave_vit
from dave_vit.web import ServedModel, create_app
server = uvicorn.Server(uvicorn.Config(create_app([ServedModel(dave_vit.load_model())]), port=0))
threading.Thread(target=server.run, daemon=True).start()
while not server.started:
    time.sleep(0.1)
address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/api/info"
assert b"builtin" in urllib.request.urlopen(address).read()
""",
    "video": """
import av
from PIL import Image
from dave_vit.data.images import read_clip
with av.open("clip.mp4", "w") as container:
    stream = container.add_stream("mpeg4", rate=10)
    stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
    for _ in range(8):
        container.mux(stream.encode(av.VideoFrame.from_image(Image.new("RGB", (32, 32), "red"))))
    container.mux(stream.encode())
assert len(read_clip("clip.mp4", 4).frames) == 4
""",
    "volume": """
import nibabel, numpy
from dave_vit.models.recordings import read_volume
nibabel.save(nibabel.Nifti1Image(numpy.zeros((4, 5, 6), numpy.float32), numpy.eye(4)), "scan.nii.gz")
read_volume("scan.nii.gz")
""",
    "notebook": """
import dave_vit
shown = dave_vit.explain("photo.jpg", method="input_x_gradient")._repr_mimebundle_()
assert "application/vnd.jupyter.widget-view+json" in shown
""",
}


@pytest.fixture
def folder(extra: str, tmp_path: Path) -> Iterator[Path]:
    """A folder that holds a photograph, and the wheel with an extra in an environment of its own."""
    install(tmp_path, find_uv(), extra)
    shutil.copy(ROOT / "docs" / "photos" / "chelsea.jpg", tmp_path / "photo.jpg")
    yield tmp_path
    shutil.rmtree(tmp_path / ".venv")


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_alone_does_what_it_promises(extra, folder):
    run_checked(folder, ".venv/bin/python", "-c", USES[extra])


def least_seconds(folder: Path, *words: str) -> float:
    """The least processor time of five runs, after one that compiles what it imports."""
    times = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_checked(folder, *words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(times[1:])


@pytest.mark.parametrize("extra", [""], ids=["core"])
def test_it_starts_at_once(extra, folder):
    programs = {"core": "import dave_vit", "torch": "import torch", "method": "import dave_vit; dave_vit.DAVE"}
    times = {name: least_seconds(folder, ".venv/bin/python", "-c", code) for name, code in programs.items()}
    times["help"] = least_seconds(folder, ".venv/bin/dave", "--help")
    print({name: f"{seconds:.2f} s" for name, seconds in times.items()})
    assert times["core"] < 1.5
    assert times["method"] - times["torch"] < 1.5
    assert times["help"] < 0.2
