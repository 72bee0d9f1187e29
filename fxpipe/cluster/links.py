"""Links that clusters are named by, and which devices they come with.

    8xA100-80GB             NVSwitch-3 inside the node, because that is what the device comes with
    4xA100-PCIe             the same device on PCIe-4
    2x8xL40-PCIe            2 nodes of 8, Ethernet-10 between them, because nothing else is said
    8x8xA100-80GB+EFA       8 nodes of 8, EFA-400 between the nodes
    2x8xV100+Ethernet-100   100 Gbit/s between them

A data sheet gives a peak; messages reach `_REACHABLE` of it. Latencies are those of one message between two processes,
library included: assumed unless a source is named.
"""

import re
import sys
from dataclasses import dataclass
from math import inf

from fxpipe.errors import CompileError

# Assumed for every link: large messages reach four fifths of the data sheet's peak.
_REACHABLE = 0.8


@dataclass(frozen=True)
class Link:
    """What joins the members of one level: a port per member into a switch that never blocks.

    `bandwidth_bytes_per_second` is a port's, each way where `duplex`, both ways together where not. `shared`: there is
    one bus for all members instead. `taken_share`: seconds of computation that a second of a message's bytes costs its
    sender, and as many its receiver: what copies take from a CPU core, caches included, or from a GPU's
    multiprocessors. `overhead_seconds`: those that every message costs either, whatever its bytes (o of Culler et al.,
    "LogP", PPoPP 1993).
    """

    name: str
    bandwidth_bytes_per_second: float
    latency_seconds: float
    duplex: bool = True
    shared: bool = False
    taken_share: float = 0.0
    overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        for what in ("taken_share", "overhead_seconds"):
            if not 0 <= getattr(self, what) < float("inf"):
                raise CompileError(f"link {self.name}: {what} {getattr(self, what)} must be finite and not negative")
        if not 1 <= self.bandwidth_bytes_per_second <= sys.float_info.max or not 0 <= self.latency_seconds < inf:
            raise CompileError(
                f"link {self.name}: bandwidth {self.bandwidth_bytes_per_second} bytes/s must be 1 or more, latency "
                f"{self.latency_seconds} s not negative, both finite"
            )


def _link(name: str, peak_gigabytes: float, microseconds: float, shared: bool = False) -> Link:
    duplex = not shared
    return Link(name, round(peak_gigabytes * _REACHABLE, 6) * 1e9, microseconds * 1e-6, duplex, shared)


# Peaks in gigabytes per second, one way.
LINKS = {
    link.name: link
    for link in (
        # 600 GB/s per GPU, both ways together (NVIDIA A100 data sheet, 2021).
        _link("NVSwitch-3", 300.0, 10.0),
        # 900 GB/s per GPU, both ways together (NVIDIA H100 data sheet, 2022; H200 data sheet, 2024).
        _link("NVSwitch-4", 450.0, 10.0),
        # 1,800 GB/s per GPU, both ways together (NVIDIA HGX B200 data sheet, 2024).
        _link("NVSwitch-5", 900.0, 10.0),
        # 112.5 GB/s over the bridge, both ways together (NVIDIA RTX A6000 and A40 data sheets, 2020; GA102 white paper,
        # 2021, appendix A). It joins two.
        _link("NVLink-3", 56.25, 10.0),
        # Six links of 25 GB/s each way per GPU (NVIDIA V100 data sheet, 2018). In the hybrid cube mesh of eight GPUs
        # (DGX-1 system architecture white paper, 2017) two neighbours share two of them at most: 50 GB/s.
        _link("NVLink-2", 50.0, 10.0),
        # 16 lanes at 8, 16 and 32 GT/s with 128b/130b coding (PCI Express base specifications 3.0, 4.0 and 5.0).
        # Messages pass the host, whose devices together have what a pair has: of four A100 that gather at once each
        # reaches 4 to 7 GB/s, a pair 23 (worked back from Wang et al., "PipeFusion", 2024, table 2).
        _link("PCIe-3", 15.75, 15.0, shared=True),
        _link("PCIe-4", 31.5, 15.0, shared=True),
        _link("PCIe-5", 63.0, 15.0, shared=True),
        # Processes of one machine over loopback: `benchmarks/network.py` on two busy cores of a server gave 0.4 to
        # 0.9 GB/s and 0.11 to 0.16 ms; opposite messages at once took twice as long or more, so one bus for all.
        _link("loopback", 1.1, 150.0, shared=True),
    )
}

# Network families by name: Gbit/s of a node's port where the name gives none, and microseconds.
# EFA: 400 Gbit/s of p4d and p4de instances (AWS, 2020); DiffusionPipe's testbed (Tian et al., MLSys 2024).
# IB: HDR, 200 Gbit/s (InfiniBand Trade Association). Ethernet: 10GBASE (IEEE 802.3ae, 2002) with TCP.
FAMILIES = {"EFA": (400, 20.0), "IB": (200, 10.0), "Ethernet": (10, 50.0)}

# What joins the devices of one node: the first is the default.
INSIDE = {
    "A100-80GB": ("NVSwitch-3", "PCIe-4"),
    "A100-40GB": ("NVSwitch-3", "PCIe-4"),
    "H100": ("NVSwitch-4", "PCIe-5"),
    "H200": ("NVSwitch-4", "PCIe-5"),
    "H20": ("NVSwitch-4", "PCIe-5"),
    "B200": ("NVSwitch-5", "PCIe-5"),
    "V100-32GB": ("NVLink-2", "PCIe-3"),
    "V100-16GB": ("NVLink-2", "PCIe-3"),
    "A40": ("PCIe-4", "NVLink-3"),
    "A10": ("PCIe-4",),
    "A10G": ("PCIe-4",),
    "T4": ("PCIe-3",),
    "L40": ("PCIe-4",),
    "L40S": ("PCIe-4",),
    "L20": ("PCIe-4",),
    "L4": ("PCIe-4",),
    "RTX-A6000": ("PCIe-4", "NVLink-3"),
    "RTX-6000-Ada": ("PCIe-4",),
    "RTX-3090": ("PCIe-4", "NVLink-3"),
    "RTX-4090": ("PCIe-4",),
    "RTX-5090": ("PCIe-5",),
    "CPU": ("loopback",),
}
ALIASES = {
    "A100": "A100-80GB", "A100-SXM": "A100-80GB", "A100-SXM4": "A100-80GB", "H100-SXM": "H100", "H100-80GB": "H100",
    "V100": "V100-32GB", "A6000": "RTX-A6000", "6000-Ada": "RTX-6000-Ada", "3090": "RTX-3090", "4090": "RTX-4090",
    "5090": "RTX-5090",
}  # fmt: skip
_PAIRS = ("NVLink-3",)


def host_link(device: str) -> Link:
    """What joins a device to its host: its PCIe, PCIe-4 where that is not known."""
    named = [name for name in INSIDE.get(device, ()) if name.startswith("PCIe")]
    return LINKS[named[0] if named else "PCIe-4"]


def network(name: str) -> Link:
    """The link between nodes of that name: a family, with Gbit/s where they are not the usual ones.

    Raises:
        CompileError: there is no such family; lists them.
    """
    found = re.fullmatch(r"([A-Za-z]+)(?:-(\d+))?", name)
    families = {family.lower(): family for family in FAMILIES}
    if found is None or found[1].lower() not in families:
        raise CompileError(f"unknown network {name!r}; choose one of {', '.join(FAMILIES)}, with Gbit/s as Ethernet-25")
    family = families[found[1].lower()]
    usual, microseconds = FAMILIES[family]
    gigabits = int(found[2] or usual)
    return _link(f"{family}-{gigabits}", gigabits / 8, microseconds)


def named_link(name: str) -> Link:
    """The link of that name, inside a node or between nodes.

    Raises:
        CompileError: there is none; lists them.
    """
    if name in LINKS:
        return LINKS[name]
    if name.partition("-")[0] in FAMILIES:
        return network(name)
    raise CompileError(f"unknown link {name!r}; choose one of {', '.join((*LINKS, *FAMILIES))}, or give its bandwidth")


def require_joins(name: str, size: int) -> None:
    """Refuse a bridge of two devices between more of them."""
    if name in _PAIRS and size > 2:
        raise CompileError(f"{name} joins 2 devices, not {size}; leave the link out, or give levels of 2 as TOML")


def device_and_link(text: str) -> tuple[str, Link]:
    """`A100-PCIe` -> `A100-80GB`, the link PCIe-4: a device's full name, and the link between those of one node.

    Raises:
        CompileError: no such device, or it does not come with that link; lists what there is.
    """
    words = text.strip().split("-")
    for end in range(len(words), 0, -1):
        if (device := canonical_device("-".join(words[:end]))) is not None:
            return device, _inside_link(device, "-".join(words[end:]).lower())
    raise CompileError(f"unknown device {text!r}; known are {', '.join(INSIDE)}, or write the cluster as TOML")


def _inside_link(device: str, wanted: str) -> Link:
    for name in INSIDE[device]:
        if wanted in ("", name.lower(), name.partition("-")[0].lower()):
            return LINKS[name]
    raise CompileError(f"{device} comes with {' or '.join(INSIDE[device])}, not with {wanted!r}")


def canonical_device(text: str) -> str | None:
    """A device's full name, however it is spelled: `rtx 4090`, `A100`; None for an unknown one."""
    wanted = re.sub(r"[\s_-]+", "-", text.strip()).lower().removeprefix("nvidia-").removeprefix("geforce-")
    return {name.lower(): full for name, full in (*zip(INSIDE, INSIDE, strict=True), *ALIASES.items())}.get(wanted)
