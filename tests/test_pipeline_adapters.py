"""Adapters of PEFT on a pipeline's modules: they alone are trained, and saved as diffusers saves them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fxpipe
from tests.trained_pipelines import CAPTIONS, batch_of, trainable

peft = pytest.importorskip("peft")


def adapted(pipe: Any, *targets: str) -> None:
    """Adapters with drawn weights, which as zeros would hide gradients."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=list(targets), init_lora_weights=False)
    pipe.unet.add_adapter(config)
    pipe.text_encoder.add_adapter(
        peft.LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    pipe.unet.double()
    pipe.text_encoder.double()


def test_adapters_are_trained_exactly_and_load_into_diffusers(tmp_path: Path) -> None:
    from diffusers.utils import convert_state_dict_to_diffusers

    pipe = trainable("sd")
    adapted(pipe, "attn2.to_q", "attn2.to_k")
    batch = batch_of(pipe) | fxpipe.tokenize(pipe, CAPTIONS)
    program = fxpipe.compile(pipe, 2, example_inputs=batch, microbatches=2, schedule="1f1b")
    assert program.model.trained == ("text_encoder", "unet")
    assert all("lora_" in name for name in program.capture.trainable)
    report = program.verify(**batch)
    assert report.ok
    assert len(report.gradients) == len(program.capture.trainable) == 6
    assert max(report.loss_error, report.max_grad_error) <= 1e-10
    # No backward before the first adapter: what is before it is frozen work, and no block of a stage.
    frozen = {node for component in program.blocks.components for node in component.nodes}
    graph = program.capture.graph
    readers = {n.meta["state"]: {user.name for user in n.users} for n in graph.nodes if "state" in n.meta}
    assert readers["unet.conv_in.weight"] <= frozen
    assert readers["text_encoder.embeddings.token_embedding.weight"] <= frozen
    assert not readers["unet.conv_out.weight"] & frozen

    before = {name: p.clone() for name, p in program.model.named_parameters()}
    engine = program.local_engine()
    optimizer = torch.optim.SGD([p for p in program.model.parameters() if p.requires_grad], lr=0.5)
    engine.step(batch)
    optimizer.step()
    changed = {name for name, p in program.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == program.capture.trainable

    kinds = {"unet": "unet_lora_layers", "text_encoder": "text_encoder_lora_layers"}
    layers = {
        kinds[name]: convert_state_dict_to_diffusers(peft.get_peft_model_state_dict(getattr(pipe, name)))
        for name in program.model.trained
    }
    pipe.save_lora_weights(tmp_path, **layers)
    fresh = trainable("sd")
    fresh.load_lora_weights(tmp_path)
    fresh.unet.double()
    fresh.text_encoder.double()
    with torch.no_grad():
        embeds, again = (one.encode_prompt(CAPTIONS, "cpu", 1, False)[0] for one in (pipe, fresh))
        torch.testing.assert_close(again, embeds, rtol=1e-6, atol=1e-6)
        x = torch.randn(4, 4, 12, 8, dtype=torch.float64)
        images = [one.unet.eval()(x, 5, embeds).sample for one in (pipe, fresh)]
    torch.testing.assert_close(images[1], images[0], rtol=1e-6, atol=1e-6)
