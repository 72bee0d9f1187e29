"""fxpipe's own plans for sampling beside the best published way on the same devices, both by the same estimate.

    python benchmarks/sampling_plans.py                      SDXL on A100s over NVLink, PixArt on PCIe: minutes
    python benchmarks/sampling_plans.py --models PixArt

Devices, calls and published ways are those of `sampling_published.py`. A plan is what `compile_sampler` chooses where
all is left open: of exact layouts, and with `mode="displaced"`, in which an exact one wins ties of 5 %.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.sampling_published import NVLINK, PCIE, PIXART, SDXL, Row, pixart, pixart_rows, sdxl, sdxl_rows, traced
from fxpipe.cluster import Cluster
from fxpipe.plan.sample_plan import EXACT, How
from fxpipe.sampling.candidates import Setting
from fxpipe.sampling.case import SampleCase
from fxpipe.sampling.choosing import ranked
from fxpipe.sampling.planning import SampleRequest

_HOWS = {"exact": EXACT, "displaced": How("displaced", 4, "corrected", True)}


@dataclass(frozen=True)
class Own:
    """A plan of fxpipe's and the best published way; seconds of a call."""

    mode: str
    plan: str
    seconds: float
    best: Row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["SDXL", "PixArt"], choices=["SDXL", "PixArt"])
    options = parser.parse_args()
    table = Table(title="seconds of a call", title_justify="left")
    for column in ("model", "side", "best published way", "estimated", "mode", "fxpipe's plan", "estimated", "longer"):
        table.add_column(column, justify="right" if column in ("side", "estimated", "longer") else "left")
    for own in (
        *(sdxl_plans() if "SDXL" in options.models else ()),
        *(pixart_plans() if "PixArt" in options.models else ()),
    ):
        best = own.best
        told = f"{best.way}: {best.published:.3g}", f"{best.estimated:.3g}", own.mode, own.plan, f"{own.seconds:.3g}"
        table.add_row(best.model, str(best.side), *told, f"{best.estimated / own.seconds:.2f}x")
    Console(width=150).print(table)


def sdxl_plans() -> Iterator[Own]:
    """Against displaced rows, the only published way there."""
    for side in SDXL:
        case = traced(sdxl(side))
        for ranks, row in zip(SDXL[side], sdxl_rows(side), strict=True):
            if ranks > 1:
                yield from _plans(case, f"{ranks}x{NVLINK.partition('x')[2]}", ranks, 50, row)


def pixart_plans() -> Iterator[Own]:
    for side in PIXART:
        best = min(pixart_rows(side), key=lambda row: row.published)
        yield from _plans(traced(pixart(side)), PCIE, 4, 20, best)


def _plans(case: SampleCase, cluster: str, ranks: int, steps: int, best: Row) -> Iterator[Own]:
    for mode, how in _HOWS.items():
        request = SampleRequest(ranks, None, None, None, None, how)
        found = ranked(case, request, Setting(Cluster.parse(cluster), steps)).best
        yield Own(mode, str(found), found.seconds, best)


if __name__ == "__main__":
    main()
