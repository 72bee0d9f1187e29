"""One call of a denoiser, captured: its graph, what forward returns beside the prediction, and the graph of any size.

On disk it is one entry of the cache (`cache.py`), under a digest that tells it from a training step's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxpipe.capture import Capture, capture, private
from fxpipe.capture.any_size import AnySize, Freed, capture_any_size
from fxpipe.capture.autocasts import written_out
from fxpipe.capture.cache import cached
from fxpipe.capture.export import ResultOf
from fxpipe.capture.expressions import Unwritable
from fxpipe.capture.free_sizes import FreeSizes
from fxpipe.capture.inputs import InputSpec
from fxpipe.capture.known import Given
from fxpipe.capture.model_call import ModelCall
from fxpipe.capture.stored import from_data, kind_named, to_data
from fxpipe.capture.trees import Returned
from fxpipe.errors import CaptureError, ValuesError

_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True, eq=False)
class CapturedCall:
    """`any_size` says why there is no graph of any size where it is text; None where none was asked for."""

    captured: Capture
    returned: Returned
    any_size: AnySize | str | None


def cached_call(
    call: ModelCall, free: Freed | None, folder: Path | None, known: CapturedCall | None = None
) -> CapturedCall:
    """The call of a model as it is now (in eval, no parameter requiring a gradient), from the folder if it is there.

    Args:
        free: the sizes that it is traced again with as free ones; None where it is not.
        known: the same call, or one of other sizes, traced at its own, if it has been.

    Raises:
        CaptureError: the model cannot be captured as one graph.
    """

    def make() -> CapturedCall:
        found = known or _of_its_sizes(call)
        if free is None:
            return found
        at = call if known is not None else replace(call, inputs=found.captured.inputs)
        return replace(found, any_size=_of_any_size(at, found, free))

    which = "one size" if free is None else f"free sizes of {sorted(free.wanted.items())}, {free.only}"
    return cached(
        call, folder, ("call", which), make,
        load=lambda data: _from_data(data, call.inputs, call.model),
        write=lambda found: _to_data(found, call.model),
    )  # fmt: skip


def _of_its_sizes(call: ModelCall) -> CapturedCall:
    found: list[Returned] = []
    result_of = _noting(found)
    try:
        captured = capture(replace(call, given=Given(first=True)), result_of)
    except ValuesError:
        if call.given is None:
            raise
        captured = capture(call, result_of)
    if captured.read:
        raise CaptureError(
            f"forward reads {next(iter(captured.read))} as a number, which may be another at the next call; keep it a "
            "tensor, or a number of the model's"
        )
    return CapturedCall(replace(captured, graph=written_out(captured.graph)), found[0], None)


def _of_any_size(call: ModelCall, known: CapturedCall, sizes: Freed) -> AnySize | str:
    """Or why there is none."""
    found: list[Returned] = []
    needed = call if known.captured.guards else replace(call, given=None)
    try:
        made = capture_any_size(needed, known.captured, _noting(found), sizes)
    except CaptureError as error:
        return str(error)
    if any(map(private.sizes.is_traced_number, found[0].leaves)):
        return "forward returns a size beside its prediction"
    return made


def _noting(found: list[Returned]) -> ResultOf:
    """Leaves in `found` what forward returned last."""

    def result_of(output: Any) -> torch.Tensor:
        found[:] = [Returned.of(output)]
        return found[0].tensor(output)

    return result_of


def _to_data(call: CapturedCall, model: nn.Module) -> dict[str, Any]:
    data = {"captured": to_data(call.captured, model), "returned": _returned_data(call.returned)}
    if isinstance(call.any_size, AnySize):
        made = call.any_size
        free = {"captured": to_data(made.captured, model), "free": made.free.to_data(), "fixed": made.fixed}
        return {**data, "any size": free}
    return {**data, "any size": call.any_size}


def _from_data(data: Mapping[str, Any], inputs: InputSpec, model: nn.Module) -> CapturedCall:
    any_size = data["any size"]
    if isinstance(any_size, dict):
        captured, free = from_data(any_size["captured"], inputs, model), FreeSizes.from_data(any_size["free"])
        any_size = AnySize(captured, free, any_size["fixed"])
    elif not isinstance(any_size, str | None):
        raise ValueError(any_size)
    return CapturedCall(from_data(data["captured"], inputs, model), _returned(data["returned"]), any_size)


def _returned_data(returned: Returned) -> dict[str, Any]:
    if not all(type(leaf) in _PLAIN for leaf in returned.leaves):
        raise Unwritable("a value that forward returns beside its prediction")
    try:
        tree = pytree.treespec_dumps(returned.tree)
    except (NotImplementedError, TypeError) as error:
        raise Unwritable(f"what forward returns: {error}") from None
    kinds = [str(kind).removeprefix("torch.") for kind in returned.dtypes]
    packed = {"shapes": [list(shape) for shape in returned.shapes], "dtypes": kinds}
    return {"leaves": list(returned.leaves), "tree": tree, "places": list(returned.places), **packed}


def _returned(data: Mapping[str, Any]) -> Returned:
    leaves, places = tuple(data["leaves"]), tuple(data["places"])
    tree = pytree.treespec_loads(data["tree"])
    shapes, dtypes = tuple(map(tuple, data["shapes"])), tuple(map(kind_named, data["dtypes"]))
    known = all(type(place) is int and 0 <= place < len(leaves) for place in places)
    sized = len(shapes) == len(dtypes) in (0, len(places)) and all(type(s) is int for shape in shapes for s in shape)
    if tree.num_leaves != len(leaves) or not places or not known or not sized:
        raise ValueError(data)
    return Returned(leaves, tree, places, shapes, dtypes)
