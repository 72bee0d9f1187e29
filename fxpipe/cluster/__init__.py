"""The machines a plan is made for: devices of one kind, and the links between them level by level.

    8x8xA100-80GB+EFA       level 0: 8 devices over NVSwitch-3       level 1: 8 nodes over EFA-400
                            rank 0..7 are node 0's, 8..15 node 1's
    4xA100-80GB*1,1,1,0.5   rank 3 takes twice as long for everything

A message uses the ports of the lowest level that joins its two ranks: two devices of a node their own, two nodes the
node's, which all its devices share. `fxpipe.cluster.network` turns ports into seconds.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf, prod
from operator import mul
from pathlib import Path
from typing import Any

from fxpipe.cluster import network
from fxpipe.cluster.links import INSIDE, Link, device_and_link, named_link, require_joins
from fxpipe.cluster.links import network as network_link
from fxpipe.errors import CompileError

_HELP = "write it as 8xA100-80GB, 2x8xV100+Ethernet-10, 4xA100-PCIe, or as TOML with device and [[level]] tables"


@dataclass(frozen=True)
class Level:
    """`size` members joined by `link`: devices in a node, nodes in a cluster."""

    size: int
    link: Link

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise CompileError(f"a level of a cluster has at least one member, got {self.size!r}")


@dataclass(frozen=True)
class Cluster:
    """Devices by name, and the levels that join them, the innermost first. Ranks count through the inner ones.

    `speeds` are every rank's, relative to the device of that name; none where all are equal.
    """

    device: str
    levels: tuple[Level, ...]
    speeds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.levels:
            raise CompileError(f"a cluster of {self.device} needs at least one level of devices")
        if self.speeds and (len(self.speeds) != self.num_ranks or not all(0 < one < inf for one in self.speeds)):
            raise CompileError(
                f"speeds {list(self.speeds)} of {self.num_ranks} devices: give a number above 0 for each, 1 for those "
                f"that are as fast as {self.device}"
            )

    @staticmethod
    def parse(text: str) -> "Cluster":
        """The cluster of a short text, of TOML text, or of a `.toml` file.

        Raises:
            CompileError: the text is none of these; says what was not understood.
        """
        if not isinstance(text, str):
            raise CompileError(f"a cluster is a Cluster or its text, got {type(text).__name__}; {_HELP}")
        if text.strip().endswith(".toml"):
            path = Path(text.strip())
            if not path.is_file():
                raise CompileError(f"no cluster file {path}; {_HELP}")
            return _from_toml(_read(path))
        return _from_toml(text) if "=" in text else _from_short(text.strip())

    def __str__(self) -> str:
        """The short text where there is one, else TOML; `parse` reads both."""
        short = _short(self)
        try:
            if Cluster.parse(short) == self:
                return short
        except CompileError:
            pass  # links of its own: only TOML can say that
        return _toml(self)

    @cached_property
    def num_ranks(self) -> int:
        return prod(level.size for level in self.levels)

    def levels_of(self, world_size: int) -> int:
        """How many levels have links between the first `world_size` ranks."""
        inner = accumulate((level.size for level in self.levels), mul, initial=1)
        return sum(level.size > 1 and size < world_size for level, size in zip(self.levels, inner, strict=False))

    @property
    def is_host(self) -> bool:
        """Whether its devices are CPUs, whose memory is the host's."""
        return self.device.upper() == "CPU"

    @property
    def keeps_sent(self) -> bool:
        """Whether what is sent stays to the end of the step: gloo, of CPUs, does not tell when a message arrived."""
        return self.is_host

    @cached_property
    def routes(self) -> dict[tuple[int, int], tuple[Link, tuple[network.Port, ...]]]:
        """The routes that were asked for, by source and target: `fxpipe.cluster.network` keeps them here."""
        return {}

    def require(self, world_size: int) -> "Cluster":
        """This cluster, if it has `world_size` devices or more; the first ones are used.

        Raises:
            CompileError: it has fewer.
        """
        if world_size > self.num_ranks:
            raise CompileError(
                f"world_size={world_size}, but the cluster {_short(self)} has {self.num_ranks} devices; "
                "use fewer ranks or a larger cluster"
            )
        return self

    def require_alike(self) -> "Cluster":
        """This cluster, if its devices are equally fast.

        Raises:
            CompileError: they are not.
        """
        if len(set(self.speeds)) > 1:
            raise CompileError(
                f"the cluster's devices have speeds {list(self.speeds)}: stages are made for equal ones; leave speeds "
                "out, or sample (fxpipe.compile_sampler sizes patches by them)"
            )
        return self

    transfer_seconds = network.transfer_seconds
    concurrent_seconds = network.concurrent_seconds
    all_reduce_seconds = network.all_reduce_seconds
    all_gather_seconds = network.all_gather_seconds
    taken_seconds = network.taken_seconds
    ring_taken_seconds = network.ring_taken_seconds


def _from_short(text: str) -> Cluster:
    text, _, speeds = text.partition("*")
    try:
        given = tuple(float(speed) for speed in speeds.split(",")) if speeds else ()
    except ValueError:
        raise CompileError(f"speeds {speeds!r} are no numbers; write 4xA100-80GB*1,1,1,0.5") from None
    return replace(_alike(text), speeds=given)


def _alike(text: str) -> Cluster:
    found = re.fullmatch(r"(\d+)\s*x\s*(?:(\d+)\s*x\s*)?([^+]+?)\s*(?:\+\s*([^+]+))?", text)
    if found is None:
        raise CompileError(f"cluster {text!r} is not understood; {_HELP}")
    device, link = device_and_link(found[3])
    require_joins(link.name, int(found[2] or found[1]))
    if found[2] is None:
        if found[4] is not None:
            raise CompileError(f"cluster {text!r} has one node, so nothing for +{found[4]} to join; {_HELP}")
        return Cluster(device, (Level(int(found[1]), link),))
    outer = network_link(found[4] or "Ethernet")
    return Cluster(device, (Level(int(found[2]), link), Level(int(found[1]), outer)))


def _short(cluster: Cluster) -> str:
    sizes = "x".join(str(level.size) for level in reversed(cluster.levels))
    inner, *outer = (level.link.name for level in cluster.levels)
    usual = INSIDE.get(cluster.device, ("",))[0] == inner
    speeds = "*" + ",".join(f"{speed:g}" for speed in cluster.speeds) if cluster.speeds else ""
    return "+".join([f"{sizes}x{cluster.device}{'' if usual else f'-{inner}'}", *outer]) + speeds


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CompileError(f"the cluster file {path} cannot be read: {error}; {_HELP}") from None


def _from_toml(text: str) -> Cluster:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CompileError(f"the cluster's TOML does not parse: {error}") from None
    _known(table, {"device", "level", "speeds"}, "a cluster")
    levels = table.get("level")
    if not isinstance(table.get("device"), str) or not isinstance(levels, list) or {*map(type, levels)} - {dict}:
        raise CompileError('a cluster\'s TOML has device = "..." and [[level]] tables, the innermost first')
    speeds = table.get("speeds", [])
    if not isinstance(speeds, list) or any(isinstance(s, bool) or not isinstance(s, int | float) for s in speeds):
        raise CompileError(f"speeds of a cluster are a list of numbers, one for every device, not {speeds!r}")
    return Cluster(table["device"], tuple(map(_level, levels)), tuple(map(float, speeds)))


def _level(table: Mapping[str, Any]) -> Level:
    given = {"bandwidth_bytes_per_second", "latency_seconds", "duplex", "shared", "taken_share", "overhead_seconds"}
    _known(table, {"size", "link"} | given, "a level")
    name, own = table.get("link", "custom"), {key: table[key] for key in given & set(table)}
    if not own:
        return Level(table.get("size", 0), named_link(str(name)))
    for key, value in own.items():
        kind = bool if key in ("duplex", "shared") else float | int
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise CompileError(f"{key} of link {name} cannot be {value!r}")
    if not {"bandwidth_bytes_per_second", "latency_seconds"} <= set(own):
        raise CompileError(f"link {name} needs both bandwidth_bytes_per_second and latency_seconds")
    return Level(table.get("size", 0), Link(str(name), **own))


def _known(table: Mapping[str, Any], keys: set[str], what: str) -> None:
    if unknown := sorted(set(table) - keys):
        raise CompileError(f"unknown key {unknown[0]!r} in {what}'s TOML; known are {', '.join(sorted(keys))}")


def _toml(cluster: Cluster) -> str:
    lines = [f'device = "{cluster.device}"', *[f"speeds = {list(cluster.speeds)}"] * bool(cluster.speeds)]
    for level in cluster.levels:
        link = level.link
        lines += [
            "",
            "[[level]]",
            f"size = {level.size}",
            f'link = "{link.name}"',
            f"bandwidth_bytes_per_second = {link.bandwidth_bytes_per_second!r}",
            f"latency_seconds = {link.latency_seconds!r}",
            f"duplex = {str(link.duplex).lower()}",
            f"shared = {str(link.shared).lower()}",
            *(f"{what} = {taken!r}" for what in ("taken_share", "overhead_seconds") if (taken := getattr(link, what))),
        ]
    return "\n".join(lines)
