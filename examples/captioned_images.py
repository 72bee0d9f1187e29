"""Images with captions: of a folder, or discs and squares drawn for a first try.

A folder has either `metadata.jsonl`, lines of {"file_name": "a.png", "text": "a cat"} as in Hugging Face's folders of
images, or a text file beside each image: a.png, a.txt.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import Dataset

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 70), "blue": (50, 80, 220), "yellow": (235, 200, 40)}
SHAPES = ("disc", "square")
Sample = tuple[Tensor, str]


class CaptionedImages(Dataset[Sample]):
    """Pixels [3, side, side] in [-1, 1], scaled and cropped in the middle, and the caption, of a folder's images."""

    def __init__(self, folder: Path, side: int) -> None:
        self.side, listed = side, folder / "metadata.jsonl"
        if listed.is_file():
            lines = [json.loads(line) for line in listed.read_text().splitlines()]
            self.items = [(folder / line["file_name"], str(line["text"])) for line in lines]
        else:
            self.items = [(found, beside.read_text().strip()) for found, beside in _beside(folder)]
        if not self.items:
            raise SystemExit(f"{folder} has neither metadata.jsonl nor images with a .txt beside each")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Sample:
        path, caption = self.items[index]
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        scale = self.side / min(image.size)
        image = image.resize((max(self.side, round(image.width * scale)), max(self.side, round(image.height * scale))))
        left, top = (image.width - self.side) // 2, (image.height - self.side) // 2
        return _pixels(image.crop((left, top, left + self.side, top + self.side))), caption


class DrawnImages(Dataset[Sample]):
    """The same of discs and squares of four colours, at places of their own, drawn when they are asked for."""

    def __init__(self, num_images: int, side: int) -> None:
        self.num_images, self.side = num_images, side

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> Sample:
        colour, shape, half = list(COLOURS)[index % 4], SHAPES[index // 4 % 2], self.side // 2
        image = Image.new("RGB", (self.side, self.side), "white")
        left, top = np.random.default_rng(index).integers(half, size=2).tolist()
        pencil = ImageDraw.Draw(image)
        (pencil.ellipse if shape == "disc" else pencil.rectangle)(
            (left, top, left + half, top + half), fill=COLOURS[colour]
        )
        return _pixels(image), f"a {colour} {shape}"


def _pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


def _beside(folder: Path) -> Iterator[tuple[Path, Path]]:
    for path in sorted(folder.iterdir()):
        text = path.with_suffix(".txt")
        if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp") and text.is_file():
            yield path, text


def collate(tokenize: Callable[[Sequence[str]], Mapping[str, Tensor]]) -> Callable[[list[Sample]], dict[str, Tensor]]:
    """What makes a training step's batch of samples."""

    def collated(samples: list[Sample]) -> dict[str, Tensor]:
        pixels, captions = zip(*samples, strict=True)
        return {"pixel_values": torch.stack(pixels), **tokenize(captions)}

    return collated


def grid(images: Sequence[Any], columns: int) -> Any:
    """PIL images of one size, row by row, as one."""
    rows = -(-len(images) // columns)
    made = Image.new("RGB", (columns * images[0].width, rows * images[0].height))
    for number, image in enumerate(images):
        made.paste(image, (number % columns * image.width, number // columns * image.height))
    return made
