"""inventory.yaml is checked whole; an error names file, line and cure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_ops.errors import ConfigurationError, UsageError
from dflash_ops.inventory.load import load_inventory
from dflash_ops.inventory.models import Inventory
from tests.ops.inventory.written import GOOD, load, refused


def test_the_project_s_own_inventory_is_valid() -> None:
    inventory = load_inventory(Path(__file__).parents[3] / "inventory.yaml")
    assert inventory.container(None)[0] == "lab"
    gpus = inventory.jobs["qwen3-8b.example"].gpus
    assert gpus is not None
    assert (gpus.target, gpus.drafters) == ([0, 1, 2, 3, 4], [5, 6, 7])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("    address: pve1.example", "    adress: pve1.example", "/inventory.yaml:3: unknown key `hosts.pve1.adress`"),
        ("    address: pve1.example", "    adress: pve1.example", "did you mean `address`?"),
        ("    host: pve1\n", "    host: pve2\n", "/inventory.yaml:6: there is no host `pve2` (did you mean `pve1`?)"),
        ("container: 200", "container: 99", "/inventory.yaml:7: `containers.main.container`"),
        ("container: 200", "container: '200; reboot'", "/inventory.yaml:7: `containers.main.container`"),
        (
            "    container: 200\n",
            "",
            "/inventory.yaml:5: `containers.main`: a container needs its number, `container: <vmid>`",
        ),
        ("    container: 200", "    container: 200\n    root: /a/../b", ":8: `containers.main.root`"),
        ("    container: 200", "    container: 200\n    root: /a b", ":8: `containers.main.root`"),
        ("    container: 200", "    container: 200\n    root: '/a$b'", ":8: `containers.main.root`"),
        ("    container: 200", "    container: 200\n    enter: ssh", ":8: `containers.main.enter`"),
        ("    container: 200", "    container: 200\n    container: 201", ":8: the key `container` stands twice"),
        ("  smoke:\n", "  smoke:\n    environment: vnev\n", ":13: there is no environment `vnev`"),
        ("  smoke:\n", "  smoke:\n    containers: [main,\n      mian]\n", ":14: there is no container `mian`"),
        ("  smoke:\n", "  smoke:\n    containers: []\n", ":13: `jobs.smoke.containers`"),
        ("  smoke:\n", "  smoke:\n    env: {A B: x}\n", ":13: `jobs.smoke.env.A B`"),
        ("  smoke:\n", "  smoke:\n    gpus: {target: 0-x}\n", '"0-4"'),
        ("  smoke:\n", "  smoke:\n    gpus: {targets: 0}\n", "did you mean `target`?"),
        ("  smoke:\n    config: {target: {path: /srv/model}}\n", "  smoke: {}\n", "the key `config` is missing"),
        ("  smoke:\n", "  smoke:\n    gpus: {target: 7-5}\n", "'7-5' runs backwards"),
        ("  smoke:\n", "  smoke:\n    gpus: {target: [-1]}\n", "'-1' names no GPUs"),
        ("  smoke:\n", "  smoke:\n    gpus: {target: [0x1]}\n", ":13: `jobs.smoke.gpus.target`: '0x1' names no GPUs"),
        ("  smoke:\n", "  smoke:\n    gpus: {target: true}\n", ":13: `jobs.smoke.gpus.target`: 'true' names no GPUs"),
        ("  smoke:\n", "  smoke:\n    watchdog: true\n", ":13: `jobs.smoke.watchdog`: a number must stand here"),
        ("  smoke:\n", "  smoke:\n    timeout: .inf\n", ":13: `jobs.smoke.timeout`: .inf is not a finite number"),
        ("  smoke:\n", "  smoke:\n    set: {lr: 1e999}\n", ":13: `jobs.smoke.set.lr`: 1e999 is not a finite number"),
        (
            "  smoke:\n",
            "  smoke:\n    env: {A: }\n",
            ":13: `jobs.smoke.env`: A has no value; write '' to mean an empty",
        ),
        (
            "container: 200",
            "container: 3:20",
            ":7: `containers.main.container`: a container's number is written in dec",
        ),
        (
            "container: 200",
            "container: 0xC8",
            ":7: `containers.main.container`: a container's number is written in dec",
        ),
        (
            "container: 200",
            "container: 2_00",
            ":7: `containers.main.container`: a container's number is written in dec",
        ),
        (
            "container: 200",
            "container: true",
            ":7: `containers.main.container`: a container's number is written in dec",
        ),
        ("pve1.example", "a\n    port: true", ":4: `hosts.pve1.port`: a number must stand here, not true or false"),
        ("  smoke:\n", "  smoke:\n    gpus: {target: '0-2,1'}\n", "a GPU is named twice"),
        ("pve1.example", "-oProxyCommand=x", ":3: `hosts.pve1.address`"),
        ("pve1.example", '"a;b"', ":3: `hosts.pve1.address`"),
        ("pve1.example", '"a\\n*"', ":3: `hosts.pve1.address`"),
        ("pve1.example", "a\n    user: x y", ":4: `hosts.pve1.user`"),
        ("containers:\n", "containers: [\n", ":"),
        ("hosts:\n", "path: /x\nhosts:\n", ":1: unknown key `path`"),
        ("hosts:\n", "default_container: mian\nhosts:\n", ":1: there is no container `mian` (did you mean `main`?)"),
        ("/opt/venv/bin/python", '"/opt/a\\nb"', "a path of one line"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_cure(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    assert said in refused(tmp_path, GOOD.replace(old, new))


@pytest.mark.parametrize(
    ("text", "line", "cure"),
    [
        ("containers:\n\tmain: {host: local}\n", 2, "spaces instead of the tab"),
        (
            "containers:\n    main: {host: local}\n  other: {host: local}\n",
            3,
            "indent with spaces, like the line above",
        ),
        ("containers\n  main: {host: local}\n", 2, "look at the line above too: is a colon missing"),
        ("default_job\ntargets: {}\n", 2, "look at the line above too: is a colon missing"),
        ("containers: {]\n", 1, "correct the YAML there"),
    ],
)
def test_a_slip_in_the_yaml_has_its_cure(tmp_path: Path, text: str, line: int, cure: str) -> None:
    said = refused(tmp_path, text)
    assert said.startswith(f"/inventory.yaml:{line}: ")
    assert cure in said


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"- a\n",
        b"just text",
        b"\xff\xfe\x00",
        b"a: &x [*x]\ntargets: {}",
        b"containers: !!python/object/apply:os.system [id]\n",
        b"a: {" * 2000,
        b"a: &a [x]\n"
        + b"".join(b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(9)),
        b"x" * (1 << 20) + b"yy",
    ],
    ids=["empty", "list", "text", "binary", "loop", "object", "deep", "laughs", "huge"],
)
def test_hostile_or_senseless_files_are_refused_in_one_sentence(tmp_path: Path, text: bytes) -> None:
    assert refused(tmp_path, text)


def read(folder: Path, text: str) -> Inventory:
    load(folder, text)
    return load_inventory(folder / "inventory.yaml")


@pytest.mark.parametrize(
    "typed",
    ["0755", "12:30:00", "3.10", "no", "on", "1_000", "0x1F", ".inf", "1e-4", "null", "~", "true", "2026-11-30", "+1"],
)
def test_a_variable_is_the_text_that_stands_there(tmp_path: Path, typed: str) -> None:
    inventory = read(tmp_path, GOOD + f"    env:\n      A: {typed}\n      B: '{typed}'\n")
    assert inventory.jobs["smoke"].env == {"A": typed, "B": typed}


def test_variables_that_are_merged_or_repeated_are_text_as_well(tmp_path: Path) -> None:
    jobs = "    env: &env {A: 0755, B: &no no}\n  other:\n    config: {x: *no}\n    env: {<<: *env, C: *no}\n"
    inventory = read(tmp_path, GOOD + jobs)
    assert inventory.jobs["other"].env == {"A": "0755", "B": "no", "C": "no"}


def test_a_value_that_stands_in_env_and_in_the_configuration_is_text_only_in_env(tmp_path: Path) -> None:
    jobs = "    env: {A: &seed 010}\n    set: {seed: *seed}\n"
    job = read(tmp_path, GOOD + jobs).jobs["smoke"]
    assert (job.env, job.set) == ({"A": "010"}, {"seed": 10})


@pytest.mark.parametrize(
    ("typed", "indices"),
    [("010", [10]), ("0-2", [0, 1, 2]), ("[0, 08]", [0, 8]), ("[0-2, 5]", [0, 1, 2, 5]), ("0,2", [0, 2]), ("7", [7])],
)
def test_gpus_are_decimal(tmp_path: Path, typed: str, indices: list[int]) -> None:
    gpus = read(
        tmp_path, GOOD + f"    gpus: {{target: {typed if ',' not in typed or '[' in typed else repr(typed)}}}\n"
    )
    roles = gpus.jobs["smoke"].gpus
    assert roles is not None
    assert roles.target == indices


@pytest.mark.parametrize(("typed", "number"), [("0310", 310), ("0200", 200), ("'200'", 200)])
def test_a_container_s_number_is_decimal(tmp_path: Path, typed: str, number: int) -> None:
    assert read(tmp_path, GOOD.replace("container: 200", f"container: {typed}")).containers["main"].container == number


def test_a_version_of_python_is_the_text_that_stands_there(tmp_path: Path) -> None:
    text = GOOD.replace("python: /opt/venv/bin/python", "python: 3.10\n    lock: x.txt")
    assert read(tmp_path, text).environments["venv"].python == "3.10"


def test_reading_an_inventory_loads_none_of_the_trainer_s_models() -> None:
    code = "import sys, dflash_ops.inventory.load; print([name for name in sys.modules if name.startswith('trainer.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['trainer.core_schema']\n"


def test_without_a_file_the_ways_to_name_one_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DFLASH_INVENTORY", raising=False)
    with pytest.raises(ConfigurationError) as caught:
        load_inventory()
    assert "inventory.yaml" in caught.value.message
    assert "DFLASH_INVENTORY" in caught.value.hint


def test_the_variable_names_the_file_and_the_option_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(GOOD)
    second.write_text(GOOD.replace("main", "other"))
    monkeypatch.setenv("DFLASH_INVENTORY", str(first))
    assert load_inventory().container(None)[0] == "main"
    assert load_inventory(second).container(None)[0] == "other"


def test_an_inventory_without_any_is_told_where_to_add_one(tmp_path: Path) -> None:
    (tmp_path / "inventory.yaml").write_text("containers: {}")
    inventory = load_inventory(tmp_path / "inventory.yaml")
    for choose, what in (
        (inventory.container, "container"),
        (inventory.job, "job"),
        (inventory.environment, "environment"),
    ):
        with pytest.raises(UsageError, match=f"no {what}s") as caught:
            choose(None)
        assert caught.value.hint == f"add one under `{what}s:` of {inventory.path}"


def test_what_is_not_said_is_asked_for_when_there_are_several(tmp_path: Path) -> None:
    text = GOOD + "  other:\n    config: {}\n"
    load(tmp_path, text)
    inventory = load_inventory(tmp_path / "inventory.yaml")
    with pytest.raises(UsageError, match="2 jobs"):
        inventory.job(None)
    with pytest.raises(UsageError, match="no job 'nosuch'"):
        inventory.job("nosuch")
    assert inventory.job("other")[0] == "other"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("containers:\n", "targets:\n", ":4: `targets` is now spelled `containers` (write `containers:` there)"),
        ("hosts:\n", "default_target: main\nhosts:\n", ":1: `default_target` is now spelled `default_container`"),
        ("  smoke:\n", "  smoke:\n    targets: [main]\n", ": `jobs.smoke.targets` is now spelled `containers`"),
    ],
)
def test_an_inventory_of_the_old_spelling_is_told_the_new_one(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in refused(tmp_path, GOOD.replace(old, new, 1))
