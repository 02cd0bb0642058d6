"""GridPG, EnergyPG and the pointing game against slow oracles and cases done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dave_vit.errors import InputError
from dave_vit.metrics import energypg, gridpg, pointing


def slow_energy(heat: np.ndarray, region: np.ndarray) -> float:
    inside = total = 0.0
    for y in range(heat.shape[0]):
        for x in range(heat.shape[1]):
            if heat[y, x] > 0:
                total += float(heat[y, x])
                inside += float(heat[y, x]) if region[y, x] else 0.0
    return inside / total


def slow_grid(heats: np.ndarray, cells: int) -> list[float]:
    values = []
    for k, heat in enumerate(heats):
        row, column = divmod(k, cells)
        height, width = heat.shape[0] // cells, heat.shape[1] // cells
        region = np.zeros(heat.shape, bool)
        region[row * height : (row + 1) * height, column * width : (column + 1) * width] = True
        values.append(slow_energy(heat, region))
    return values


@pytest.mark.parametrize("cells", [2, 3])
def test_gridpg_equals_the_slow_oracle(cells):
    maps = torch.randn(3, cells * cells, 12, 18, generator=torch.Generator().manual_seed(1))
    expected = [slow_grid(heats, cells) for heats in maps.numpy()]
    torch.testing.assert_close(gridpg(maps, cells), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def test_gridpg_by_hand():
    maps = torch.zeros(1, 4, 4, 4)
    maps[0, 0, 0, 0] = 3.0  # cell 0 is top left
    maps[0, 0, 3, 3] = 1.0
    maps[0, 1, 0, 3] = 2.0  # cell 1 is top right
    maps[0, 1, 0, 0] = -9.0  # negative mass does not count
    maps[0, 2, 0, 3] = 5.0  # all of it in a wrong cell
    values = gridpg(maps)[0].tolist()
    assert values[:3] == [0.75, 1.0, 0.0]
    assert math.isnan(values[3])  # nothing positive


def test_a_uniform_map_scores_the_share_of_the_area():
    assert gridpg(torch.ones(1, 9, 224, 224), 3)[0, 4].item() == pytest.approx(74 * 74 / 224**2)
    assert gridpg(torch.ones(1, 4, 8, 8)).tolist() == [[0.25] * 4]


def test_energypg_equals_the_slow_oracle():
    draw = torch.Generator().manual_seed(2)
    maps = torch.randn(5, 9, 7, generator=draw)
    regions = torch.rand(5, 9, 7, generator=draw) > 0.7
    expected = [slow_energy(heat, region) for heat, region in zip(maps.numpy(), regions.numpy(), strict=True)]
    torch.testing.assert_close(energypg(maps, regions), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def test_energypg_by_hand_with_a_region_of_one_pixel():
    heat = torch.tensor([[[1.0, 2.0], [-4.0, 5.0]]])
    region = torch.tensor([[[False, True], [False, False]]])
    assert energypg(heat, region).item() == 0.25


@pytest.mark.parametrize("metric", [energypg, pointing])
def test_what_cannot_be_scored_is_nan_and_leaves_the_others_alone(metric):
    region = torch.zeros(6, 2, 2, dtype=torch.bool)
    region[:, 0, 0] = True
    region[5] = False  # the box fell out of the crop
    maps = torch.ones(6, 2, 2)
    maps[0] = 0
    maps[1] = -1
    maps[2, 0, 0] = torch.nan
    maps[3, 0, 0] = torch.inf
    maps[4, 0, 0] = 4.0
    values = metric(maps, region)
    assert values.isnan().tolist() == [True, True, True, True, False, True]
    assert values[4].item() == pytest.approx(4 / 7 if metric is energypg else 1.0)


def test_pointing_takes_the_highest_pixel_and_shares_a_tie():
    heat = torch.tensor([[[1.0, 2.0], [2.0, 0.0]], [[0.0, 3.0], [1.0, 1.0]], [[0.0, 1.0], [3.0, 1.0]]])
    region = torch.tensor([[False, True], [False, True]]).expand(3, 2, 2)
    assert pointing(heat, region).tolist() == [0.5, 1.0, 0.0]


def test_mass_is_summed_in_double_precision():
    heat = torch.full((1, 512, 512), 1e-3)
    heat[0, 0, 0] = 1e6
    region = torch.zeros(1, 512, 512, dtype=torch.bool)
    region[0, 0, 0] = True
    small = float(torch.tensor(1e-3)) * (512 * 512 - 1)
    assert energypg(heat, region).item() == pytest.approx(1e6 / (1e6 + small), abs=1e-12)


@pytest.mark.parametrize(
    "call",
    [
        lambda: gridpg(torch.ones(1, 3, 4, 4)),
        lambda: gridpg(torch.ones(4, 4, 4)),
        lambda: energypg(torch.ones(1, 4, 4), torch.ones(1, 4, 4)),
        lambda: energypg(torch.ones(1, 4, 4), torch.ones(1, 4, 5, dtype=torch.bool)),
    ],
)
def test_wrong_shapes_are_refused(call):
    with pytest.raises(InputError, match="expected"):
        call()


@pytest.mark.realdata
def test_real_maps_score_as_in_the_slow_oracle(oracle_dir):
    with np.load(oracle_dir / "full_p0_t991.npz") as arrays, np.load(oracle_dir / "inputs.npz") as inputs:
        heat = (arrays["dave_W"] * inputs["x/p0"]).sum(0)
    region = np.zeros(heat.shape, bool)
    region[40:190, 60:175] = True
    maps = torch.from_numpy(heat)[None]
    value = energypg(maps, torch.from_numpy(region)[None]).item()
    assert value == pytest.approx(slow_energy(heat.astype(np.float64), region), abs=1e-6)
    cells = gridpg(maps[:, None].expand(1, 4, 224, 224))[0].tolist()
    assert cells == pytest.approx(slow_grid(np.stack([heat] * 4).astype(np.float64), 2), abs=1e-6)
    assert sum(cells) == pytest.approx(1)
