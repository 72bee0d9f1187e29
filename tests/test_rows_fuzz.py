"""Random small networks over random patches: what they predict is what one device predicts."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.errors import CompileError
from passes.rows import RowPlan
from passes.rows.how import Window
from tests.row_nets import LAYERS, RowNet
from tests.row_programs import row_programs

NAMES = st.lists(st.sampled_from([*LAYERS, "save", "add"]), min_size=1, max_size=7)


BESIDE = {
    "bilinear": "halo 1 above, 1 below",
    "bilinear 4, 3": "halo 1 above, 1 below",
    "bilinear half": "",
    "bilinear third": "",
    "bilinear 2.05": "its rows lie between others than a patch's would",
    "bilinear 3": "its rows lie between others than a patch's would",
    "neighbours": "halo 2 above, 2 below",
    "unfolded": "halo 0 above, 0 below",
    "transposed 4": "halo 1 above, 1 below",
    "nearest 2": "",
}  # what a layer needs beside a patch's own rows, or why all


def check(names: list[str], height: int, width: int, seed: int) -> RowPlan | None:
    torch.manual_seed(seed)
    net = RowNet(names, height, width).eval()
    if not net.layers:
        return None
    example = net.example(height, width)
    with torch.no_grad():
        wanted = net(**example)
    programs = row_programs(net, example, 1, sample={"x": 2})
    count, choose = programs.rows.units.count, random.Random(seed)
    for num_patches in {2, min(4, count)} if count > 1 else ():
        bounds = (0, *sorted(choose.sample(range(1, count), num_patches - 1)), count)
        try:
            patched = programs.cut(bounds)
        except CompileError as refusal:
            if "at the image's border" not in str(refusal):  # a patch too small to be reflected
                raise
            continue
        for found in patched.predict(**example):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10 * float(wanted.abs().max()))
    return programs.rows


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer(name: str) -> None:
    rows = check(["conv3", name, "conv3"], 12, 8, 0)
    if name in BESIDE:
        assert rows is not None
        halos = [str(one.how) for one in rows.found.values() if isinstance(one.how, Window)]
        beside = [note.why for note in rows.notes] or halos[1:-1] or [""]
        assert beside == [BESIDE[name]]


@settings(max_examples=15)
@given(NAMES, st.integers(5, 21), st.integers(4, 9), st.integers(0, 1000))
def test_random_networks(names: list[str], height: int, width: int, seed: int) -> None:
    check(names, height, width, seed)
