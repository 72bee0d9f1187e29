"""Buckets: the messages that cross from a step to the next, packed so that they are few.

fresh      k -> 1 | v -> 1 | edge -> 1 | moments -> 1 | prediction -> 1      each waited for in this step
displaced  [k v] -> 1 | prediction -> 1 | [edge] -> 1 | [moments] -> 1       a bucket is waited for a step later

A bucket has messages of one channel and dtype, in the order of the graph; moments travel apart. It leaves when its last
member is made, so that is its place among the channel's messages; the last of its kind, which is not full before the
end, leaves after all that is waited for in this step.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from fxpipe.plan.rank_program import Message

MOST_BYTES, LEAST_BYTES, PER_STEP = 16 * 2**20, 2**18, 8
"""Bytes of a bucket; how many there are at least: one that leaves at the end of a step has no time to arrive."""
T = TypeVar("T")
ExchangeKey = tuple[str, str]
"""An exchange by its name and kind."""


def key_of(message: Message) -> ExchangeKey:
    return message.value, message.kind


def displaced_messages(messages: Sequence[Message], fresh: Collection[ExchangeKey]) -> tuple[Message, ...]:
    """The messages of a displaced step from those of a fresh one, in the order of every channel; what is `fresh` stays
    in this step."""
    kept = [message for message in messages if key_of(message) in fresh]
    crossing = sorted((message for message in messages if key_of(message) not in fresh), key=_group)
    members = [bucket for _, group in groupby(crossing, _group) for bucket in filled([*group], _num_bytes)]
    members.sort(key=lambda bucket: bucket[-1].edge)
    numbers: dict[tuple[int, int], int] = {}
    first = 1 + max((message.edge for message in messages), default=-1)
    for edge, bucket in enumerate(members, first):
        channel = bucket[0].channel
        numbers[channel] = numbers.get(channel, -1) + 1
        kept.append(_bucket(edge, f"bucket_{numbers[channel]}", bucket))
    late = leaving_last(message for message in kept if message.crosses)
    return tuple(sorted(kept, key=lambda one: (one.edge in late, (one.members or (one,))[-1].edge)))


def leaving_last(buckets: Iterable[Message]) -> frozenset[int]:
    """The edges of each channel's last bucket of a kind."""
    return frozenset({_group(bucket.members[0]): bucket.edge for bucket in buckets}.values())


def _num_bytes(message: Message) -> int:
    return message.num_bytes


def _group(message: Message) -> tuple[tuple[int, int], str, bool]:
    return message.channel, str(message.dtype), message.kind == "moments"


def filled(messages: Sequence[T], num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Those of one channel by buckets: one holds an eighth of all, within bounds; a single message may be larger."""
    most = min(max(sum(map(num_bytes, messages)) // PER_STEP, LEAST_BYTES), MOST_BYTES)
    bucket, size = list[T](), 0
    for message in messages:
        if bucket and size + num_bytes(message) > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(message)
        size += num_bytes(message)
    yield bucket


def _bucket(edge: int, name: str, members: Sequence[Message]) -> Message:
    one = members[0]
    size = sum(member.num_bytes for member in members) // one.dtype.itemsize
    wire = (edge, one.src, one.dst, None, name, -1, "bucket", (size,), one.dtype)
    return Message(*wire, crosses=1, members=tuple(members))
