"""Trains a text-to-image pipeline of diffusers on captioned images: whole, or low-rank adapters of it.

    python examples/train_text_to_image.py                              # a toy model, 2 ranks in this process
    torchrun --nproc-per-node 2 examples/train_text_to_image.py --ema 0.999 --snr-gamma 5
    torchrun --nproc-per-node 8 examples/train_text_to_image.py --device cuda --lora --rank 16 \
        --pretrained stabilityai/stable-diffusion-xl-base-1.0 --data photos/ --train-batch-size 64
    ... --resume                                                        # on as many ranks, or on others

In --output-dir: what was trained, as diffusers loads it (`pipeline/`, or the adapters' safetensors), validation samples
as grids, scalars for TensorBoard where it is installed and as `scalars.jsonl`, and checkpoints.
"""

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

import fxpipe
from examples import toy_pipeline
from examples.captioned_images import CaptionedImages, DrawnImages, collate, grid

ADAPTED = ["to_q", "to_k", "to_v", "to_out.0"]
FIRST = os.environ.get("RANK", "0") == "0"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pretrained", help="folder or hub id of a diffusers pipeline; a toy model where left out")
    add("--data", type=Path, help="folder of captioned images; discs and squares where left out")
    add("--output-dir", type=Path, default=Path("out/text_to_image"))
    add("--resolution", type=int, help="side of the images in pixels; the pipeline's own where left out")
    add("--train-batch-size", type=int, default=8, help="images in a step, over all ranks")
    add("--gradient-accumulation-steps", type=int, default=1, help="batches of an update")
    add("--max-train-steps", type=int, default=20, help="updates")
    add("--learning-rate", type=float, default=1e-4)
    add("--lr-scheduler", default="constant", help="linear, cosine, constant_with_warmup, ...")
    add("--lr-warmup-steps", type=int, default=0)
    add("--max-grad-norm", type=float, default=1.0)
    add("--nonfinite", choices=["raise", "skip"], default="raise", help="updates whose gradients are no finite numbers")
    add("--snr-gamma", type=float, help="weigh losses by Min-SNR; 5 is usual")
    add("--caption-dropout", type=float, default=0.1, help="share of samples trained on without their caption")
    add("--lora", action="store_true", help="train adapters of the attention's projections (needs peft)")
    add("--rank", type=int, default=4, help="of the adapters")
    add("--ema", type=float, help="decay of an average of the weights, which is then sampled from and saved")
    add("--checkpointing-steps", type=int, default=500)
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--validation-prompts", nargs="*", default=["a red disc", "a blue square"])
    add("--validation-steps", type=int, help="updates between grids of samples; one at the end where left out")
    add("--num-inference-steps", type=int, default=10)
    add("--precision", choices=["fp32", "bf16", "fp16"], help="of the forward; lower ones by autocast")
    add("--dataloader-num-workers", type=int, default=0, help="processes that read images, of every rank")
    add("--seed", type=int, default=0)
    add("--world-size", type=int, default=2, help="ranks, all in this process; under torchrun its own number")
    add("--device", default="cpu", help="cpu, or cuda for a GPU each")
    layout = parser.add_argument_group("layout", "as of fxpipe.compile; what is left out is chosen")
    layout.add_argument("--schedule", default="auto")
    for name in ("stages", "microbatches", "data-parallel"):
        layout.add_argument(f"--{name}", type=int)
    for name in ("memory-limit", "cluster", "plan"):
        layout.add_argument(f"--{name}")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    launched = "WORLD_SIZE" in os.environ
    torch.manual_seed(options.seed)
    pipe: Any = DiffusionPipeline.from_pretrained(options.pretrained) if options.pretrained else toy_pipeline.pipe()
    if options.lora:
        from peft import LoraConfig

        name = "unet" if hasattr(pipe, "unet") else "transformer"
        config = LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules=ADAPTED)
        getattr(pipe, name).add_adapter(config)
    step = fxpipe.training_step(pipe, snr_gamma=options.snr_gamma, caption_dropout=options.caption_dropout)
    side = options.resolution or step.image_size[0]
    images: Any = CaptionedImages(options.data, side) if options.data else DrawnImages(64, side)
    if len(images) < options.train_batch_size:
        raise SystemExit(f"{len(images)} images are no batch: give --train-batch-size {len(images)}, or fewer")
    collated = collate(partial(fxpipe.tokenize, pipe))
    first = collated([images[index] for index in range(options.train_batch_size)])

    program = fxpipe.compile(
        step, int(os.environ.get("WORLD_SIZE", options.world_size)), example_inputs=first, precision=options.precision,
        schedule=options.schedule, stages=options.stages, microbatches=options.microbatches, device=options.device,
        data_parallel=options.data_parallel, memory_limit=options.memory_limit, cluster=options.cluster,
        plan=options.plan,
    )  # fmt: skip
    if FIRST:
        print(program.plan.summary())
    if not launched:
        pipe.to(options.device)
    engine = program.engine(seed=options.seed) if launched else program.local_engine(seed=options.seed)
    weights = [parameter for parameter in step.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=options.learning_rate)
    schedule = get_scheduler(
        options.lr_scheduler, optimizer, num_warmup_steps=options.lr_warmup_steps,
        num_training_steps=options.max_train_steps,
    )  # fmt: skip
    average = None if options.ema is None else EMAModel(weights, decay=options.ema)
    saved = options.output_dir / "checkpoints"
    scaler = engine.scaler()  # does nothing but with --precision fp16
    run: dict[str, Any] = {"scheduler": schedule, "extra": {"scaler": scaler}}
    if average is not None:
        run["extra"]["average"] = average
    if options.resume and fxpipe.checkpoints(saved):
        loaded = engine.load(saved, optimizer, **run)
        if FIRST:
            print(f"goes on from {loaded.folder}")
    loader = engine.dataloader(
        images, shuffle=True, seed=options.seed, collate_fn=collated, num_workers=options.dataloader_num_workers
    )

    log = Log(options.output_dir)
    total = options.max_train_steps * options.gradient_accumulation_steps
    live = engine.live(total, every=options.gradient_accumulation_steps)
    losses = []
    for batch, following in islice(pairs(loader), max(0, total - engine.step_index)):
        loss = engine.step(batch, following, scaler)  # the next batch is encoded in this step's idle time
        live(loss)
        losses.append(loss)
        update, left = divmod(engine.step_index, options.gradient_accumulation_steps)
        if left:
            continue
        mean, losses = torch.stack(losses).mean(), []
        scaler.unscale_(optimizer)
        for parameter in engine.parameters():
            if parameter.grad is not None:
                parameter.grad /= options.gradient_accumulation_steps
        norm = engine.clip_grad_norm_(options.max_grad_norm)
        if not (norm.isfinite() or scaler.is_enabled()):  # on all ranks alike
            fault = f"update {update}: the norm of the gradients is {float(norm)}"
            if options.nonfinite == "raise":
                raise SystemExit(f"{fault}; --resume goes on from the last checkpoint, --nonfinite skip leaves it out")
            print(f"{fault}; it is left out")
            optimizer.zero_grad()
            continue
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        if average is not None:
            average.step(weights)
        log(update, {"loss": float(mean), "gradient norm": float(norm), "learning rate": schedule.get_last_lr()[0]})
        if update % options.checkpointing_steps == 0:
            engine.save(saved, optimizer, **run, trainable_only=True, asynchronous=True)
        if options.validation_steps and update % options.validation_steps == 0 and update < options.max_train_steps:
            with whole_model(engine, average, weights):
                validate(pipe, step, options, update)
    with whole_model(engine, average, weights):
        if FIRST:
            save(pipe, step, options)
        validate(pipe, step, options, options.max_train_steps)
    log.close()
    engine.close()


def pairs(loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Every batch with the one after it, an epoch's last with none; epoch after epoch."""
    while True:
        found = iter(loader)
        batch = next(found)
        for following in found:
            yield batch, following
            batch = following
        yield batch, None


@contextmanager
def whole_model(engine: Any, average: EMAModel | None, weights: list[Any]) -> Iterator[None]:
    """The model as all ranks have trained it, or its average, on every rank, to sample from and to save."""
    engine.sync_model(*([] if average is None else [average]))
    if average is not None:
        average.store(weights)
        average.copy_to(weights)
    yield
    if average is not None:
        average.restore(weights)


def validate(pipe: Any, step: fxpipe.PipelineStep, options: argparse.Namespace, update: int) -> None:
    """A row of samples for every prompt, on one rank; the others wait for it in their next step."""
    if not FIRST or not options.validation_prompts:
        return
    step.eval()
    pipe.to(options.device)  # what this rank has not trained is not there yet
    pipe.set_progress_bar_config(disable=True)
    side = options.resolution or step.image_size[0]
    generator = torch.Generator().manual_seed(options.seed)
    made = [
        pipe(
            prompt=prompt, num_images_per_prompt=4, num_inference_steps=options.num_inference_steps, height=side,
            width=side, generator=generator,
        ).images
        for prompt in options.validation_prompts
    ]  # fmt: skip
    grid([image for row in made for image in row], 4).save(options.output_dir / f"samples-{update}.png")
    step.train()


def save(pipe: Any, step: fxpipe.PipelineStep, options: argparse.Namespace) -> None:
    """As diffusers loads it: `pipe.load_lora_weights(output_dir)`, or `from_pretrained(output_dir / "pipeline")`."""
    if not options.lora:
        pipe.save_pretrained(options.output_dir / "pipeline")
        return
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft import get_peft_model_state_dict

    layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(step.denoiser))
    pipe.save_lora_weights(options.output_dir, **{f"{step.main}_lora_layers": layers})


class Log:
    """Scalars of every update, from one rank."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.lines, self.board = folder / "scalars.jsonl", None
        if FIRST:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
            self.board = SummaryWriter(folder / "tensorboard")

    def __call__(self, update: int, scalars: Mapping[str, float]) -> None:
        if not FIRST:
            return
        with self.lines.open("a") as file:
            file.write(json.dumps({"update": update, **scalars}) + "\n")
        if self.board is not None:
            for name, value in scalars.items():
                self.board.add_scalar(name, value, update)

    def close(self) -> None:
        """All of them are on the disk."""
        if self.board is not None:
            self.board.close()


if __name__ == "__main__":
    main()
