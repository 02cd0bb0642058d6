"""Maps during training: the plain function, the callbacks of transformers and Lightning, and where maps are logged."""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dave_vit import create_method
from dave_vit.errors import MissingExtra, OptionError
from dave_vit.integrations.training import log_maps
from tiny_models import SIZE, huggingface_vit, images, vit

X = images(2)
BOXES = [(0, 0, 16, 32), (8, 8, 24, 24)]
OPTIONS = {"target": [1, 2], "regions": BOXES, "method": "input_x_gradient"}


def mass(model: torch.nn.Module) -> float:
    """The share of positive values in the boxes, computed by hand."""
    maps = create_method("input_x_gradient", model).attribute(X, [1, 2]).sum(1).clamp(min=0).double()
    left = float(maps[0, :, :16].sum() / maps[0].sum())
    middle = float(maps[1, 8:24, 8:24].sum() / maps[1].sum())
    return (left + middle) / 2


def steps(folder) -> list[int]:
    return [row["step"] for row in json.loads((folder / "scalars.json").read_text())]


def test_maps_and_numbers_of_each_step_are_written(tmp_path):
    model = vit(drop_rate=0.5).train()
    assert log_maps(model, 3, X, every=2, folder=tmp_path, **OPTIONS) == {}
    assert not any(tmp_path.iterdir())
    numbers = log_maps(model, 4, X, every=2, folder=tmp_path, **OPTIONS)
    assert all(module.training for module in model.modules())
    assert numbers["mass_on_object"] == pytest.approx(mass(model.eval()), abs=1e-5)
    log_maps(model, 0, X, folder=tmp_path, **OPTIONS)
    log_maps(model, 4, X, folder=tmp_path, **OPTIONS)
    assert steps(tmp_path) == [0, 4]
    page = (tmp_path / "index.html").read_text()
    names = [f"{step:08d}-{image}.png" for step in (0, 4) for image in (0, 1)]
    assert all(f'src="{name}"' in page and (tmp_path / name).is_file() for name in names)
    masks = torch.zeros(2, SIZE, SIZE)
    masks[0, :, :16] = masks[1, 8:24, 8:24] = 1
    assert log_maps(model, 0, X, **{**OPTIONS, "regions": masks}) == numbers
    assert "noise_share" in log_maps(model, 0, X, samples=3)
    with pytest.raises(OptionError, match="1 boxes for 2 images"):
        log_maps(model, 0, X, **{**OPTIONS, "regions": BOXES[:1]})
    with pytest.raises(OptionError, match="every is 0"):
        log_maps(model, 0, X, every=0)


def test_a_model_that_points_back_to_its_owner_is_explained():
    owner, model = torch.nn.Module(), vit()
    model.trainer = SimpleNamespace(module=weakref.proxy(owner))  # as a module of Lightning does
    assert log_maps(model, 0, X, **OPTIONS) == log_maps(vit(), 0, X, **OPTIONS)


class Recorder:
    """Remembers the calls of any of its methods."""

    def __init__(self, *names: str) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []
        for name in names:
            setattr(self, name, lambda *args, name=name, **options: self.calls.append((name, args, options)))


def test_writers_of_three_kinds(monkeypatch):
    board, flow, run = Recorder("add_image", "add_scalar"), Recorder("log_image", "log_metrics"), Recorder("log")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Image=lambda picture: picture))
    numbers = log_maps(vit(), 7, X, writers=[board, flow, run], **OPTIONS)
    (scalar, first, _) = board.calls
    assert scalar[:2] == ("add_scalar", ("dave/mass_on_object", numbers["mass_on_object"], 7))
    assert first[1][0] == "dave/0"
    assert first[1][1].shape == (SIZE, SIZE, 3)
    assert [name for name, *_ in flow.calls] == ["log_metrics", "log_image", "log_image"]
    assert flow.calls[1][2] == {"key": "dave-0", "step": 7}
    ((_, (logged,), options),) = run.calls
    assert options == {"step": 7}
    assert len(logged["dave/maps"]) == 2
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match="pip install wandb"):
        log_maps(vit(), 7, X, writers=[run], **OPTIONS)
    with pytest.raises(OptionError, match="a writer is of type str"):
        log_maps(vit(), 7, X, writers=["tensorboard"], **OPTIONS)


def test_tensorboard_takes_the_maps(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        numbers = log_maps(vit(), 7, X, writers=[writer], **OPTIONS)
    events = EventAccumulator(str(tmp_path)).Reload()
    (scalar,) = events.Scalars("dave/mass_on_object")
    assert (scalar.step, scalar.value) == (7, pytest.approx(numbers["mass_on_object"]))
    assert events.Images("dave/1")[0].width == SIZE


@pytest.mark.slow
def test_weights_and_biases_takes_the_maps(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(project="dave", mode="offline", dir=tmp_path) as run:
        log_maps(vit(), 7, X, writers=[run], **OPTIONS)
        pictures = list(Path(run.dir).glob("media/images/dave/maps_*.png"))
    assert len(pictures) == len(X)


@pytest.mark.slow
def test_mlflow_takes_the_maps(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.create_experiment("dave", artifact_location=(tmp_path / "files").as_uri())
    mlflow.set_experiment("dave")
    with mlflow.start_run() as run:
        numbers = log_maps(vit(), 7, X, writers=[mlflow], **OPTIONS)
    logged = mlflow.get_run(run.info.run_id).data.metrics
    assert logged["dave/mass_on_object"] == pytest.approx(numbers["mass_on_object"])
    assert len(list((tmp_path / "files").rglob("images/dave-?+step+7+*.png"))) == len(X)


@pytest.mark.slow
def test_the_trainer_of_transformers_explains_and_trains_as_before(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from dave_vit.integrations.transformers import TransformersExplanationCallback

    data = [{"pixel_values": image, "labels": number % 5} for number, image in enumerate(images(8))]

    def train(*callbacks):
        model = huggingface_vit()
        arguments = TrainingArguments(
            str(tmp_path / "out"),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=0.1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        )
        Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks)).train()
        return model.eval()

    plain = train()
    watched = train(TransformersExplanationCallback(X, every=2, folder=tmp_path / "maps", **OPTIONS))
    assert steps(tmp_path / "maps") == [0, 2, 4]
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    rows = json.loads((tmp_path / "maps" / "scalars.json").read_text())
    assert rows[-1]["mass_on_object"] == pytest.approx(mass(watched), abs=1e-5)
    assert rows[0]["mass_on_object"] == pytest.approx(mass(huggingface_vit()), abs=1e-5)


@pytest.mark.slow
def test_lightning_explains_and_logs_to_its_loggers(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from dave_vit.integrations.lightning import LightningExplanationCallback

    board = Recorder("add_image", "add_scalar")

    class Board(lightning.loggers.logger.DummyLogger):
        experiment = board

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = vit(drop_rate=0.3)

        def forward(self, inputs):
            return self.model(inputs)

        def training_step(self, batch, index):
            return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    callback = LightningExplanationCallback(X, every=2, folder=tmp_path, **OPTIONS)
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=4, accelerator="cpu", logger=Board(), callbacks=[callback], **quiet)
    trainer.fit(Module(), DataLoader(TensorDataset(images(8), torch.arange(8) % 5), batch_size=2))
    assert steps(tmp_path) == [0, 2, 4]
    assert [args[2] for name, args, _ in board.calls if name == "add_scalar"] == [0, 2, 4]
    assert np.asarray(board.calls[1][1][1]).shape == (SIZE, SIZE, 3)
