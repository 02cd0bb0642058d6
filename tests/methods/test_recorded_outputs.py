"""Maps are what they were when they were recorded: a refactoring changes none of them."""

from __future__ import annotations

import numpy as np
import pytest

import recorded_outputs

RECORDED = np.load(recorded_outputs.FILE)
CASES = dict(recorded_outputs.cases())


def test_every_case_is_recorded():
    assert set(RECORDED) == set(CASES)


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_the_output_is_the_recorded_one(name):
    output = recorded_outputs.summarize(CASES[name]()).numpy()
    scale = np.abs(RECORDED[name]).max()
    np.testing.assert_allclose(output, RECORDED[name], rtol=0, atol=2e-4 * scale)
