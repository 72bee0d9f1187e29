"""Methods whose answers are found once.

@remembered
def forward(self, num_samples): ...       of each object once for every number
"""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, TypeVarTuple

Owner = TypeVar("Owner")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def remembered(method: Callable[[Owner, *Ts], T]) -> Callable[[Owner, *Ts], T]:
    """The method, whose answers an object keeps by their arguments, as long as it is there."""
    name = f"answers of {method.__qualname__}"

    @wraps(method)
    def known(self: Owner, *args: *Ts) -> T:
        answers: dict[object, T] = self.__dict__.setdefault(name, {})
        if args not in answers:
            answers[args] = method(self, *args)
        return answers[args]

    return known
