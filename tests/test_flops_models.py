"""Whole models: one symbolic graph's FLOPs against `torch.utils.flop_counter` at two batch sizes."""

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from cost_models.devices import device
from cost_models.flops import node_costs
from fxpipe.capture import capture
from fxpipe.capture.inputs import describe
from fxpipe.capture.model_call import ModelCall
from fxpipe.costs import total_cost
from fxpipe.costs.model import node_seconds
from fxpipe.costs.table import CostTable
from fxpipe.models.backbones import PredictionStep, example_inputs
from tests.models import CONFIGS
from tests.node_numbers import counts_of

aten = torch.ops.aten
FUSED_ON_CPU: dict[Any, Callable[..., int]] = {  # torch counts the CUDA kernels; the CPU's does the same products
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(
        grad, q, k, v
    ),
}
FEWER_LAYERS: dict[str, dict[str, int]] = {
    "DiTTransformer2DModel": {"num_layers": 1},
    "PixArtTransformer2DModel": {"num_layers": 1},
    "SD3Transformer2DModel": {"num_layers": 2},
    "FluxTransformer2DModel": {"num_layers": 1, "num_single_layers": 1},
    "HunyuanDiT2DModel": {"num_layers": 2},
}
BACKBONES = ("UNet2DConditionModel", *FEWER_LAYERS)


def backbone(key: str) -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    """A tiny diffusers model and its inputs by batch size."""
    config = {**CONFIGS[key], **FEWER_LAYERS.get(key, {})}
    model = getattr(diffusers, key.split("/")[0])(**config)
    return model, lambda num_samples: example_inputs(model, num_samples)


def autoencoder() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    model = diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    )
    return model, lambda n: {"target": torch.zeros(n, 3, 16, 16), "sample": torch.zeros(n, 3, 16, 16)}


def text_encoder() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.CLIPTextModel(transformers.CLIPTextConfig(vocab_size=100, max_position_embeddings=8, **sizes))
    return model, lambda n: {"target": torch.zeros(n, 8, 16), "input_ids": torch.ones(n, 8, dtype=torch.long)}


def counted(step: nn.Module, inputs: dict[str, Any]) -> tuple[int, int]:
    """FLOPs of the forward and of the backward, as torch counts them while they run."""
    with FlopCounterMode(display=False, custom_mapping=FUSED_ON_CPU) as forward:
        loss: Tensor = step(**inputs)
    with FlopCounterMode(display=False, custom_mapping=FUSED_ON_CPU) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("name", [*BACKBONES, "AutoencoderKL", "CLIPTextModel"])
def test_one_graph_agrees_with_torch_at_two_batch_sizes(name: str) -> None:
    others = {"AutoencoderKL": autoencoder, "CLIPTextModel": text_encoder}
    model, inputs = others[name]() if name in others else backbone(name)
    step = PredictionStep(model)
    batches = {num_samples: inputs(num_samples) for num_samples in (2, 5)}
    spec, examples = describe(step, (), batches[5], 5)
    cost = total_cost(node_costs(capture(ModelCall(step, spec, examples)).graph.nodes).values())
    for num_samples, batch in batches.items():
        counts = counts_of(cost, num_samples)
        forward, backward = counted(step, batch)
        assert counts.forward_flops == pytest.approx(forward, rel=1e-3)
        assert counts.backward_input_flops + counts.backward_weight_flops == pytest.approx(backward, rel=1e-3)


SDXL = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


def test_sdxl_at_full_size() -> None:
    """DistriFusion (CVPR 2024), table 1: 6,763 GMACs for two samples of 1024x1024; the U-Net's products are 6,761."""
    with torch.device("meta"):
        model = diffusers.UNet2DConditionModel(**SDXL)
        inputs = (torch.zeros(2, 4, 128, 128), torch.zeros(2), torch.zeros(2, 77, 2048))
        conditions = {"text_embeds": torch.zeros(2, 1280), "time_ids": torch.zeros(2, 6)}
        exported = torch.export.export(model, inputs, {"added_cond_kwargs": conditions}, strict=False)
    parameters = exported.graph_signature.inputs_to_parameters
    for node in exported.graph.nodes:
        node.meta["kind"] = "parameter" if node.name in parameters else "input"
        node.meta["requires_grad"] = node.name in parameters or any(
            n.meta["requires_grad"] for n in node.all_input_nodes
        )
    costs = node_costs(exported.graph.nodes)
    counts = counts_of(total_cost(costs.values()), 2)
    assert counts.forward_flops / 2e9 == pytest.approx(6761, rel=1e-3)
    assert (
        2 * counts.forward_flops
        < counts.backward_input_flops + counts.backward_weight_flops
        < 2.1 * counts.forward_flops
    )
    seconds = node_seconds(device("A100-80GB"), CostTable.of(costs.values()), 2).forward.sum()
    assert counts.forward_flops / 156e12 < seconds < 4 * counts.forward_flops / 156e12
