"""The report of files in any state, and its page in a real browser."""

import html
import io
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest

import tf_redsync as rs
from tests.loops import loop
from tf_redsync.cli.main import REPORT as command
from tf_redsync.metrics import figures, page, records

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
SIZES = (600, 20, 400, 20)
VARIABLES = [
    {
        "name": f"small/dense_{i}/kernel",
        "shape": [n],
        "elements": n,
        "bucket": 0,
        "method": "TopK" if n > 20 else "Dense",
        "how": "exact",
        "reason": "default",
    }
    for i, n in enumerate(SIZES)
]
RUN = {
    "record": "run",
    "format": 1,
    "time": 1000.0,
    "step": 0,
    "workers": 2,
    "model": "small",
    "optimizer": "SGD",
    "dense_bytes": 4160.0,
    "known_losses": {"TopK": "2 < 3 points", "Dense": "none"},
    "decision": "tf_redsync.Auto, 2 workers: <all-gather>",
    "explained": "variable  shape\nthe table",
    "time_split": "profiled",
    "versions": {"tf_redsync": "0.1.0"},
    "variables": VARIABLES,
}


def sample(step, time=None, variables=4, **values):
    residual = [step / (i + 1) if i % 2 == 0 else None for i in range(variables)]
    return {
        "record": "sample",
        "step": step,
        "time": 1000.0 + step if time is None else time,
        "bytes_sent": 400.0 * step,
        "bytes_per_step": 400.0,
        "compression_ratio": 10.4,
        "density": 0.05,
        "residual_norm": 1.5 * step,
        "skipped_steps": 0,
        "step_ms": 10.0 + step % 3,
        "logs": {"loss": 2.0 / step},
        "layers": {"density": [0.05, 1.0, 0.05, 1.0][:variables], "residual": residual},
    } | values


def split(step):
    parts = {"compute": 5, "select": 1, "decode": 1, "input": 1, "wait": 3, "exchange": 4}
    times = {f"{n}_ms": float(t) for n, t in parts.items()}
    return {"record": "split", "step": step, "time": 1000.0 + step, "step_ms": 11.0} | times


def epoch(step, **logs):
    logs = {"loss": 0.1, "val_loss": 0.2, "bytes_sent": 400.0 * step} | logs
    return {"record": "epoch", "step": step, "time": 1000.0 + step, "logs": logs, "trial": None}


TRAINING = [RUN, *(sample(s) for s in range(10, 60, 10)), split(20), epoch(50)]


def write(folder, found, rank=0, tail=""):
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(r) + "\n" for r in found)
    (folder / f"worker-{rank}.jsonl").write_text(text + tail)
    return folder


def test_history_spans_several_files(tmp_path):
    write(tmp_path, TRAINING, tail='{"record": "sample", "step": 60, "logs": {"lo')
    write(tmp_path, [RUN | {"workers": 3}, sample(10), sample(20)], rank=2)
    (tmp_path / "worker-x.jsonl").write_text("not ours")
    found = records.load(tmp_path)
    assert [w.rank for w in found.workers] == [0, 2]
    assert [s["step"] for s in found.first.samples] == [10, 20, 30, 40, 50]
    assert [s["elapsed"] for s in found.first.samples] == [10, 20, 30, 40, 50]
    assert "1 malformed line" in found.notes[0] and len(found.notes) == 1


def test_loss_is_the_final_one(tmp_path):
    """The run has one sample, as earlier versions recorded short runs."""
    write(tmp_path, [RUN, sample(8, logs={"loss": 0.7436}), epoch(66, loss=0.339)])
    text = page.report(tmp_path).read_text()
    assert "<dt>loss</dt><dd>0.339</dd>" in text


def test_path_that_is_not_utf_8(tmp_path):
    pytest.importorskip("plotly", reason="pip install plotly")
    folder = write(tmp_path / os.fsdecode(b"run\xff"), TRAINING)
    assert "/run?" in rs.report(folder).read_text(encoding="utf-8")
    assert command.main([str(folder)]) == 0  # prints the path


def test_missing_workers_are_named(tmp_path):
    write(tmp_path, [RUN | {"workers": 4}, sample(10)])
    (note,) = records.load(tmp_path).notes
    assert "1 file found of 4 workers: those of worker 0." in note


def test_resumed_run(tmp_path):
    """Killed at step 50 and resumed from the checkpoint at 30: repeated steps count once."""
    again = [RUN | {"step": 30, "time": 5000.0}]
    again += [sample(s, time=5000.0 + s - 30, logs={"loss": 7.0}) for s in (40, 50, 60)]
    found = records.load(write(tmp_path, [*TRAINING, *again]))
    samples = found.first.samples
    assert [s["step"] for s in samples] == [10, 20, 30, 40, 50, 60]
    assert [s["elapsed"] for s in samples] == [10, 20, 30, 40, 50, 60]  # without the pause
    assert [s["logs"]["loss"] == 7.0 for s in samples] == [False] * 3 + [True] * 3
    assert any("2 calls of `fit`" in n for n in found.notes)
    assert any("2 samples" in n for n in found.notes)


def test_new_run_in_the_same_directory(tmp_path):
    found = records.load(write(tmp_path, [*TRAINING, RUN, sample(10)]))
    assert [s["step"] for s in found.first.samples] == [10]
    assert any("5 samples" in n for n in found.notes)


@loop(
    ("files", "error", "text"),
    [
        (None, FileNotFoundError, "run_dir=.* does not exist"),
        ({}, FileNotFoundError, "no file worker-0.jsonl.*CompressionMetrics"),
        ({0: []}, page.ReportError, "without a training step"),
        ({0: [sample(1)]}, page.ReportError, "without a training step"),
        ({0: [RUN | {"format": 9}]}, page.ReportError, "format 9.*Update"),
        ({0: [RUN | {"format": "a"}]}, page.ReportError, "unexpected type.*run_dir"),
        ({0: [RUN | {"variables": 5}]}, page.ReportError, "unexpected type.*run_dir"),
        ({0: [RUN, sample(1, density="x")]}, page.ReportError, "unexpected type.*run_dir"),
    ],
)
def test_nothing_to_report(tmp_path, capsys, files, error, text):
    folder = tmp_path / str(hash(text + str(files)))
    for rank, found in (files or {}).items():
        write(folder, found, rank)
    if files == {}:
        folder.mkdir()
    with pytest.raises(error, match=f"(?s){text}"):
        rs.report(folder)
    with pytest.raises(SystemExit) as ended:
        command.main([str(folder)])
    assert ended.value.code == 2 and re.search(text, capsys.readouterr().err, re.S)


def test_own_error_is_not_blamed_on_the_records(tmp_path, monkeypatch):
    pytest.importorskip("plotly", reason="pip install plotly")
    monkeypatch.setattr(figures, "loss", lambda worker: {}["of the program"])
    with pytest.raises(page.ReportError, match=r"KeyError: 'of the program'.* bug.*run_dir") as e:
        rs.report(write(tmp_path, TRAINING))
    assert isinstance(e.value.__cause__, KeyError)


def test_missing_folder_of_the_page_raises(tmp_path):
    write(tmp_path, TRAINING)
    with pytest.raises(FileNotFoundError, match="`output` must be"):
        rs.report(tmp_path, tmp_path / "nowhere" / "page.html")


@pytest.mark.parametrize("value", [None, 3, b"/tmp"])
def test_bad_path_is_named(tmp_path, value):
    with pytest.raises(ValueError, match="`run_dir`.*Received: run_dir="):
        rs.report(value)
    if value is not None:
        with pytest.raises(ValueError, match="`output`.*Received: output="):
            rs.report(tmp_path, value)


@pytest.mark.parametrize("output", ["", "folder"])
def test_page_path_that_is_not_a_file(tmp_path, monkeypatch, capsys, output):
    monkeypatch.chdir(write(tmp_path, TRAINING))
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="`output` must be a file"):
        rs.report(tmp_path, output)
    with pytest.raises(SystemExit) as ended:
        command.main([str(tmp_path), f"--output={output}"])
    assert ended.value.code == 2 and "`output` must be a file" in capsys.readouterr().err


def test_page_never_replaces_the_records(tmp_path):
    pytest.importorskip("plotly", reason="pip install plotly")
    path = write(tmp_path, TRAINING) / "worker-0.jsonl"
    records_before = path.read_text()
    with pytest.raises(ValueError, match="`output` must not be a file of CompressionMetrics"):
        rs.report(tmp_path, path)
    assert path.read_text() == records_before


def test_failed_write_leaves_no_partial_page(tmp_path, monkeypatch):
    def full(self, target):
        raise OSError("No space left")

    monkeypatch.setattr(page.Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        rs.report(write(tmp_path, TRAINING))
    assert [p.name for p in tmp_path.iterdir()] == ["worker-0.jsonl"]


@pytest.mark.parametrize("line", ['{"record": "sample"}', "[" * 100_000, '{"record": 3}'])
def test_malformed_lines_are_skipped_and_counted(tmp_path, line):
    found = records.load(write(tmp_path, TRAINING, tail=line + "\n"))
    assert len(found.first.samples) == 5 and "1 malformed line" in found.notes[0]
    assert page.report(tmp_path).exists()


def test_without_plotly(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "plotly.graph_objects", None)
    with pytest.raises(page.ReportError, match=r"pip install 'tf_redsync\[report\]'"):
        rs.report(write(tmp_path, TRAINING))


def test_function_and_command(tmp_path, capsys):
    write(tmp_path, TRAINING)
    assert rs.report(tmp_path) == tmp_path / "report.html"
    assert rs.report(tmp_path, tmp_path / "other.html").exists()
    assert command.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"


@loop(
    "found",
    [
        [RUN],  # no step yet
        [RUN, sample(1)],
        [RUN | {"variables": [], "decision": None, "dense_bytes": 0.0}, sample(1, variables=0)],
        [RUN, {"record": "sample", "step": 3}],
        [RUN | {"workers": 1}, sample(10, logs={}, bytes_sent=0.0, compression_ratio=None)],
        [RUN, sample(10, variables=3), {"record": "no_split", "why": "on a <GPU>"}],
        [RUN, sample(10), {"record": "of a later version"}, epoch(10, val_loss=None)],
    ],
)
def test_pages_of_short_runs(tmp_path, found):
    text = rs.report(write(tmp_path, found)).read_text()
    assert text.endswith("</html>\n") and "<GPU>" not in text


def test_page_starts_with_savings_costs_and_step_times(tmp_path):
    pytest.importorskip("plotly", reason="pip install plotly")
    write(tmp_path, TRAINING)
    text = rs.report(tmp_path).read_text()
    answer = html.unescape(re.search(r"<p class='answer'>(.*?)</p>", text)[1])
    assert "sent 20 kB instead of 208 kB, 10.4 times less" in answer
    assert "The known loss of accuracy of TopK: 2 < 3 points" in answer
    assert "compute 5.0, wait 3.0, " in answer
    assert text.index("class='answer'") < text.index("<dl>")


def test_long_runs_are_thinned():
    """Of 161 variables and 3,000 samples; the last sample is kept."""
    pytest.importorskip("plotly", reason="pip install plotly")
    run = RUN | {"variables": [VARIABLES[0] | {"name": f"layer_{i}/kernel"} for i in range(161)]}
    layers = {"density": [0.05] * 161, "residual": [1 / 3] * 161}
    samples = [sample(s, layers=layers) for s in range(1, 3_001)]
    drawn = figures.layers(records.Worker(0, run, run, tuple(samples), (), (), ""))
    assert max(drawn[-1].data[0].x) == 3_000 and len(drawn[-1].data[0].x) <= 1_000
    assert sum(len(figure.to_json()) for figure in drawn) < 2e6


def test_names_are_escaped():
    """Plotly would show a <sub> in a name as a subscript."""
    pytest.importorskip("plotly", reason="pip install plotly")
    named = [{**v, "name": f"w<sub>{i}"} for i, v in enumerate(VARIABLES * 3)]
    residual = [1.0] * len(named)
    samples = [sample(s, layers={"density": residual, "residual": residual}) for s in (1, 2)]
    run = RUN | {"variables": named}
    worker = records.Worker(0, run, run, tuple(samples), (), (), "")
    drawn = [figure.to_plotly_json() for figure in figures.layers(worker)]
    assert len(drawn) == 3
    text = json.dumps(drawn, default=str)
    assert "w<sub>" not in text and "w&lt;sub&gt;11" in text


def facts(folder):
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", rs.report(folder).read_text()))


@pytest.mark.parametrize("before", [0.0, 12_345.0])
def test_only_recorded_steps_count(tmp_path, before):
    """The run resumes at step 100, with a new callback or directory."""
    pytest.importorskip("plotly", reason="pip install plotly")
    run = RUN | {"step": 100, "bytes_sent": before}
    late = [sample(100 + s, bytes_sent=before + 400.0 * s) for s in (10, 20)]
    found = facts(write(tmp_path, [run, *late]))
    assert found["compression"] == "10.4 times" and found["steps"] == "120 (20 recorded)"
    assert (found["sent by a worker"], found["dense would be"]) == ("8 kB", "83.2 kB")


def test_dense_bytes_of_several_numbers_of_workers(tmp_path):
    """In an all-reduce two workers send each element once, four send it 1.5 times."""
    pytest.importorskip("plotly", reason="pip install plotly")
    more = RUN | {"step": 50, "workers": 4, "dense_bytes": 6240.0, "bytes_sent": 20_000.0}
    found = facts(write(tmp_path, [*TRAINING, more, sample(60), sample(70)]))
    assert found["dense would be"] == page.size(50 * 4160 + 20 * 6240)


def test_bytes_include_the_round_that_the_last_epoch_ends(tmp_path):
    """The sample of an epoch's last step may precede the exchange that ends its round."""
    pytest.importorskip("plotly", reason="pip install plotly")
    found = facts(write(tmp_path, [RUN, sample(50), epoch(50, bytes_sent=26_000.0)]))
    assert found["sent by a worker"] == "26 kB" and found["compression"] == "8.0 times"


def test_words():
    assert page.size(1_234_567) == "1.23 MB" and page.size(12) == "12 bytes"
    assert page.size(999_400) == "999 kB" and page.size(999_600) == "1 MB"
    assert records.finite({"a": np.float32("inf"), "b": [np.int64(3), math_nan()]}) == {
        "a": None,
        "b": [3, None],
    }


def math_nan():
    return float("nan")


# ----------------------------------------------------------------------------- in a real browser

# Precedes everything else in the page: later errors are recorded in the document's attribute.
WATCH = """<script>
window.seen = [];
addEventListener('error', e => seen.push('error: ' + e.message), true);
addEventListener('unhandledrejection', e => seen.push('rejected: ' + e.reason));
document.addEventListener('securitypolicyviolation',
  e => seen.push('network: ' + e.blockedURI + ' by ' + e.violatedDirective));
const complain = console.error;
console.error = (...words) => { seen.push('console: ' + words.join(' ')); complain(...words); };
addEventListener('load', () => setTimeout(() => {
  const boxes = [...document.querySelectorAll('.js-plotly-plot')].map(p => {
    const b = p.getBoundingClientRect();
    return [b.left, b.top, b.width, b.height].map(Math.round);
  });
  const loaded = performance.getEntriesByType('resource').map(r => r.name);
  document.documentElement.setAttribute('data-found', JSON.stringify({seen, boxes, loaded}));
}, 1500));
</script>"""


def browse(text, folder, height=3000):
    """Opens a page in Chromium; returns what `WATCH` recorded and the screenshot, `[y, x, 4]`."""
    from matplotlib.image import imread

    folder.mkdir(exist_ok=True)
    watched = folder / "watched.html"
    watched.write_text(text.replace("<head>", f"<head>{WATCH}", 1))
    command = [
        CHROMIUM, "--headless=new", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--disable-extensions", f"--user-data-dir={folder / 'profile'}", "--no-sandbox",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size=1150,{height}",
        "--virtual-time-budget=6000", f"--screenshot={folder / 'page.png'}", "--dump-dom",
        watched.as_uri(),
    ]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'data-found="([^"]*)"', dom)
    assert found, "the page did not load"
    screenshot = imread(io.BytesIO((folder / "page.png").read_bytes()), format="png")
    return json.loads(html.unescape(found[1])), screenshot


def is_blank(screenshot, box):
    left, top, width, height = box
    part = screenshot[top : top + height, left : left + width, :3]
    return part.size == 0 or float(np.std(part)) < 0.02


needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a browser (Debian: apt-get install chromium)"
)


@needs_browser
def test_page_in_a_browser(tmp_path):
    write(tmp_path, TRAINING)
    write(tmp_path, [RUN, *(sample(s, step_ms=14.0) for s in (10, 50)), split(30)], rank=1)
    path = rs.report(tmp_path)
    text = path.read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=['\"]?(https?:)?//", text)
    assert "&lt;all-gather&gt;" in text
    found, screenshot = browse(text, tmp_path / "browser")
    assert found["seen"] == [] and found["loaded"] == []
    assert len(found["boxes"]) == 5  # loss, bytes, time, density, residuals
    assert [box for box in found["boxes"] if is_blank(screenshot, box)] == []
    if os.environ.get("TF_REDSYNC_KEEP_PAGE"):
        shutil.copy(tmp_path / "browser" / "page.png", os.environ["TF_REDSYNC_KEEP_PAGE"])


@pytest.mark.deep
@needs_browser
def test_browser_check_detects_failures(tmp_path):
    """It detects an error, a request and an empty figure, so the test above can fail."""
    text = rs.report(write(tmp_path, TRAINING)).read_text()
    broken = text.replace("Plotly.newPlot(", "Plotly.nonsense(", 1)
    broken = broken.replace("</body>", "<img src='https://example.org/a.png'></body>")
    found, screenshot = browse(broken, tmp_path / "browser")
    assert any("nonsense is not a function" in s for s in found["seen"])
    assert any("network: https://example.org" in s for s in found["seen"])
    assert len(found["boxes"]) == 4
    assert is_blank(screenshot, (0, 2900, 1150, 100))
