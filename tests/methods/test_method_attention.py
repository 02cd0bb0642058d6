"""Methods on tokens against slow references on small models, hand-made graphs, and what they refuse."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny_models
from dave_vit import create_method
from dave_vit.engine.observation import find_token_layout
from dave_vit.errors import InputError, OptionError, UnsupportedOperator
from dave_vit.methods.attention import flow, rollout

X = tiny_models.images()
TARGET = [0, 1, 2]
ON_TOKENS = ["raw_attention", "rollout", "attention_flow", "chefer_generic", "chefer_lrp", "legrad", "gradcam"]


@pytest.fixture(scope="module")
def vit():
    return tiny_models.vit()


@pytest.fixture(scope="module")
def averaging():
    """Without a class token: the mean of all tokens is classified."""
    return tiny_models.vit(global_pool="avg", class_token=False)


def grids(name: str, model: nn.Module, target=TARGET, **options) -> Tensor:
    return create_method(name, model, resolution="patch", **options).attribute(X, target)[:, 0]


def attend(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A timm block in plain torch: normed tokens, attention matrix, tokens after it."""
    normed = block.norm1(x)
    batch, tokens, _ = x.shape
    q, k, v = block.attn.qkv(normed).reshape(batch, tokens, 3, block.attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    matrix = (q @ k.mT * block.attn.scale).softmax(-1)
    x = x + block.attn.proj((matrix @ v).transpose(1, 2).flatten(2))
    return normed, matrix, x + block.mlp(block.norm2(x))


def run(model: nn.Module) -> dict[str, list[Tensor]]:
    """All that the references need, with the graph."""
    x, seen = model._pos_embed(model.patch_embed(X)), {"normed": [], "matrix": [], "state": []}
    for block in model.blocks:
        *parts, x = attend(block, x)
        for name, value in zip(seen, [*parts, x], strict=True):
            seen[name].append(value)
    return seen | {"logits": model.forward_head(model.norm(x))}


def score(logits: Tensor) -> Tensor:
    return logits[range(len(X)), TARGET].sum()


def on_grid(values: Tensor) -> Tensor:
    return values[:, -16:].unflatten(1, (4, 4))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5 * expected.detach().abs().max().item())


class TestAgainstPlainTorch:
    def test_raw_attention(self, vit, averaging):
        close(grids("raw_attention", vit), on_grid(run(vit)["matrix"][-1].mean(1)[:, 0]))
        close(grids("raw_attention", vit, layer=0, heads="max"), on_grid(run(vit)["matrix"][0].amax(1)[:, 0]))
        close(grids("raw_attention", averaging), on_grid(run(averaging)["matrix"][-1].mean((1, 2))))

    @pytest.mark.parametrize("heads", ["mean", "max", "min"])
    @pytest.mark.parametrize("start", [0, 1])
    def test_rollout(self, vit, heads, start):
        fuse = {"mean": Tensor.mean, "max": Tensor.amax, "min": Tensor.amin}[heads]
        product = torch.eye(17)
        for matrix in run(vit)["matrix"][start:]:
            mixed = fuse(matrix, 1) + torch.eye(17)
            product = mixed / mixed.sum(-1, keepdim=True) @ product
        close(grids("rollout", vit, heads=heads, start_layer=start), on_grid(product[:, 0]))

    def test_chefer_generic(self, vit, averaging):
        for model, count, row in ((vit, 17, lambda r: r[:, 0]), (averaging, 16, lambda r: r.mean(1))):
            seen, relevance = run(model), torch.eye(count).double()
            grads = torch.autograd.grad(score(seen["logits"]), seen["matrix"])
            for matrix, grad in zip(seen["matrix"], grads, strict=True):
                relevance = relevance + (grad * matrix).clamp(min=0).mean(1).double() @ relevance
            close(grids("chefer_generic", model), on_grid(row(relevance - torch.eye(count))).float())

    @pytest.mark.parametrize("readout", ["model", "cls", "mean"])
    def test_legrad(self, vit, readout):
        seen, maps = run(vit), []
        for matrix, state in zip(seen["matrix"], seen["state"], strict=True):
            token = state.mean(1) if readout == "mean" else state[:, 0]
            (grad,) = torch.autograd.grad(score(vit.head(vit.norm(token))), matrix, retain_graph=True)
            maps.append(on_grid(grad.clamp(min=0).mean((1, 2))))
        close(grids("legrad", vit, readout=readout), torch.stack(maps).mean(0))
        close(grids("legrad", vit, readout=readout, layers=[-2]), maps[0])

    def test_legrad_leaves_the_read_out_to_the_model(self, averaging):
        seen, maps = run(averaging), []
        for matrix, state in zip(seen["matrix"], seen["state"], strict=True):
            logits = averaging.forward_head(averaging.norm(state))
            (grad,) = torch.autograd.grad(score(logits), matrix, retain_graph=True)
            maps.append(on_grid(grad.clamp(min=0).mean((1, 2))))
        close(grids("legrad", averaging), torch.stack(maps).mean(0))


class TestGradCAM:
    def package(self, model, layer, shape=None):
        package = pytest.importorskip("pytorch_grad_cam")
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

        with package.GradCAM(model, [layer], shape) as cam:
            return torch.from_numpy(cam(X, [ClassifierOutputTarget(index) for index in TARGET]))

    def test_equals_the_package_on_a_vit(self, vit):
        expected = self.package(vit, vit.blocks[-1].norm1, lambda tokens: on_grid(tokens).movedim(-1, 1))
        found = create_method("gradcam", vit).attribute(X, TARGET).sum(1)
        low, high = (getattr(found.flatten(1), side)(1)[:, None, None] for side in ("amin", "amax"))
        torch.testing.assert_close((found - low) / (high - low), expected, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("family", ["cnn", "swin"])
    def test_equals_the_formula_on_pooled_features(self, family):
        model = tiny_models.FAMILIES[family]()
        features = {}
        layer = model[5] if family == "cnn" else model.layers[-1].blocks[-1].norm1
        handle = layer.register_forward_hook(lambda module, args, output: features.update(value=output))
        logits = model(X)
        handle.remove()
        value = features["value"]
        (grad,) = torch.autograd.grad(score(logits), value)
        positions = (2, 3) if family == "cnn" else (1, 2)
        weighted = (grad.mean(positions, keepdim=True) * value).sum(1 if family == "cnn" else -1)
        close(grids("gradcam", model, positive=False), weighted)
        close(grids("gradcam", model), weighted.clamp(min=0))

    def test_mixers_are_averaged_tokens(self):
        import timm

        model = tiny_models.drawn(timm.models.MlpMixer(5, img_size=32, patch_size=8, num_blocks=2, embed_dim=16))
        assert grids("gradcam", model).shape == (3, 4, 4)


class TestHandMadeGraphs:
    def test_rollout(self):
        first = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
        second = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
        # (A + I) / 2: [[.5, .5], [.5, .5]] and [[1, 0], [.25, .75]]
        read = torch.tensor([[[0.0, 1.0]]])
        torch.testing.assert_close(rollout([first, second], read), torch.tensor([[0.5, 0.5]]))
        torch.testing.assert_close(rollout([second, first], read), torch.tensor([[0.625, 0.375]]))

    def test_flow_is_held_up_by_the_narrowest_edges(self):
        # Two layers of three tokens; entry (i, j) is the capacity from j to i. The read-out is token 0.
        first = torch.tensor([[0.5, 0.2, 0.0], [0.1, 0.9, 0.0], [0.0, 0.3, 1.0]])
        second = torch.tensor([[0.6, 0.3, 0.05], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
        found = flow(torch.stack([first, second]), torch.tensor([1.0, 0.0, 0.0]))
        # 0: 0.5 direct + 0.1 by token 1. 1: 0.2 + min(0.9, 0.3) + min(0.3, 0.05). 2: 0.05 by itself.
        torch.testing.assert_close(found, torch.tensor([0.6, 0.55, 0.05]), atol=1e-5, rtol=0)

    @pytest.mark.parametrize(("depth", "stay"), [(3, 0.0), (9, 0.0), (9, 0.5), (9, 2.0)])
    def test_flow_equals_networkx(self, depth, stay):
        # Deep networks whose tokens hardly stay in place need the edges that are first left out.
        networkx = pytest.importorskip("networkx")
        matrices = torch.rand(depth, 4, 4, generator=torch.Generator().manual_seed(0))
        matrices = matrices.square() * (1 - torch.eye(4)) + stay * torch.eye(4)
        read = torch.full((4,), 0.25)
        graph = networkx.DiGraph()
        for layer, to, start in np.ndindex(depth, 4, 4):
            graph.add_edge((layer, start), (layer + 1, to), capacity=float(matrices[layer, to, start]))
        for token in range(4):
            graph.add_edge((depth, token), "out", capacity=0.25)
        expected = [networkx.maximum_flow_value(graph, (0, token), "out") for token in range(4)]
        torch.testing.assert_close(flow(matrices, read), torch.tensor(expected), atol=1e-5, rtol=0)

    def test_discarding_drops_the_smallest_entries(self, vit):
        method = create_method("rollout", vit, discard=0.5, resolution="patch")
        matrices = []
        for matrix in run(vit)["matrix"]:
            fused = matrix.mean(1).detach()
            cut = fused.flatten(1).sort(1).values[:, int(0.5 * 17 * 17)]
            matrices.append(fused * (fused >= cut[:, None, None]))
        read = F.one_hot(torch.tensor(0), 17).float().expand(3, 1, 17)
        close(method.attribute(X, 0)[:, 0], on_grid(rollout(matrices, read)))


class TestModels:
    @pytest.mark.parametrize("name", ON_TOKENS)
    def test_fused_equals_written_out(self, name, vit):
        eager = tiny_models.vit()
        for block in eager.blocks:
            block.attn.fused_attn = False
        assert vit.blocks[0].attn.fused_attn
        close(grids(name, vit), grids(name, eager))

    @pytest.mark.parametrize("name", ON_TOKENS)
    @pytest.mark.parametrize(
        "options",
        [
            {"reg_tokens": 2},
            {"global_pool": "avg"},
            {"global_pool": "map", "class_token": False},
            {"init_values": 0.5, "qk_norm": True},
        ],
        ids=["registers", "averaging", "attention pooling", "layer scale"],
    )
    def test_variants_of_the_vit(self, name, options):
        model = tiny_models.vit(**options)
        found = grids(name, model)
        assert found.shape == (3, *find_token_layout(model, X).grid)
        assert found.isfinite().all()
        assert found.abs().sum() > 0

    def test_the_read_out_is_found(self):
        """A class token is read by its row; two of them, by the mean of their rows."""
        import timm

        shape = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
        model = tiny_models.drawn(timm.models.deit.VisionTransformerDistilled(**shape))
        close(grids("raw_attention", model), on_grid(run_distilled(model)[:, :2].mean(1)))

    @pytest.mark.parametrize("name", [name for name in ON_TOKENS if name not in ("gradcam", "legrad")])
    def test_refusals_say_why(self, name):
        for family, why in (("swin", "windows or stages .matrices of 16x16"), ("cnn", "no softmax attention")):
            with pytest.raises(UnsupportedOperator, match=why):
                grids(name, tiny_models.FAMILIES[family]())

    def test_class_attention_beside_self_attention_is_refused(self):
        import timm

        shape = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
        model = tiny_models.drawn(timm.models.Cait(**shape))
        with pytest.raises(UnsupportedOperator, match="1x17, 16x16"):
            grids("rollout", model)

    def test_attention_among_channels_is_refused(self):
        class Channels(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.qk, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

            def forward(self, x: Tensor) -> Tensor:
                tokens = F.avg_pool2d(x, 8).flatten(2).mT.repeat(1, 1, 3)[..., :8]  # [b, 16, 8]
                mixed = (self.qk(tokens).mT @ tokens).softmax(-1)  # [b, 8, 8]
                return self.head((tokens @ mixed).mean(1))

        with pytest.raises(UnsupportedOperator, match="channels instead of tokens"):
            grids("rollout", Channels())

    def test_legrad_refuses_what_has_no_list_of_blocks(self):
        class Loose(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = tiny_models.vit(depth=1)

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x)

        with pytest.raises(UnsupportedOperator, match="not a list of modules"):
            grids("legrad", Loose())
        with pytest.raises(UnsupportedOperator, match="not a list of modules"):
            grids("legrad", tiny_models.swin())


def run_distilled(model: nn.Module) -> Tensor:
    x = model._pos_embed(model.patch_embed(X))
    for block in model.blocks:
        _, matrix, x = attend(block, x)
    return matrix.mean(1)


class TestOptions:
    @pytest.mark.parametrize("name", ON_TOKENS)
    def test_the_channel_sum_is_the_upsampled_grid(self, name, vit):
        found = create_method(name, vit).attribute(X, TARGET)
        expected = F.interpolate(grids(name, vit)[:, None], X.shape[-2:], mode="bilinear")[:, 0]
        close(found.sum(1), expected)
        assert torch.equal(found[:, 0], found[:, 2])
        several = create_method(name, vit, resolution="patch").attribute(X, [[0, 1]] * 3)
        assert several.shape == (3, 2, 1, 4, 4)

    @pytest.mark.parametrize(
        ("name", "options", "said"),
        [
            ("rollout", {"heads": "median"}, "mean, max, min"),
            ("rollout", {"discard": 1.0}, "discard"),
            ("rollout", {"start_layer": 2}, "layers 0 to 1"),
            ("raw_attention", {"layer": 5}, "layers 0 to 1"),
            ("chefer_lrp", {"alpha": 0.5}, "alpha"),
            ("legrad", {"readout": "max"}, "model, cls, mean"),
            ("legrad", {"layers": [7]}, "layers 0 to 1"),
            ("gradcam", {"resolution": "pixel"}, "input, patch"),
        ],
    )
    def test_bad_options_are_one_clear_line(self, vit, name, options, said):
        with pytest.raises(OptionError, match=said):
            create_method(name, vit, **options).attribute(X[:1], 0)

    def test_flow_refuses_many_tokens(self, vit):
        with pytest.raises(InputError, match="max_tokens=17"):
            create_method("attention_flow", vit, max_tokens=16).attribute(X, 0)

    @pytest.mark.parametrize(
        ("name", "passes"), [*((name, 1) for name in ON_TOKENS if name != "chefer_lrp"), ("chefer_lrp", 2)]
    )
    def test_the_stated_cost_is_the_cost(self, name, passes, vit):
        rows = []

        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = vit

            def forward(self, x: Tensor) -> Tensor:
                rows.append(len(x))
                return self.model(x)

        method = create_method(name, Counting())
        method.attribute(X)
        assert sum(rows) == passes * len(X)
        assert method.info.passes.startswith(f"{passes} forward")


def test_hooks_of_legrad_act_in_their_own_thread_only(vit):
    method, expected, found = create_method("legrad", vit), vit(X), []
    stop = threading.Event()

    def classify() -> None:
        while not stop.is_set():
            with torch.no_grad():
                found.append(torch.equal(vit(X), expected))

    other = threading.Thread(target=classify)
    other.start()
    for _ in range(5):
        method.attribute(X, 0)
    stop.set()
    other.join()
    assert all(found)
    assert not any(module._forward_hooks for module in vit.modules())
