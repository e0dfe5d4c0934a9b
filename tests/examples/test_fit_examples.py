"""The examples that use `fit`, on two worker processes, with little data and few steps."""

import ast
import importlib.util
import pickle
import re
import sys
import tarfile
import threading

import numpy as np
import pytest

from tests.examples.running import ROOT, run_example

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def datasets():
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import datasets
    finally:
        sys.path.remove(str(ROOT / "examples"))
    return datasets


def mnist_at(folder, examples=64):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, [examples, 8, 8], dtype=np.uint8)
    y = rng.integers(0, 10, [examples])
    np.savez(folder / "mnist.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
    return x, y


def cifar_at(folder, examples=16):
    """`cifar-10-batches-py`: pickled dicts of rows, a red, a green and a blue plane each."""
    inside = folder / "cifar-10-batches-py"
    inside.mkdir()
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        data = rng.integers(0, 256, [examples, 3072], dtype=np.uint8)
        batch = {b"data": data, b"labels": list(map(int, rng.integers(0, 10, examples)))}
        (inside / name).write_bytes(pickle.dumps(batch))
    return inside


def needs(package):
    """Skips if an optional library is missing: KerasHub requires tensorflow-text."""
    name = package.replace("-", "_")
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")


def text_at(folder):
    words = "the cat sat on a mat and saw the dog run to it".split()
    rng = np.random.default_rng(0)
    for part, count in (("train", 3000), ("valid", 600)):
        (folder / f"ptb.{part}.txt").write_text(" ".join(rng.choice(words, count)))
    return folder


@pytest.mark.deep
def test_mnist_resumes(tmp_path):
    mnist_at(tmp_path)
    flags = [f"--data_dir={tmp_path}", f"--run_dir={tmp_path / 'run'}", "--batch_size=8"]
    first, second = run_example("mnist", *flags, "--epochs=1")
    assert "4/4" in first and "compression_ratio" in first and "4/4" not in second
    assert (tmp_path / "run" / "mnist.keras").is_file()
    first, _ = run_example("mnist", *flags, "--epochs=2")
    assert "Epoch 2/2" in first and "Epoch 1/2" not in first


def test_invalid_flag_raises_before_workers_wait(tmp_path):
    for output in run_example("mnist", "--exchange=RedSnyc", code=1):
        assert "Did you mean RedSync?" in output and "Traceback" not in output


@pytest.mark.deep
@pytest.mark.parametrize("model", ["resnet20", pytest.param("vgg16", marks=pytest.mark.deep)])
def test_cifar10(tmp_path, model):
    folder = cifar_at(tmp_path)
    flags = [f"--model={model}", f"--run_dir={tmp_path / 'run'}", "--batch_size=8", "--epochs=1"]
    first, _ = run_example("cifar10", f"--data_dir={folder}", *flags, timeout=200)
    assert "5/5" in first and re.search(rf"{model}: test accuracy 0\.\d+", first)


def test_language_model(tmp_path):
    flags = ["--epochs=2", "--width=8", "--batch_size=4", "--window=10"]
    first, _ = run_example(
        "language_model", f"--data_dir={text_at(tmp_path)}", f"--run_dir={tmp_path / 'run'}", *flags
    )
    shown = [float(x) for x in re.findall(r" perplexity: ([\d.]+)", first)]
    assert len(shown) == 2 and shown[1] < shown[0] <= 20, first
    assert re.search(r"test perplexity [\d.]+ a word", first)


STREAMS = f"""
import sys
import numpy as np, tensorflow as tf
from absl import flags
sys.path.insert(0, {str(ROOT / "examples")!r})
import language_model

flags.FLAGS(["", "--batch_size=2", "--window=3"])
begins = []
for worker in range(2):
    context = tf.distribute.InputContext(2, worker, num_replicas_in_sync=4)
    x, y = language_model.in_turn(np.arange(100), context)
    steps = x.reshape(-1, 2, 2, 3)  # of replicas, streams and words
    assert len(steps) > 1 and (steps[1:, ..., 0] == steps[:-1, ..., -1] + 1).all(), steps
    assert (y == x + 1).all()
    begins += steps[0, ..., 0].ravel().tolist()
print(sorted(set(begins)))
"""


def test_streams_resume_in_each_replica(tmp_path):
    (tmp_path / "streams.py").write_text(STREAMS)
    (output,) = run_example(tmp_path / "streams", workers=1)
    assert "[0, 12, 24, 36, 48, 60, 72, 84]" in output


def test_transformer(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    flags = ["--epochs=1", "--steps=8", "--width=16", "--window=16", "--blocks=1"]
    first, _ = run_example(
        "transformer", f"--data_dir={tmp_path}", f"--run_dir={tmp_path / 'run'}", *flags
    )
    assert "8/8" in first and "perplexity" in first.splitlines()[-1], first


INNER = f"""
import sys
from absl import flags
sys.path.insert(0, {str(ROOT / "examples")!r})
import transformer

scheduled = "Scheduled(method={{}}(), stages=DensityStages(begins=(0, 9), densities=(0.1, 0.03)))"
for exchange in ("CodedAdam()", "Policy(default=CodedAdam())", scheduled.format("CodedAdam"),
                 "CodedTopK()", "Auto()", scheduled.format("CodedTopK")):
    flags.FLAGS(["", f"--exchange={{exchange}}"])
    print(type(transformer.adamw(0.1)).__name__, end=" ")
"""


def test_transformer_takes_sgd_around_coded_adam(tmp_path):
    (tmp_path / "inner.py").write_text(INNER)
    (output,) = run_example(tmp_path / "inner", workers=1)
    assert "SGD SGD SGD AdamW AdamW AdamW" in output


@pytest.mark.parametrize(("name", "window"), [("transformer", 200), ("language_model", 60)])
def test_short_text_raises_before_training(tmp_path, name, window):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    flags = [f"--data_dir={tmp_path}", f"--run_dir={tmp_path / 'run'}", "--batch_size=1"]
    for output in run_example(name, *flags, f"--window={window}", code=1):
        assert f"--window={window} must be less than" in output and "Traceback" not in output
    assert not (tmp_path / "run").exists()


LOAD = f"""
import sys
import keras
sys.path.insert(0, {str(ROOT / "examples")!r})
import vae

print("loaded", keras.saving.load_model(sys.argv[1]).output_shape)
"""


def test_vae(tmp_path):
    mnist_at(tmp_path)
    flags = [f"--data_dir={tmp_path}", f"--run_dir={tmp_path / 'run'}", "--width=16"]
    first, _ = run_example("vae", *flags, "--batch_size=8", "--epochs=2", "--learning_rate=0.01")
    found = [float(loss) for loss in re.findall(r" - loss: ([\d.]+)", first)]
    assert len(found) == 2 and found[1] < found[0] and "compression_ratio" in first
    (tmp_path / "load.py").write_text(LOAD)
    (output,) = run_example(tmp_path / "load", tmp_path / "run" / "vae.keras", workers=1)
    assert "loaded (None, 64)" in output


def test_recommender(tmp_path):
    needs("keras-rs")
    rng = np.random.default_rng(0)
    rows = [
        f"{user}\t{movie}\t{1 + user % 5}\t0\n" for user, movie in rng.integers(0, 50, [640, 2])
    ]
    (tmp_path / "u.data").write_text("".join(rows))
    flags = [f"--data_dir={tmp_path}", f"--run_dir={tmp_path / 'run'}", "--epochs=2"]
    first, _ = run_example("recommender", *flags, "--batch_size=16", "--width=8")
    found = [float(loss) for loss in re.findall(r" - loss: ([\d.]+)", first)]
    assert len(found) == 2 and found[1] < found[0]
    assert "18/18" in first and "val_rmse" in first and "compression_ratio" in first


RATINGS = f"""
import sys
from absl import app, flags
sys.path.insert(0, {str(ROOT / "examples")!r})
import recommender

for folder in sys.argv[1:]:
    flags.FLAGS(["", f"--data_dir={{folder}}"])
    try:
        users, movies, ratings = recommender.load_data()
    except app.UsageError as error:
        print(error)
    else:
        print(sorted(zip(users.tolist(), movies.tolist(), ratings.tolist())))
"""


def test_ratings_of_recommender(tmp_path):
    needs("keras-rs")
    folders = [tmp_path / name for name in ("100k", "10m", "empty")]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "u.data").write_text("1\t20\t5\t881250949\n3\t40\t2\t891717742\n")
    (folders[1] / "ratings.dat").write_text("1::20::4.5::838985046\n3::40::2::838983525\n")
    (tmp_path / "ratings.py").write_text(RATINGS)
    (output,) = run_example(tmp_path / "ratings", *folders, workers=1)
    assert "[(1, 20, 5.0), (3, 40, 2.0)]\n[(1, 20, 4.5), (3, 40, 2.0)]\n" in output
    assert "--data_dir must hold either u.data or ratings.dat" in output


def test_hub_lora(tmp_path):
    needs("keras-hub")
    text_at(tmp_path)
    flags = ["--epochs=1", "--steps=6", "--width=16", "--window=16", "--batch_size=4", "--rank=2"]
    first, _ = run_example(
        "hub_lora", f"--data_dir={tmp_path}", f"--run_dir={tmp_path / 'run'}", *flags
    )
    whole, lora = re.findall(r"== \w+: ([\d,]+) of [\d,]+ weights learn", first)
    # Queries and values of two layers: [width, heads, rank], [rank, width / heads], biases.
    assert int(lora.replace(",", "")) == 4 * (16 * 4 * 2 + 2 * 4 + 16) < int(whole.replace(",", ""))
    assert first.count("6/6") == 2 and first.count("compression_ratio") == 2


def test_public_layouts_are_read(tmp_path, datasets):
    x, y = mnist_at(tmp_path)
    (train, labels), (test, _) = datasets.digits(str(tmp_path))
    np.testing.assert_allclose(train[..., 0], x / 255.0, rtol=0.01)
    assert (labels == y).all() and test.shape == (8, 8, 8, 1)

    folder = cifar_at(tmp_path)
    batch = pickle.loads((folder / "data_batch_2").read_bytes())
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "cifar-10-batches-py")
    for path in (folder, tmp_path, archive):
        (train, labels), (test, _) = datasets.cifar10(str(path))
        assert train.shape == (80, 32, 32, 3) and test.shape == (16, 32, 32, 3)
        red_at_row_1_column_2 = batch[b"data"][0, 32 + 2]
        assert train[16, 1, 2, 0] == red_at_row_1_column_2
        assert list(labels[16:32]) == batch[b"labels"]

    train, test = datasets.text(str(text_at(tmp_path)))
    assert train == (tmp_path / "ptb.train.txt").read_text() and len(test) < len(train)
    (tmp_path / "two").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "two" / name).write_text("x")
    with pytest.raises(ValueError, match="`--data_dir` must be a text file"):
        datasets.text(str(tmp_path / "two"))


def test_local_data_is_used(datasets):
    (x, y), (x_test, y_test) = datasets.cifar10()
    assert x.shape == (1438, 32, 32, 3) and x.dtype == np.uint8 and x_test.shape[0] == 359
    assert set(y) == set(y_test) == set(range(10))
    train, test = datasets.text()
    assert len(train) > 400_000 and len(test) > 40_000 and " the " in test


def test_list_contains_every_example():
    page = (ROOT / "examples" / "README.md").read_text()
    others = {"datasets.py", "quickstart.py"}
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")} - others
    assert {name for name in scripts if f"[{name}]({name})" not in page} == set()


def test_commands_of_docstrings_have_run_dirs_of_their_own():
    """A second command with one run_dir would resume the first one's training."""
    command = re.compile(r"^    (?:\.\.\. |python -m tf_redsync launch )(.*)", re.MULTILINE)
    for path in (ROOT / "examples").glob("*.py"):
        page = ast.get_docstring(ast.parse(path.read_text())).replace("\\\n", "")
        folders = [re.findall(r"--run_dir=\S+", flags) for flags in command.findall(page)]
        if path.stem != "train_digits":  # without checkpoints
            assert len({*map(tuple, folders)}) == len(folders), path


def test_one_at_a_time(tmp_path, monkeypatch, datasets):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    entered = []

    def enter():
        with datasets.one_at_a_time():
            entered.append("second")

    with datasets.one_at_a_time():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(0.2)
        entered.append("first")
    thread.join()
    assert entered == ["first", "second"]


@pytest.mark.deep
def test_muloco(tmp_path):
    text_at(tmp_path)
    flags = ["--epochs=2", "--steps=6", "--width=16", "--batch_size=4", "--window=16"]
    exchange = "--exchange=BlockQuantized(method=DiLoCo(steps=3), bits=4)"
    first, _ = run_example(
        "muloco", f"--data_dir={tmp_path}", f"--run_dir={tmp_path / 'run'}", *flags, exchange
    )
    found = [float(loss) for loss in re.findall(r" - loss: ([\d.]+)", first)]
    assert len(found) == 2 and found[1] < found[0]
    assert re.search(r"perplexity [\d.]+ a character", first)
    assert (tmp_path / "run" / "transformer.keras").is_file()
