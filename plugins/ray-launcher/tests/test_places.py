"""Which workers share a bundle, and what Ray counts for them. No cluster is needed."""

from __future__ import annotations

import pytest

from miles_core.errors import ConfigError, ContractError, RuntimeMissing
from miles_core.types import RoleSpec
from miles_ray_launcher.places import CPU_SHARE, describe, seat


def spec(name: str, num_workers: int, gpus: float, **more) -> RoleSpec:
    return RoleSpec(name=name, component="x", num_workers=num_workers, gpus=gpus, **more)


SEATS = [
    # what, specs, placement, GPUs of the bundles, (bundle, GPUs counted, slice) of each worker in order
    ("processors", [spec("t", 2, 0)], "auto", [0, 0], [(0, 0, None), (1, 0, None)]),
    ("own", [spec("t", 2, 1), spec("e", 1, 2)], "auto", [1, 1, 2], [(0, 1, None), (1, 1, None), (2, 2, None)]),
    # four quarters of one GPU, and a fifth of the next
    ("quarters", [spec("r", 5, 0.25)], "disaggregated", [1, 1], [*[(0, 0.25, None)] * 4, (1, 0.25, None)]),
    # one worker of each role on each GPU: halves
    (
        "shared",
        [spec("t", 2, 1), spec("e", 2, 1)],
        "colocated",
        [1, 1],
        [(0, 0.5, None), (1, 0.5, None), (0, 0.5, None), (1, 0.5, None)],
    ),
    # an engine over two GPUs on those of two ranks: three workers in a bundle, so thirds, rounded down to Ray's 1e-4
    (
        "wide",
        [spec("t", 4, 1), spec("e", 2, 2)],
        "colocated",
        [2, 2],
        [
            *[(b, 0.3333, (i, i + 1)) for b in (0, 1) for i in (0, 1)],
            *[(b, 0.3333, (0, 2)) for b in (0, 1)],
        ],
    ),
    # "colocate" shares with one role alone
    (
        "beside",
        [spec("t", 1, 1), spec("j", 1, 1, colocate="t"), spec("e", 1, 1)],
        "auto",
        [1, 1],
        [(0, 0.5, None), (0, 0.5, None), (1, 1, None)],
    ),
    # more engines than ranks: the third has a GPU to itself, but counts as the only one there
    (
        "uneven",
        [spec("t", 1, 1), spec("e", 2, 1)],
        "colocated",
        [1, 1],
        [(0, 0.5, None), (0, 0.5, None), (1, 1.0, None)],
    ),
    # GPUs are shared, workers without any are not
    ("mixed", [spec("t", 1, 1), spec("r", 1, 0)], "colocated", [1, 0], [(0, 1, None), (1, 0, None)]),
]


@pytest.mark.parametrize(("specs", "placement", "gpus", "want"), [s[1:] for s in SEATS], ids=[s[0] for s in SEATS])
def test_seats(specs, placement, gpus, want):
    bundles, places = seat(specs, placement)
    assert [bundle.gpus for bundle in bundles] == gpus
    got = [places[s.name, index] for s in specs for index in range(s.num_workers)]
    assert [(p.bundle, p.gpus, p.slice) for p in got] == want


def test_what_workers_count_fits_into_their_bundle():
    specs = [spec("t", 4, 1), spec("e", 2, 2), spec("r", 3, 0.25)]
    bundles, places = seat(specs, "colocated")
    for number, bundle in enumerate(bundles):
        inside = [place for place in places.values() if place.bundle == number]
        assert sum(place.gpus for place in inside) <= 1  # equal fractions of one GPU
        assert sum(place.cpus for place in inside) == pytest.approx(bundle.resources()["CPU"])


def test_processors_and_memory_that_were_asked_for_are_counted_and_one_processor_is_shared():
    (one, two), _ = seat([spec("t", 1, 0), spec("e", 1, 1, cpus=4, memory_bytes=10**9)])
    assert one.resources() == {"CPU": CPU_SHARE}
    assert two.resources() == {"CPU": 4.0, "GPU": 1.0, "memory": 1e9}


@pytest.mark.parametrize(
    ("specs", "placement", "error", "text"),
    [
        ([spec("t", 1, 1)], "here", ConfigError, 'launcher.placement = "here"'),
        ([spec("t", 1, 1), spec("t", 1, 1)], "auto", ContractError, "the same name"),
        ([spec("t", 1, 1, colocate="e")], "auto", ContractError, '"e", which is not among'),
        ([spec("t", 1, 1.5)], "auto", ContractError, "must be whole"),
        ([spec("e", 1, 8, nodes=2)], "auto", RuntimeMissing, "span 2 nodes"),
        (
            [spec("t", 1, 1, labels={"rack": "a"}), spec("e", 1, 1, labels={"rack": "b"})],
            "colocated",
            ConfigError,
            "rack = b",
        ),
    ],
)
def test_demands_that_make_no_sense_are_refused(specs, placement, error, text):
    with pytest.raises(error, match=text):
        seat(specs, placement)


def test_a_demand_is_described_by_role():
    text = describe([spec("trainer", 4, 1), spec("engine", 2, 2, memory_bytes=10**9), spec("r", 1, 0)])
    assert text == "trainer 4 x (1 GPUs); engine 2 x (2 GPUs, 1 GB); r 1 x (1 processors)"
