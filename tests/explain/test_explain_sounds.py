"""Explain sounds: files of WAV, spectrograms as pictures, and axes in time and frequency."""

from __future__ import annotations

import json
import wave

import numpy as np
import pytest
import torch

import tiny_models
from dave_vit import cli, load_model
from dave_vit.errors import ImageError
from dave_vit.models.recordings import read_sound

RATE = 16_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import ASTConfig, ASTFeatureExtractor, ASTForAudioClassification

    made = tmp_path_factory.mktemp("ast")
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = ASTConfig(**sizes, max_length=100, num_mel_bins=64, num_labels=3)
    tiny_models.drawn(ASTForAudioClassification(config)).save_pretrained(made)
    ASTFeatureExtractor(max_length=100, num_mel_bins=64).save_pretrained(made)
    return made


def write_sound(path, samples: np.ndarray, rate: int = RATE, channels: int = 1, width: int = 2):
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return path


def tone(hertz: float) -> np.ndarray:
    return (8000 * np.sin(2 * np.pi * hertz * np.arange(RATE) / RATE)).astype(np.int16)


@pytest.mark.parametrize("hertz", [300, 1000, 4000])
def test_the_frequencies_of_rows_are_those_of_the_sound(hertz, folder, tmp_path):
    model = load_model(f"hf:{folder}")
    sound = model.preprocess(write_sound(tmp_path / "tone.wav", tone(hertz)))
    loudest = int(sound[0, 0].mean(-1).argmax())
    assert float(model.frequencies().flip(0)[loudest]) == pytest.approx(hertz, rel=0.1)


def test_the_model_takes_the_spectrogram_as_its_extractor_makes_it(folder, tmp_path):
    model, path = load_model(f"hf:{folder}"), write_sound(tmp_path / "tone.wav", tone(440))
    values = model.extractor(read_sound(path, RATE), sampling_rate=RATE, return_tensors="pt")["input_values"]
    torch.testing.assert_close(model(model.preprocess(path)), model.model(values).logits)


def test_files_of_a_sound(folder, tmp_path, capsys):
    path = write_sound(tmp_path / "tone.wav", tone(440))
    line = ["explain", str(path), "--model", f"hf:{folder}", "--method", "effective", "--out", str(tmp_path / "out")]
    assert cli.run([*line, "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (tmp_path / "out" / "tone.effective.dave.spectrogram.png").is_file()
    assert len(record["hertz_of_rows"]) == 64
    assert record["hertz_of_rows"][0] > record["hertz_of_rows"][-1]
    assert np.load(tmp_path / "out" / "tone.effective.dave.npz")["map"].shape == (64, 100)


def test_the_doctor_takes_a_picture_for_a_spectrogram(folder, capsys):
    assert cli.run(["doctor", "--model", f"hf:{folder}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gap"] < 1e-9


def test_channels_and_widths(tmp_path):
    stereo = np.stack([tone(440), np.zeros(RATE, np.int16)], 1)
    both = read_sound(write_sound(tmp_path / "stereo.wav", stereo, channels=2), RATE)
    assert both.max() == pytest.approx(4000 / 2**15, rel=1e-3)
    bytes_of = (tone(440) // 256 + 128).astype(np.uint8)
    narrow = read_sound(write_sound(tmp_path / "narrow.wav", bytes_of, width=1), RATE)
    assert abs(float(narrow.mean())) < 0.01


def test_what_cannot_be_heard_is_one_line(tmp_path):
    (tmp_path / "text.wav").write_text("no sound")
    for path in (tmp_path / "text.wav", tmp_path / "absent.wav"):
        with pytest.raises(ImageError, match="not a WAV file"):
            read_sound(path, RATE)
    with pytest.raises(ImageError, match="44100 samples of 16 bits a second; expected 16000"):
        read_sound(write_sound(tmp_path / "cd.wav", tone(440), rate=44_100), RATE)
