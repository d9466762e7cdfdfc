"""Racks and spare nodes: the choice of labels, and a simulated cluster that loses a node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.errors import RuntimeMissing
from miles_core.types import RoleSpec
from miles_ray_launcher.places import seat
from miles_ray_launcher.racks import idle_nodes, label_choices, racks_of


def node(name: str, rack: str | None, gpus: float, free: float | None = None) -> dict:
    total = {"GPU": gpus, "CPU": 1.0}
    labels = {"rack": rack} if rack else {}
    return {"id": name, "total": total, "free": {**total, "GPU": gpus if free is None else free}, "labels": labels}


def test_engines_go_round_the_racks_and_ranks_stay_in_one():
    specs = [RoleSpec(name="trainer", component="x", num_workers=2), RoleSpec(name="engine", component="x", num_workers=3)]
    bundles, _ = seat(specs)
    choices = [[labels["rack"] for labels in choice] for choice in label_choices(bundles, "rack", ["a", "b"])]
    # each rack in turn as the trainer's; the first engine next door, so that the trainer's rack serves last
    assert choices == [["a", "a", "b", "a", "b"], ["b", "b", "a", "b", "a"]]


def test_what_shares_gpus_with_the_trainer_stays_with_it_and_own_labels_count_first():
    specs = [RoleSpec(name=name, component="x", gpus=1) for name in ("trainer", "engine")]
    bundles, _ = seat(specs, "colocated")
    assert label_choices(bundles, "rack", ["a", "b"]) == [[{"rack": "a"}], [{"rack": "b"}]]
    bundles, _ = seat([RoleSpec(name="engine", component="x", labels={"rack": "c", "gpu": "h200"})])
    assert label_choices(bundles, "rack", ["a"]) == [[{"rack": "c", "gpu": "h200"}]]
    assert label_choices(bundles, "", []) == [[{"rack": "c", "gpu": "h200"}]]


def test_the_rack_with_the_most_free_gpus_comes_first():
    nodes = [node("1", "a", 8, free=1), node("2", "b", 4), node("3", "b", 4), node("4", None, 64)]
    assert racks_of(nodes, "rack") == ["b", "a"]
    with pytest.raises(RuntimeMissing, match=r'label "row" \(launcher\.ray\.rack_label\); there are: rack'):
        racks_of(nodes, "row")


def test_spares_are_whole_nodes_that_can_take_a_bundle_from_different_racks():
    nodes = [
        node("taken", "a", 8), node("busy", "a", 8, free=7), node("small", "b", 2), node("a1", "a", 8), node("a2", "a", 8),
        node("b1", "b", 8), {**node("head", None, 0), "total": {}, "free": {}},
    ]  # fmt: skip
    assert [n["id"] for n in idle_nodes(nodes, ["taken"], 2, label="rack", gpus=4)] == ["a1", "b1"]
    with pytest.raises(RuntimeMissing, match="num_spares = 4, and beside what the run needs only 3 of 7 nodes"):
        idle_nodes(nodes, ["taken"], 4, label="rack", gpus=4)


def test_X1_a_lost_node_of_a_simulated_cluster_is_replaced_by_the_spare(ray_here, tmp_path):
    env = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    program = Path(__file__).with_name("simulated.py")
    result = subprocess.run(
        [sys.executable, program, tmp_path], env={**os.environ, **env}, capture_output=True, text=True, timeout=200
    )
    assert "FOUND" in result.stdout, result.stderr[-3000:]
    seen = json.loads(result.stdout.partition("FOUND ")[2].splitlines()[0])
    # both ranks on one node, the engines in both racks; the trainer's rack is whichever Ray listed with more room
    assert len(set(seen["trainer"])) == 1
    assert {name[0] for name in seen["engine"]} == {"a", "b"}
    assert "asked for more 1 x (2 GPUs)" in seen["spare is held"]
    role, index, cause = seen["death"]
    assert (role, index) == ("engine", seen["lost"]) and cause.endswith("its node is gone")
    assert seen["after"][index][0] == seen["engine"][index][0]  # another node of the same rack
    assert seen["after"][index] != seen["engine"][index]
    assert (seen["after"][1 - index], seen["trainer after"]) == (seen["engine"][1 - index], seen["trainer"])
