"""Data for the examples: what an installed library brings along, or a folder in a public layout."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import pickle
import tarfile

import numpy as np

TEST_SHARE = 5  # one example of five
_PTB = "ptb.{}.txt"


@contextlib.contextmanager
def one_at_a_time():
    """Context for one process of a user at a time, such as for a download.

    Keras and KerasHub write a download in place, where another worker would read a part of it.
    Build no model in a strategy's scope in it: there the workers wait for each other.
    """
    folder = pathlib.Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a folder that Keras cannot use either
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(folder / "download.lock", "w"))
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed, or the process ends
        yield


def digits(data_dir: str | None = None):
    """Returns ((x_train, y_train), (x_test, y_test)) of handwritten digits.

    Args:
        data_dir: Folder with Keras's mnist.npz. Default: the 8x8 digits of scikit-learn.

    Returns:
        Images float32 [n, height, width, 1] in [0, 1], labels int32 [n].
    """
    if data_dir is not None:
        with np.load(pathlib.Path(data_dir) / "mnist.npz") as data:
            pairs = [(data[f"x_{part}"], data[f"y_{part}"]) for part in ("train", "test")]
    else:
        from sklearn.datasets import load_digits

        found = load_digits()
        order = np.random.default_rng(0).permutation(len(found.target))
        test, train = np.split(order, [len(order) // TEST_SHARE])
        pairs = [(found.images[part], found.target[part]) for part in (train, test)]
    scale = np.float32(pairs[0][0].max())
    return tuple((x[..., None].astype("float32") / scale, y.astype("int32")) for x, y in pairs)


def cifar10(data_dir: str | None = None):
    """Returns ((x_train, y_train), (x_test, y_test)) of CIFAR-10, or of what stands for it.

    Args:
        data_dir: The folder cifar-10-batches-py or one that holds it, or cifar-10-python.tar.gz.
            Default: scikit-learn's digits, enlarged, in colours and on a background of their own.

    Returns:
        Images uint8 [n, 32, 32, 3], labels int32 [n].
    """
    if data_dir is None:
        return tuple(_coloured(x, y, seed) for seed, (x, y) in enumerate(digits()))
    path = pathlib.Path(data_dir).expanduser()
    train = [_cifar_batch(path, f"data_batch_{i}") for i in range(1, 6)]
    images, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return (images, labels), _cifar_batch(path, "test_batch")


def _coloured(x, y, seed):
    rng = np.random.default_rng(seed)
    x = x[..., 0].repeat(3, 1).repeat(3, 2)[..., None]  # 24x24
    images = rng.integers(0, 100, (len(x), 1, 1, 3)) + rng.integers(0, 30, (len(x), 32, 32, 3))
    top, left = rng.integers(0, 9, (2, len(x)))
    colours = rng.integers(100, 226, (len(x), 3))
    for image, digit, colour, i, j in zip(images, x, colours, top, left, strict=True):
        image[i : i + 24, j : j + 24] += (digit * (colour - 100)).astype(int)
    return images.clip(0, 255).astype("uint8"), y


def _cifar_batch(path, name):
    if path.is_file():
        with tarfile.open(path) as archive:
            file = archive.extractfile(f"cifar-10-batches-py/{name}")
            batch = pickle.load(file, encoding="bytes")
    else:
        inside = path / "cifar-10-batches-py"
        with open((inside if inside.is_dir() else path) / name, "rb") as file:
            batch = pickle.load(file, encoding="bytes")
    images = batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, np.asarray(batch[b"labels"], "int32")


def text(data_dir: str | None = None) -> tuple[str, str]:
    """Returns English text for training and for testing.

    Args:
        data_dir: A text file; or a folder with ptb.train.txt and ptb.valid.txt (words of the Penn
            Treebank), or with one .txt file. A single file's last tenth is for testing. Default:
            the topics of Python's own help, half a million characters.
    """
    if data_dir is None:
        from pydoc_data import topics

        whole = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    else:
        path = pathlib.Path(data_dir).expanduser()
        ptb = [path / _PTB.format(part) for part in ("train", "valid")]
        if all(p.is_file() for p in ptb):
            return ptb[0].read_text(), ptb[1].read_text()
        files = [path] if path.is_file() else sorted(path.glob("*.txt"))
        if len(files) != 1:
            raise ValueError(
                "`--data_dir` must be a text file, or a folder with ptb.train.txt and "
                f"ptb.valid.txt or with one .txt file. Received: --data_dir={data_dir}, which "
                f"holds {[f.name for f in files]}"
            )
        whole = files[0].read_text(encoding="utf-8")
    cut = len(whole) * 9 // 10
    return whole[:cut], whole[cut:]
