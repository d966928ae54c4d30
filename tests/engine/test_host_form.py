"""Form: whoever swaps a part, hooks one or changes a weight gets the answers of the model as it then is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from test_host_step import answers, engine_of, model_of
from torch import Tensor, nn

from openk3.engine.host_form import Form, is_plain
from openk3.engine.host_step import HostStep
from openk3.model.k3 import K3
from openk3.model.moe import Router

PARTS = (
    *("layers.0.ffn", "layers.1", "layers.1.mixer", "layers.3.mixer", "layers.1.ffn", "layers.1.ffn.experts"),
    *("layers.1.ffn.shared", "layers.1.mix_norm", "layers.1.ffn_norm", "layers.1.ffn.latent_norm"),
    *("layers.1.mixer.o_proj", "layers.1.mixer.f_b_proj", "layers.3.mixer.q_b_proj", "layers.1.ffn.down_proj"),
)


def half(value: Any) -> Any:
    """What a changed part gives in place of its own output."""
    return value / 2 if isinstance(value, Tensor) else value


def other_class(part: nn.Module) -> None:
    """A class of somebody else that computes something else."""
    kind: Any = type(part)
    if hasattr(part, "mix_query"):  # a layer writes, and returns nothing

        class Residual(kind):
            def forward(self, depth: Any, sequences: Any, cache: Any = None, trace: Any = None) -> None:
                depth.write(self.mixer(self.mix_norm(depth.prefix_TD), sequences, cache))
                depth.write(self.ffn(self.ffn_norm(depth.prefix_TD)))

        part.__class__ = Residual
        return

    class Half(kind):
        def forward(self, *args: Any, **options: Any) -> Any:
            return half(super().forward(*args, **options))

    part.__class__ = Half


def hook(part: nn.Module) -> None:
    """A forward hook that changes the output."""
    part.register_forward_hook(lambda module, inputs, output: half(output))


def own_forward(part: nn.Module) -> None:
    """Another `forward` on this instance alone."""
    forward = part.forward
    part.forward = lambda *args, **options: half(forward(*args, **options))


@pytest.mark.parametrize("change", [other_class, hook, own_forward])
@pytest.mark.parametrize("name", PARTS)
def test_a_changed_part_is_used(name: str, change: Callable[[nn.Module], None]) -> None:
    """Before the engine is there, and then another one between two passes of the same engine."""
    model = model_of()
    change(model.get_submodule(name))
    one = engine_of(model)
    answers(one, [1, 7], 2)
    change(model.get_submodule("layers.2.mixer.o_proj"))
    answers(one, [1, 7], 2)


def scaled(name: str) -> Callable[[K3], object]:
    """A weight changed in place."""
    return lambda model: model.get_parameter(name).mul_(1.5)


def replaced(model: K3) -> None:
    """Another weight in the place of one."""
    part = cast(nn.Linear, model.get_submodule("layers.1.mixer.q_proj"))
    part.weight = nn.Parameter(part.weight * 2, requires_grad=False)


def through_data(model: K3) -> None:
    """The same Parameter with another memory."""
    weight = model.get_parameter("layers.1.mixer.q_conv1d.weight")
    weight.data = weight.data * 2


def other_bias(model: K3) -> None:
    """What maps of single parts have besides weights."""
    old = cast(nn.Linear, model.get_submodule("layers.1.mixer.o_proj"))
    new = nn.Linear(old.in_features, old.out_features, dtype=torch.float64)
    cast(Any, model.layers[1]).mixer.o_proj = new.requires_grad_(False)


def other_scale(model: K3) -> None:
    """A number on a module."""
    cast(Any, model.layers[3]).mixer.scale *= 0.5


def other_router(model: K3) -> None:
    """Weights of experts by another rule."""

    class Tenth(Router):
        def forward(self, x_TD: Tensor) -> Any:
            scores_TE, routes = super().forward(x_TD)
            return scores_TE, routes._replace(weights_Tk=routes.weights_Tk / 10)

    cast(Any, model.layers[1]).ffn.router.__class__ = Tenth


CHANGES: dict[str, Callable[[K3], object]] = {
    "convolution": scaled("layers.1.mixer.q_conv1d.weight"),
    "depth": scaled("layers.2.ffn_query.proj"),
    "output": scaled("output_query.norm"),
    "decay": scaled("layers.1.mixer.A_log"),
    "latents": scaled("layers.3.mixer.kv_b_proj.weight"),
    "replaced": replaced,
    "data": through_data,
    "bias": other_bias,
    "scale": other_scale,
    "router": other_router,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_passes_is_seen(name: str) -> None:
    """No part of an answer comes from what was there before."""
    model = model_of()
    one = engine_of(model)
    before = answers(one, [1, 7], 2)
    CHANGES[name](model)
    assert answers(one, [1, 7], 2) != before


def test_a_hook_comes_and_goes() -> None:
    """The step is back once the hook is gone, and a hook of all modules is one too."""
    model = model_of()
    assert is_plain(model) and HostStep.applies(model)
    form = Form(model)
    for register in (model.layers[1].register_forward_hook, nn.modules.module.register_module_forward_hook):
        handle = register(lambda module, inputs, output: None)
        assert not is_plain(model) and not form.holds()
        handle.remove()
        assert is_plain(model) and form.holds()


def test_other_backbone_and_format() -> None:
    """A model of another class, and one with weights of two formats, take their own way."""

    class Other(K3):
        def backbone(self, *args: Any, **options: Any) -> Tensor:
            return super().backbone(*args, **options) / 2

    model = model_of()
    model.__class__ = Other
    assert not HostStep.applies(model)
    model = model_of(torch.float32)
    cast(Any, model.layers[1]).mixer.o_norm.double()
    assert not HostStep.applies(model)


def test_under_inference_mode() -> None:
    """An engine that was made there serves outside, and the other way round; so does a model that was made there."""
    with torch.inference_mode():
        model = model_of()
        one = engine_of(model)
        answers(one, [1, 7], 2)
    answers(one, [1, 7], 2)
    another = engine_of(model_of())
    with torch.inference_mode():
        answers(another, [1, 7], 2)
    answers(another, [1, 7], 2)
