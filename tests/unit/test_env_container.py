"""What a container is given: its command line and its environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from envclient.base.errors import VenusError
from envclient.node import container
from envclient.node.container import container_argv, environment, hidden_folders
from envclient.types import Template


def pairs(argv: list[str], option: str) -> list[tuple[str, str]]:
    return [(argv[at + 1], argv[at + 2]) for at, word in enumerate(argv) if word == option]


def test_the_environment_is_only_what_the_template_and_we_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VENUS_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET", "secret")
    variables = environment(Template(name="t", env={"PYTHONPATH": "/opt/lib", "LANG": "de_DE.UTF-8"}))
    assert "secret" not in variables.values()
    assert variables["PYTHONPATH"] == "/venus:/opt/lib" and variables["LANG"] == "de_DE.UTF-8"
    argv = container_argv(Template(name="t"), 5, root=True)
    assert "--clearenv" in argv and "secret" not in argv


def test_only_dev_proc_and_private_folders_are_not_read_only(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    argv = container_argv(Template(name="t", mounts=[(str(tmp_path), "/opt/x")]), 5, root=True)
    assert not {"--bind", "--dev-bind", "--bind-try", "--share-net"} & set(argv)
    assert (str(tmp_path), "/opt/x") in pairs(argv, "--ro-bind")
    outside = {path for path, _ in pairs(argv, "--ro-bind") + pairs(argv, "--ro-bind-try")}
    assert not outside & {"/", "/etc", "/root", "/home", "/var", "/etc/shadow", "/etc/passwd"}


@pytest.mark.parametrize(("root", "expected"), [(True, False), (False, True)])
def test_a_user_namespace_only_without_root(root: bool, expected: bool) -> None:
    assert ("--unshare-user" in container_argv(Template(name="t"), 5, root=root)) is expected


def test_a_mount_that_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    for mount in ((f"{tmp_path}/missing", "/opt"), ("relative", "/opt"), (str(tmp_path), "opt")):
        with pytest.raises(VenusError, match="template 't': mount"):
            container_argv(Template(name="t", mounts=[mount]), 5, root=True)


def test_a_mount_that_sandboxes_could_not_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(VenusError, match=f"closed to the unprivileged uids.*chmod -R o.rX {tmp_path}"):
        container_argv(Template(name="t", mounts=[(str(tmp_path), "/opt")]), 5, root=True)


def test_an_interpreter_below_the_workdir_is_bound_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/tmp/clone/.venv")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    assert container.interpreter_folders() == ["/tmp/clone/.venv"]
    template = Template(name="t", workdir="/box", mounts=[("/usr", "/box/lib"), ("/usr", "/boxes"), ("/usr", "/opt")])
    assert hidden_folders(template) == ["/tmp/clone/.venv", "/box/lib"]
