"""What is not trained, as a run began with it: left out of checkpoints of what is trained, unless it was written since.

unet.lora_A         trained                                         saved
unet.conv_in        as it was                                       left out, and must be the same again
target.conv_in      an average of the student, set between steps    saved
"""

from itertools import chain

import torch
from torch import nn

from fxpipe.run.marks import Marks, marks_of
from fxpipe.run.ownership import is_empty


class Base:
    """Of a model that is ready to be trained."""

    def __init__(self, model: nn.Module) -> None:
        held = (t for t in chain(model.parameters(), model.buffers()) if not t.requires_grad and _is_here(t))
        self._marks: dict[int, tuple[torch.Tensor, Marks]] = {id(t): (t, marks_of([t])) for t in held}

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it is as it was, as far as its count of writes and a few entries tell; or was not here."""
        _, before = self._marks.get(id(tensor), (tensor, None))
        return before is None or not _is_here(tensor) or marks_of([tensor]) == before


def _is_here(tensor: torch.Tensor) -> bool:
    return not (tensor.is_meta or is_empty(tensor))


NO_BASE = Base(nn.Module())
