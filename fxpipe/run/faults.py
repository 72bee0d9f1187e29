"""Where in a rank's graphs an operation has failed, in words: of its inputs and weights by their names.

embedding = torch.ops.aten.embedding.default(emb_weight, y)   ->   embedding of emb.weight [5, 6], y [2]
"""

import linecache
import traceback
from types import FrameType

import torch
from torch import fx

from fxpipe.capture import private


def place_of(error: BaseException) -> str:
    """Empty where it was no operation of torch's that failed, or a device's that may have failed long before."""
    if isinstance(error, torch.AcceleratorError):
        return ""
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        owner = frame.f_locals.get("self")
        if isinstance(owner, fx.GraphModule):
            name = linecache.getline(frame.f_code.co_filename, line).partition(" = ")[0].strip()
            node = next((node for node in owner.graph.nodes if node.name == name), None)
            return "" if node is None or not isinstance(node.target, torch._ops.OpOverload) else _told(node, frame)
    return ""


def _told(node: fx.Node, frame: FrameType) -> str:
    given = [(one, frame.f_locals.get(one.name)) for one in node.all_input_nodes]
    tensors = [
        f"{one.target if one.op == 'get_attr' else one.name} {list(value.shape)}"
        for one, value in given
        if isinstance(value, torch.Tensor)
    ]
    return (
        f"{private.packet_name(node.target)} of {', '.join(tensors)}" if tensors else private.packet_name(node.target)
    )
