"""Reachability of the workers' ports from other machines and users. Without TensorFlow."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import skip_without_namespaces
from tf_redsync.building import BuildError, libraries
from tf_redsync.cli import isolation, launch

ROOT = Path(__file__).resolve().parents[2]
needs_library = pytest.mark.skipif(
    not isolation.loopback_only()[0], reason=f"{isolation.LIBRARY.name} is not built"
)
# A worker that listens on all interfaces, like TensorFlow's server, and on a second port.
# It then connects to its own addresses, as a peer on another interface would.
SERVER = """
import json, os, socket, sys
own = int(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0].rpartition(":")[2])
found = {}
kinds = [(socket.AF_INET, ""), (socket.AF_INET6, "::")]
for kind, any_address in kinds if os.path.exists("/proc/net/if_inet6") else kinds[:1]:
    for port in (own, 0):
        with socket.socket(kind) as server:
            if kind == socket.AF_INET6:  # dual stack, as in gRPC
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((any_address, port))
            server.listen()
            for address in ("127.0.0.1", "127.0.0.2"):  # the second stands for any local address
                with socket.socket() as client:
                    code = client.connect_ex((address, server.getsockname()[1]))
                found[f"{kind.name} {'own' if port else 'other'} {address}"] = code == 0
found["interfaces"] = [name for _, name in socket.if_nameindex()]
found["user"] = os.getuid()
print(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def run_server(tmp_path, choice) -> tuple[dict, str]:
    """Returns the output of one worker's server, and the launcher's standard error."""
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    command = [sys.executable, "-m", "tf_redsync.launch", "-n", "1", *choice, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "isolate='yes'" in done.stderr:
        skip_without_namespaces()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.removeprefix("[worker 0] ")), done.stderr


def reachability(found, which) -> set[bool]:
    return {ok for key, ok in found.items() if f" {which} 127" in key}


@needs_library
def test_worker_ports_are_local_by_default(tmp_path):
    found, messages = run_server(tmp_path, [])
    for kind in {key.split()[0] for key in found if key.startswith("AF_")}:
        assert found[f"{kind} own 127.0.0.1"] and not found[f"{kind} own 127.0.0.2"]
    assert reachability(found, "other") == {True}, "the launcher must not restrict other ports"
    assert "warning" not in messages


def test_without_isolation_ports_are_reachable(tmp_path):
    """Shows that the other tests here can fail."""
    found, messages = run_server(tmp_path, ["--isolate", "no"])
    assert reachability(found, "own") == reachability(found, "other") == {True}
    assert "warning" not in messages


@needs_library
def test_run_closes_ports_by_default(tmp_path):
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    for arguments, is_open in (({}, False), ({"isolate": "no"}, True)):
        (worker,) = launch.run([sys.executable, str(path)], 1, timeout=60, **arguments).workers
        assert json.loads(worker.output)["AF_INET own 127.0.0.2"] is is_open


@pytest.mark.parametrize(
    "arguments",
    [
        {"workers": 1, "isolate": "on"},
        {"workers": 1, "isolate": "yes", "addresses": ["10.0.0.1:1"]},
        {"workers": 1, "isolate": "yes", "wrappers": [["env"]]},
        {"workers": None, "isolate": "yes", "configs": ["{}"]},
    ],
)
def test_isolation_that_run_cannot_give_is_an_error(arguments):
    with pytest.raises(ValueError, match="`isolate.*Received: isolate="):
        launch.run([sys.executable, "-c", ""], timeout=20, **arguments)


def test_namespace_has_no_other_interface(tmp_path):
    found, messages = run_server(tmp_path, ["--isolate", "yes"])
    assert found["interfaces"] == ["lo"] and found["AF_INET own 127.0.0.1"]
    assert found["user"] == os.getuid() and "warning" not in messages


def test_forbidden_namespace_is_an_error(tmp_path, monkeypatch):
    """The error is raised before this process loses its network and before a worker starts."""

    def refuse(what):
        raise PermissionError(1, "unshare: not allowed")

    monkeypatch.setattr(isolation, "_unshare", refuse)
    path = tmp_path / "script.py"
    path.write_text("print('started')")
    before = socket.if_nameindex()
    with pytest.raises(ValueError, match="unshare: not allowed.*isolate='yes'.*--isolate auto"):
        isolation.isolate("yes")
    with pytest.raises(SystemExit) as ended:
        launch.main(["-n", "2", "--isolate", "yes", str(path)])
    assert ended.value.code == 2 and socket.if_nameindex() == before


def test_worker_of_a_given_tf_config_cannot_be_isolated(tmp_path, monkeypatch, capfd):
    config = {"cluster": {"worker": ["127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    path = tmp_path / "script.py"
    path.write_text("print('started')")
    with pytest.raises(SystemExit) as ended:
        launch.main(["--isolate", "yes", str(path)])
    shown = capfd.readouterr()
    assert ended.value.code == 2 and "started" not in shown.out
    assert "--isolate" in shown.err and "TF_CONFIG" in shown.err


def test_open_ports_warn_once(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(isolation, "LIBRARY", tmp_path / "_loopback_only.so")
    monkeypatch.setenv("TF_REDSYNC_CACHE", str(tmp_path))
    monkeypatch.setattr(libraries, "_version_of_compiler", lambda: None)
    monkeypatch.setattr(isolation, "reachable_through", lambda: ["eth0", "wlan0"])
    assert isolation.isolate("auto") == {}
    (line,) = capsys.readouterr().err.splitlines()
    assert "warning" in line and "eth0, wlan0" in line and "--isolate yes" in line
    assert "There is no C++ compiler" in line and "name yours in CXX. Or pass" in line
    monkeypatch.setattr(isolation, "reachable_through", list)
    assert isolation.isolate("auto") == {} == isolation.isolate("no")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("foreign", [False, True])
def test_library_is_built_at_first_use(foreign, monkeypatch, tmp_path):
    """Without one in place, or with one that another kind of processor built in a shared tree."""
    in_place = tmp_path / "_loopback_only.so"
    if foreign:
        in_place.write_bytes(b"\x7fELF".ljust(18, b"\0") + b"\xf3\0")  # RISC-V
    monkeypatch.setattr(isolation, "LIBRARY", in_place)
    monkeypatch.setenv("TF_REDSYNC_CACHE", str(tmp_path))
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler")
    library = isolation.loopback_only()[0]["LD_PRELOAD"]
    assert Path(library).is_file() and library.startswith(str(tmp_path))
    assert library != str(in_place)
    assert isolation.loopback_only() == ({"LD_PRELOAD": library}, "")


def test_a_user_without_a_home_directory_starts_jobs(monkeypatch, tmp_path):
    monkeypatch.setattr(isolation, "LIBRARY", tmp_path / "_loopback_only.so")
    for variable in ("TF_REDSYNC_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no entry in passwd
    with pytest.raises(BuildError, match="TF_REDSYNC_CACHE"):
        libraries.cache()
    variables, lack = isolation.loopback_only()
    assert variables == {} and "TF_REDSYNC_CACHE" in lack


def test_namespace_that_only_a_process_without_threads_may_enter(monkeypatch):
    """`unshare` refuses a process with threads, but permits the child that tries first."""

    def refuse(what):
        raise OSError(22, "unshare: Invalid argument")

    monkeypatch.setattr(isolation, "_problem_of_a_child", lambda: "")
    monkeypatch.setattr(isolation, "_unshare", refuse)
    with pytest.raises(ValueError, match="Invalid argument.*isolate='yes'.*threads"):
        isolation.isolate("yes")


@pytest.mark.parametrize("folder", ["a folder", "a:folder"])
def test_a_path_that_splits_ld_preload_is_not_preloaded(monkeypatch, tmp_path, capsys, folder):
    spaced, plain = tmp_path / folder / "library.so", tmp_path / "library.so"
    spaced.parent.mkdir()
    spaced.touch()
    monkeypatch.setattr(isolation, "LIBRARY", spaced)
    monkeypatch.setattr(isolation, "reachable_through", lambda: ["eth0"])
    monkeypatch.setattr(libraries, "loopback_only", lambda: plain)
    assert isolation.isolate("auto") == {"LD_PRELOAD": str(plain)}
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(libraries, "loopback_only", lambda: spaced)
    assert isolation.isolate("auto") == {}
    assert "eth0" in capsys.readouterr().err


def test_other_preloaded_libraries_are_kept(monkeypatch, tmp_path):
    library = tmp_path / "_loopback_only.so"
    library.touch()
    monkeypatch.setattr(isolation, "LIBRARY", library)
    assert isolation.isolate("auto") == {"LD_PRELOAD": str(library)}
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/other.so")
    assert isolation.isolate("auto") == {"LD_PRELOAD": f"{library}:/usr/lib/other.so"}
    assert isolation.isolate("auto", {"LD_PRELOAD": "b.so"}) == {"LD_PRELOAD": f"{library}:b.so"}
