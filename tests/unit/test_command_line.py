"""The command `tf-redsync`: help without TensorFlow, flag styles, completion, exit codes."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tf_redsync as rs
from tests.distributed import forks
from tests.distributed.cluster import ENVIRONMENT
from tests.loops import loop
from tf_redsync import requirements
from tf_redsync.building import libraries
from tf_redsync.cli import main, output, self_test
from tf_redsync.cli.command_line import Parser
from tf_redsync.ops import native

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = main.commands()
# Importing TensorFlow, Keras or numpy raises.
WITHOUT = """
import sys
sys.orig_argv = ["python", "-m", "tf_redsync"]  # as it is called
for name in ("tensorflow", "keras", "numpy"):
    sys.modules[name] = None
from tf_redsync.cli.main import main
for words in {words}:
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    print("ended with", code)
"""


def without_tensorflow(*command_lines):
    """Runs command lines in one process that cannot import large packages."""
    code = WITHOUT.format(words=[line.split() for line in command_lines])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )


def test_help_does_not_import_tensorflow():
    lines = ["--help", "--version", "version", *(f"{name} --help" for name in COMMANDS)]
    ran = without_tensorflow(*lines)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("ended with 0") == len(lines)
    for name, command in COMMANDS.items():
        assert f"usage: tf-redsync {name}" in ran.stdout
        assert ran.stdout.count(command.summary.split(",")[0][:20]) >= 1
    assert ran.stdout.count("examples:") == len(COMMANDS)


def test_importing_tensorflow_is_detected():
    ran = without_tensorflow("plan --model a:b --workers 2 --rate 1gbit")
    assert "TensorFlow is not installed" in ran.stderr and "ended with 1" in ran.stdout


@loop("name", COMMANDS)
def test_examples_are_valid_command_lines(name):
    command = COMMANDS[name]
    for line, description in command.examples:
        parser = Parser()
        command.configure(parser)
        words = re.sub(r" [>|].*", "", line).replace("'", "").split()
        parser.parse_args(words)  # exits for an unknown flag
        assert description


@loop("name", COMMANDS)
def test_flags_accept_dashes_and_underscores(name):
    parser = Parser()
    COMMANDS[name].configure(parser)
    shown = set(re.findall(r"(?<![\w-])--[\w-]+", parser.format_help()))
    assert shown >= {"--help"} and not [flag for flag in shown if "_" in flag]
    known = {flag for action in parser._actions for flag in action.option_strings}
    others = {"--" + flag[2:].replace("-", "_") for flag in shown}
    assert others <= known


@pytest.mark.parametrize("flag", ["--log-dir", "--log_dir"])
def test_both_spellings_are_equal(flag):
    parser = Parser()
    COMMANDS["launch"].configure(parser)
    args = parser.parse_args(["-n", "2", flag, "x", "train.py", "--log_dir=y"])
    assert args.log_dir == "x" and args.script == ["train.py", "--log_dir=y"]
    assert parser.parse_args(["-n", "2", "train.py"]).log_dir is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lanch"], "'lanch'. Did you mean launch?"),
        (["xyz"], "launch, doctor,"),
        (["launch", "--hoost", "a", "x.py"], "--hoost"),
        ([], "usage: tf-redsync"),
    ],
)
def test_bad_commands(words, message, capsys):
    try:
        code = main.main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    shown = capsys.readouterr()
    assert message in shown.err + shown.out


PLAN = ["plan", "--model", "train:build_model", "--workers", "2", "--rate", "1gbit"]


@pytest.mark.parametrize("words", [["doctor"], ["build"], PLAN])
def test_without_a_supported_tensorflow_commands_end_with_one_line(words, monkeypatch, capsys):
    def refuse():
        raise ImportError("TensorFlow is not installed")

    monkeypatch.setattr(requirements, "check_tensorflow", refuse)
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 1 and "TensorFlow is not installed" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "gpus", "code"),
    [
        ("cpu-1.so", b"", 1),
        ("cuda-1.so", b"none: the build of the CUDA sources failed", 1),
        ("cuda-1.so", b"CUDA 13.0: sm_90", 0),
    ],
)
def test_build_with_cuda_fails_without_gpu_kernels(name, gpus, code, tmp_path, monkeypatch, capsys):
    (tmp_path / name).write_bytes(gpus)
    monkeypatch.setenv(libraries.CUDA, "")  # restored afterwards
    monkeypatch.setattr(native, "build", lambda show: tmp_path / name)
    monkeypatch.setattr(libraries, "loopback_only", lambda: tmp_path)
    assert main.main(["build"]) == 0
    capsys.readouterr()
    assert main.main(["build", "--cuda"]) == code
    assert (name in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize("in_place", [True, False])
def test_build_names_a_library_that_takes_precedence(in_place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(native, "is_in_place", lambda: in_place)
    monkeypatch.setattr(native, "build", lambda show: tmp_path)
    monkeypatch.setattr(libraries, "loopback_only", lambda: tmp_path)
    assert main.main(["build"]) == 0
    shown = capsys.readouterr().err
    assert (str(native.LIBRARY) in shown and native.REBUILD in shown) == in_place


def test_completion(tmp_path, capsys):
    assert main.main(["completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)

    def completed(*words):
        code = f"""
source {script}
function="$(complete -p tf-redsync | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
COMP_WORDS=({" ".join(words)}); COMP_CWORD={len(words) - 1}
$function 2>/dev/null
echo "${{COMPREPLY[@]}}"
"""
        ran = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=20)
        return ran.stdout.split()

    assert completed("tf-redsync", "la") == ["launch"]
    assert completed("tf-redsync", "launch", "--cores") == ["--cores-per-worker"]
    assert completed("tf-redsync", "launch", "--isolate", "n") == ["no"]


def test_module_equals_the_command():
    ran = subprocess.run(
        [sys.executable, "-m", "tf_redsync", "--version"],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "tf_redsync 0.1.0\n")
    project = (ROOT / "pyproject.toml").read_text()
    assert 'tf-redsync = "tf_redsync.cli.main:main"' in project


# ------------------------------------------------------------------------------------ output

NOISE = """\
2026-01-02 03:04:05.678901: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on.
2026-01-02 03:04:05.678901: E external/x/cuda_fft.cc:485] Unable to register cuFFT factory: \
Attempting to register factory for plugin cuFFT when one has already been registered
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795405811.298170   18120 port.cc:153] oneDNN custom operations are on.
I0000 00:00:1795425718.621708    8607 coordination_service.cc:505] Example stragglers:
/job:worker/replica:0/task:1
E0000 00:00:1795405811.298170   18120 cuda_dnn.cc:8310] Unable to register cuDNN factory: \
Attempting to register factory for plugin cuDNN when one has already been registered
W0000 00:00:1795405811.298170 18120 computation_placer.cc:7] computation placer already registered.
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the \
appropriate compiler flags.
2026-01-02 03:04:05.678901: W x/py_utils.cc:38] TF-TRT Warning: Could not find TensorRT
2026-01-02 03:04:05.678901: E x/cuda_platform.cc:51] failed call to cuInit: INTERNAL: CUDA error: \
Failed call to cuInit: UNKNOWN ERROR (303)
W0000 00:00:1795411073.558550    9215 session_manager.cc:55] delay_ms expects an i value.
W0000 00:00:1795411070.333445    9216 dataset.cc:997] Input of GeneratorDatasetOp::Dataset will \
not be optimized because the dataset does not implement the AsGraphDefInternal() method needed.
INFO:tensorflow:Check health not enabled.
INFO:tensorflow:Collective batch_all_gather: 1 all-gathers, num_devices = 1, group_size = 2
I1123 09:15:48.725022 140474031634240 cross_device_ops.py:1319] Collective batch_all_gather: 1
INFO:tensorflow:Collective all_reduce tensors: 1 all_reduces, num_devices = 1, group_size = 2
"""
NO_NOISE = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
ValueError: bad batch
WARNING:tensorflow:5 out of the last 5 calls triggered retracing.
INFO:tensorflow:Saver not created because there are no variables in the graph to restore
W0102 03:04:05.678901 140 train.py:12] a warning of absl's logging in Python
I0102 03:04:05.678901 140474031634240 train.py:12] what a script logs by absl
I am worker 0
I0
2026-01-02 03:04:05.678901: F tensorflow/core/platform/env.cc:123] Check failed: status
F0000 00:00:1795405811.298170   18120 tensor.cc:1] Check failed: 1 == 2
E0000 00:00:1795405811.298170   18120 cuda_driver.cc:1] failed call to cuInit: \
CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: system has unsupported display driver
2026-01-02 03:04:05.678901: E tensorflow/core/grpc.cc:1] Unable to register a worker
2026-01-02 03:04:05.678901: W x/gpu_device.cc:2251] Cannot dlopen some GPU libraries.
E0000 00:00:1795405811.298170   18120 bfc_allocator.cc:1] ran out of memory
 12/100 - 2s - loss: I0000
"""


def test_tensorflow_noise_is_recognized_by_line():
    for line in NOISE.splitlines():
        assert output.is_noise(line.encode()), line
    for line in NO_NOISE.splitlines():
        assert not output.is_noise(line.encode()), line


@pytest.mark.parametrize("verbose", [False, True])
def test_noise_is_shown_on_request_and_logged(verbose, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"print({NOISE + NO_NOISE!r})\nraise ValueError('the real error')")
    words = [sys.executable, "-m", "tf_redsync", "launch", "-n", "1", "--log-dir", str(tmp_path)]
    ran = subprocess.run(
        [*words, *(["--verbose"] if verbose else []), str(script)],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert ran.returncode == 1
    for line in NO_NOISE.splitlines():
        assert line in ran.stdout
    assert "ValueError: the real error" in ran.stdout and "the real error" in ran.stderr
    for line in NOISE.splitlines():
        assert (line in ran.stdout) == verbose
        assert line in (tmp_path / "worker_0.log").read_text()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colors_need_a_terminal_and_honor_no_color(monkeypatch):
    terminal = Terminal()
    assert output.is_colored(terminal, {"TERM": "xterm"})
    assert not output.is_colored(io.StringIO(), {"TERM": "xterm"})
    assert not output.is_colored(terminal, {"TERM": "xterm", "NO_COLOR": "1"})
    assert not output.is_colored(terminal, {"TERM": "dumb"})
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal)
    output.printer(1, False, True)(b"hello\n")
    assert terminal.getvalue() == "\x1b[33m[worker 1]\x1b[0m hello\n"


def test_command_line_of_this_process():
    for words in (
        ["python", "-m", "tf_redsync", "doctor"],
        ["python", "-u", "-m", "tf_redsync.launch", "-n", "2", "train.py"],
        ["python", "-W", "ignore", "-X", "dev", "-m", "tf_redsync", "launch"],
        ["python", "/usr/bin/tf-redsync", "launch", "-m", "package.train"],
    ):
        assert rs._is_command_line(words), words
    for words in (
        ["python", "train.py", "-m", "tf_redsync.launch"],
        ["python", "-m", "package.train", "-m", "tf_redsync"],
        ["python", "-c", "import tf_redsync"],
        ["python"],
    ):
        assert not rs._is_command_line(words), words


PARTS_FIRST = """
import os, sys
import keras, tensorflow  # slow: imported once for all parts
assert not any(name.partition(".")[0] == "tf_redsync" for name in sys.modules)
for part in sys.argv[1:]:
    if not os.fork():
        __import__(f"tf_redsync.{part}")
        os._exit(0)
    assert os.wait()[1] == 0, part
"""


@pytest.mark.deep
def test_submodules_can_be_imported_first():
    parts = ("ops", "methods", "keras.keras3", "exchange.driver", "codings")
    command = [sys.executable, "-c", PARTS_FIRST, *parts]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-500:]


@pytest.mark.distributed
@pytest.mark.timeout(200)
def test_doctor_checks_two_workers(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "executable", forks.python(ENVIRONMENT, tmp_path))
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}  # of a pod, for example
    task = {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    assert main.main(["doctor", "--check"]) == 0
    out = capsys.readouterr().out
    for name in self_test.CHECKS:
        assert re.search(rf"{name} on CPU +works", out), out


def test_doctor_reports_failures(monkeypatch, capsys):
    wrong = {"CPU": {**dict.fromkeys(self_test.CHECKS, ""), "all-gather": "received [1]"}}
    monkeypatch.setattr(self_test, "run", lambda gpu_count: wrong)
    assert main.main(["doctor", "--check"]) == 1
    assert re.search(r"all-gather on CPU +received \[1\]", capsys.readouterr().out)
