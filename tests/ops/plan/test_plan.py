"""A launch is planned without a connection."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.errors import UsageError
from dflash_ops.inventory.load import load_inventory
from dflash_ops.inventory.models import Inventory, JobEntry
from dflash_ops.plan.plan import LaunchOptions, automatic_name, needs_gpus
from dflash_ops.run.record import RUN_NAME
from dflash_ops.verbs.launch import execute, launch
from tests.ops.jobs import INVENTORY, planned, session, snapshot


def test_gpus_of_the_job_become_the_pipeline_s_devices_and_the_spec_s_roles(inventory: Inventory) -> None:
    asked = planned(inventory, job="eight")
    assert asked.config["pipeline"]["targets"] == [f"cuda:{index}" for index in range(5)]
    assert asked.config["pipeline"]["drafters"] == ["cuda:5", "cuda:6", "cuda:7"]
    assert asked.spec["gpus"] == {"target": [0, 1, 2, 3, 4], "drafters": [5, 6, 7]}
    fewer = planned(inventory, "pipeline.drafters=[cuda:5]", job="eight")
    assert fewer.spec["gpus"]["drafters"] == [5]


def test_a_run_on_cpu_holds_no_gpu(inventory: Inventory) -> None:
    assert planned(inventory).spec["gpus"] == {"target": [], "drafters": []}


@given(job=st.text(max_size=80))
def test_automatic_names_are_run_names(job: str) -> None:
    assert RUN_NAME.match(automatic_name(job))


def test_a_job_runs_only_where_it_may(inventory: Inventory) -> None:
    text = INVENTORY.replace("here: {host: local}", "here: {host: local}\n  there: {host: local}")
    inventory.path.write_text(text.replace("  smoke:\n", "  smoke:\n    containers: [there]\n"))
    with pytest.raises(UsageError, match="the job smoke may not run on here") as caught:
        planned(load_inventory(inventory.path))
    assert "--container there" in caught.value.hint
    assert planned(load_inventory(inventory.path), job="eight").spec["container"] == "here"


def test_only_our_own_trainer_s_numbers_are_those_of_gpus(inventory: Inventory) -> None:
    assert not planned(inventory, job="eight").needs_gpus  # it has a source of its own
    opened, transport = session(inventory, launch=[{"reached": "started", "snapshot": snapshot()}])
    launch(opened, LaunchOptions("eight", "r1"))
    assert transport.calls[0].request["gpus"] == []
    opened, transport = session(inventory, launch=[{"reached": "started", "snapshot": snapshot()}])
    execute(opened, replace(planned(inventory, job="eight"), needs_gpus=True))
    assert transport.calls[0].request["gpus"] == list(range(8))
    assert needs_gpus(JobEntry(config={}))
    assert not needs_gpus(JobEntry(config={}, env={"CUDA_VISIBLE_DEVICES": "3"}))


def test_another_trainer_has_a_watchdog_only_where_its_job_says_so(inventory: Inventory) -> None:
    """One that never speaks to it would be aborted though it is well."""
    assert planned(inventory, job="eight").spec["watchdog"] is None
    assert not any("Watchdog" in word for word in planned(inventory, job="eight").argv)
    jobs = {**inventory.jobs, "eight": inventory.jobs["eight"].model_copy(update={"watchdog": 900})}
    told = inventory.model_copy(update={"jobs": jobs})
    assert planned(told, job="eight").spec["watchdog"] == 900
    ours = inventory.model_copy(
        update={"jobs": {**jobs, "ours": JobEntry(config={"target": {"path": "t"}, "data": {"sources": ["s"]}})}}
    )
    assert planned(ours, job="ours").spec["watchdog"] == 3600
