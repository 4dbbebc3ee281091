"""`dflash init` writes down what it found, and asks or refuses where there is more than one possibility."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_ops.errors import DflashError, UsageError
from dflash_ops.inventory.load import load_inventory
from dflash_ops.remote import init as remote_init
from dflash_ops.remote.process import Completed
from dflash_ops.show.choose import ByPerson
from dflash_ops.transport.base import NoPython, NotPermitted, Unreachable
from dflash_ops.transport.fake import FakeTransport
from dflash_ops.verbs import init as verb
from dflash_ops.verbs.candidates import Initialized
from dflash_ops.verbs.doctor import Diagnosis, Line
from dflash_ops.verbs.init import ByOptions, InitOptions

TORCH = {"path": "/opt/venv/bin/python", "version": "3.11.7", "torch": "2.13.0+cu128", "cuda": "12.8"}
PLAIN = {"path": "/usr/bin/python3", "version": "3.11.2", "torch": None, "cuda": None}
OLD = {"path": "/opt/old/bin/python", "version": "3.9.2", "torch": "2.1.0", "cuda": None}
NONE = {"fields": [], "command": {"state": "missing"}, "nodes": []}


def row(vmid: int, status: str = "running", **config: str) -> dict[str, Any]:
    return {"vmid": vmid, "status": status, "lock": "", "name": f"ct{vmid}", "config": config}


def node(*rows: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"user": 0, "pct": True, "error": "", "containers": list(rows), **fields}


def inside(*pythons: dict[str, Any]) -> dict[str, Any]:
    return {"gpu": NONE, "pythons": list(pythons), "free": 5 << 30, "cpus": 16}


class Way:
    """Everything that init reaches is answered from a script."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / "inventory.yaml"
        self.said: list[str] = []
        self.transport = FakeTransport({})
        self.level = "ok"
        monkeypatch.setattr(verb, "FramedTransport", lambda *_: self.transport)
        monkeypatch.setattr(verb, "trust", lambda *_: None)
        monkeypatch.setattr(verb, "doctor", self.doctor)

    def doctor(self, session: Any, environment: str | None) -> Diagnosis:
        line = Line(topic="environment", level=self.level, text=str(environment))  # type: ignore[arg-type]
        return Diagnosis(container=session.container_name, lines=(line,))

    def __call__(self, *answers: Any, host: str = "pve1.example.org", ask: Any = None, **options: Any) -> Initialized:
        self.transport.script = {"init": list(answers)}
        chooser = ask or ByOptions(lambda key: False)
        written = verb.init(self.path, InitOptions(host, **options), chooser, self.said.append)
        return verb.diagnosed(written, self.said.append)


@pytest.fixture
def way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Way:
    return Way(tmp_path, monkeypatch)


def test_the_only_container_and_the_only_python_with_torch_are_written_down(way: Way) -> None:
    answer = way(node(row(200), row(201, "stopped")), inside(PLAIN, TORCH, OLD), host="me@pve1.example.org:2200")
    assert answer.added == ("hosts.pve1", "containers.ct200", "environments.ct200")
    written = load_inventory(way.path)
    assert written.hosts["pve1"].model_dump(exclude_defaults=True) == {
        "address": "pve1.example.org", "user": "me", "port": 2200,
    }  # fmt: skip
    assert written.container(None) == ("ct200", written.containers["ct200"])
    assert written.environments["ct200"].python == "/opt/venv/bin/python"
    assert "3.11.7, torch 2.13.0+cu128 (CUDA 12.8)" in way.path.read_text()
    assert [each.lines[0].text for each in answer.doctor] == ["ct200"]


def test_a_stopped_container_is_not_entered_and_says_so(way: Way) -> None:
    gpus = {"dev0": "/dev/nvidia0", "dev1": "/dev/nvidia1,mode=0666", "dev2": "/dev/nvidiactl"}
    answer = way(node(row(200), row(201, "stopped", **gpus)), inside(TORCH))
    assert (answer.found[1].about(), answer.found[1].gpus_given) == ("it is stopped, 2 GPUs in its configuration", 2)
    assert len(way.transport.calls) == 2


def test_a_container_that_cannot_be_entered_hides_no_other(way: Way) -> None:
    answer = way(node(row(200), row(300)), Unreachable("container 200 is frozen"), inside())
    assert answer.containers == ("ct300",)
    assert answer.found[0].about() == "container 200 is frozen"


def test_several_containers_are_listed_and_none_is_taken(way: Way) -> None:
    with pytest.raises(UsageError, match=r"has 2 containers: 200 \(ct200, no GPU, 16 CPUs\), 300") as caught:
        way(node(row(200), row(300)), inside(), inside())
    assert caught.value.hint == "say which by --container NUMBER"
    assert not way.path.exists()


def test_several_pythons_with_torch_are_listed_and_none_is_taken(way: Way) -> None:
    other = {**TORCH, "path": "/srv/venv/bin/python"}
    with pytest.raises(UsageError, match=r"2 pythons with torch: /opt/venv/bin/python .*, /srv/venv"):
        way(node(row(200)), inside(TORCH, other))
    answer = way(node(row(200)), inside(TORCH, other), python="/srv/venv/bin/python", containers=("200",))
    assert load_inventory(way.path).environments["ct200"].python == "/srv/venv/bin/python"
    assert answer.added[-1] == "environments.ct200"


def test_a_python_that_is_no_path_is_refused_before_anything_is_asked(way: Way) -> None:
    with pytest.raises(UsageError, match="is no path of a container"):
        way(python="python3")


def test_containers_are_chosen_by_number_or_name_and_a_wrong_one_is_named(way: Way) -> None:
    answer = way(node(row(200), row(300)), inside(TORCH), inside(TORCH), containers=("200", "ct300"))
    assert answer.containers == ("ct200", "ct300")
    assert way.transport.calls[0].request["containers"] == ["200", "ct300"]
    assert list(load_inventory(way.path).environments) == ["ct200"]  # both have the same path
    with pytest.raises(UsageError, match="there is no container ct9 on pve1"):
        way(node(), containers=("ct9",))


@pytest.mark.parametrize(
    ("answer", "words", "code"),
    [
        (NoPython("none"), "has no python3 to list", 78),
        (node(pct=False), "there is no /usr/sbin/pct on pve1", 78),
        (node(user=1000, error="sudo: a password is required"), "may not list the containers", 77),
        (node(error="cluster not ready"), "`pct list` on pve1 said: cluster not ready", 78),
        (node(), "there is no container on pve1", 2),
    ],
)
def test_a_host_that_lists_nothing_is_explained(way: Way, answer: Any, words: str, code: int) -> None:
    with pytest.raises(DflashError, match=words) as caught:
        way(answer)
    assert (caught.value.code, way.path.exists()) == (code, False)
    assert caught.value.hint


@pytest.mark.parametrize("answer", [NoPython("none"), node(user=1000, error="sudo: a password is required")])
def test_a_number_needs_no_list(way: Way, answer: Any) -> None:
    assert way(answer, inside(TORCH), containers=("200",)).containers == ("ct200",)


def test_another_user_than_root_goes_through_sudo(way: Way) -> None:
    way(node(row(200), user=1000), inside(TORCH))
    assert load_inventory(way.path).hosts["pve1"].sudo


def test_what_stands_in_the_inventory_stays_and_is_not_written_twice(way: Way) -> None:
    old = (
        "hosts:\n  mine: {address: pve1.example.org}\ncontainers:\n  first: {host: mine, container: 100}\n"
        "environments:\n  e: {python: /e}\njobs:\n  j: {config: {a: 1}}\n"
    )
    way.path.write_text(old)
    answer = way(node(row(100), row(200)), inside(TORCH), inside(TORCH), containers=("100", "200"))
    assert answer.host == "mine"
    assert (answer.containers, answer.added) == (("first", "ct200"), ("containers.ct200",))
    written = load_inventory(way.path)
    assert written.container(None)[0] == "first"  # it was the only one, and is the default still
    assert written.environment(None)[0] == "e"  # the job has no other
    assert "  # first:  " in way.path.read_text()
    assert any("is a comment" in line for line in way.said)
    text = way.path.read_text()
    again = way(node(row(200)), inside(TORCH), containers=("200",))
    assert (again.added, way.path.read_text()) == ((), text)


def test_names_that_are_taken_get_a_number(way: Way) -> None:
    way.path.write_text("hosts:\n  pve1: {address: other}\ncontainers:\n  ct200: {host: pve1, container: 200}\n")
    answer = way(node(row(200)), inside(TORCH))
    assert answer.added == ("hosts.pve1-2", "containers.ct200-2", "environments.ct200-2")


def test_a_host_that_is_known_takes_no_new_key(way: Way, tmp_path: Path) -> None:
    way.path.write_text("hosts:\n  pve1: {address: a}\ncontainers: {}\n")
    with pytest.raises(UsageError, match="has the host pve1 already"):
        way(host="pve1", identity=tmp_path / "key")


@pytest.mark.parametrize("host", ["", "two words", "-oProxyCommand=x", "a:b", "me@", "h:99999999", "a:b:c@"])
def test_what_is_no_host_is_refused(way: Way, host: str) -> None:
    with pytest.raises(UsageError, match="is no host"):
        way(host=host)


@pytest.mark.parametrize(
    ("host", "address", "port"),
    [("[fd00::1]:22", "fd00::1", 22), ("fd00::1", "fd00::1", None), ("10.0.0.1", "10.0.0.1", None)],
)
def test_addresses_are_taken_as_ssh_writes_them(way: Way, host: str, address: str, port: int | None) -> None:
    way(node(row(200)), inside(TORCH), host=host)
    (entry,) = load_inventory(way.path).hosts.values()
    assert (entry.address, entry.port) == (address, port)


def test_the_exit_code_is_that_of_the_worst_diagnosis(way: Way) -> None:
    assert verb.exit_code(way(node(row(200)), inside(TORCH))) == 0
    way.level = "fail"
    assert verb.exit_code(way(node(row(200)), inside(TORCH))) == 78


def test_a_person_is_asked_until_the_answer_is_one_of_the_list(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["9", "300, 200", "7", "1", "0"])
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    answer = way(node(row(200), row(300)), inside(TORCH), inside(TORCH), ask=ByPerson(lambda key: True))
    assert answer.containers == ("ct300", "ct200")
    assert load_inventory(way.path).environments["ct300"].python == TORCH["path"]


def test_an_unknown_key_is_offered_for_trust(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(inventory: Any, host: str, ask: Any) -> None:
        assert not ask("a key")
        raise NotPermitted(f"the host key of {inventory.hosts[host].address} is not known")

    monkeypatch.setattr(verb, "trust", refuse)
    with pytest.raises(NotPermitted):
        way(ask=ByOptions(lambda key: False))
    assert not way.path.exists()


# ---- the remote half ----------------------------------------------------------------------------------------------

LISTED = """\
VMID       Status     Lock         Name                
200        running                 train               
201        stopped    backup       with-a-very-long-name-of-more-than-twenty
"""  # noqa: W291


class Quiet:
    def beat(self) -> None:
        pass


def test_the_columns_of_pct_list_are_read_with_and_without_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(argv: list[str], timeout: float) -> Completed:
        assert argv[0] == remote_init.node.PCT
        text = LISTED if argv[1] == "list" else "hostname: x\nlxc.environment: TOKEN=secret\n"
        return Completed(0, text, "", "")

    monkeypatch.setattr(remote_init.os.path, "exists", lambda path: True)
    monkeypatch.setattr(remote_init.os, "geteuid", lambda: 0)
    monkeypatch.setattr(remote_init.process, "call", call)
    found = remote_init.main({"do": "node", "containers": None}, Quiet())  # type: ignore[arg-type]
    assert found["containers"] == [
        {"vmid": "200", "status": "running", "lock": "", "name": "train", "config": {"hostname": "x"}},
        {
            "vmid": "201", "status": "stopped", "lock": "backup",
            "name": "with-a-very-long-name-of-more-than-twenty", "config": {"hostname": "x"},
        },
    ]  # fmt: skip
    only = remote_init.main({"do": "node", "containers": ["train"]}, Quiet())  # type: ignore[arg-type]
    assert [each["vmid"] for each in only["containers"]] == ["200"]


def test_the_torch_of_an_interpreter_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import venv

    venv.create(tmp_path / "team/env", with_pip=False)
    (site,) = (tmp_path / "team/env/lib").glob("*/site-packages")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").write_text("raise SystemExit('imported')")
    (site / "torch/version.py").write_text(
        "from typing import Optional\n__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\n"
    )
    monkeypatch.setattr(remote_init, "_PLACES", (str(tmp_path),))
    found = remote_init.main({"do": "container", "root": str(tmp_path), "python": None}, Quiet())  # type: ignore[arg-type]
    first = found["pythons"][0]
    assert first["path"] == f"{tmp_path}/team/env/bin/python"
    assert (first["torch"], first["cuda"]) == ("2.13.0+cu128", "12.8")
