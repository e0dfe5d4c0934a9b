"""The data of the tasks, read from `--data_dir` in their published layouts.

CIFAR-10 is a folder `cifar-10-batches-py`, in the layout of its authors and Keras, or a file
`cifar10_jpeg.npz` with `train_jpeg` (the files of all images, concatenated, uint8), `train_offsets`
(start of each file, and the end of the last), `train_labels`, and the same for `test_`. Text is a
`.txt` file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import io
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

# Mean and standard deviation of CIFAR-10's training images, by channel.
CIFAR_MEAN = np.float32([0.4914, 0.4822, 0.4465])
CIFAR_DEVIATION = np.float32([0.2470, 0.2435, 0.2616])
CHARACTERS = 64  # per window of text
WORDS = 35
UNKNOWN, END_OF_SENTENCE = "<unk>", "<eos>"


@dataclasses.dataclass(frozen=True)
class Data:
    """Examples for training and testing.

    Attributes:
        train: Inputs and labels, one example per row; labels below 0 are ignored.
        test: The same.
        classes: Number of classes.
        images: Whether inputs are uint8 images, which are normalized in each batch.
        source: Description of the files.
        references: The translations of the test set, for BLEU.
        text: Returns the text of a row of labels.
    """

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    classes: int
    images: bool = False
    source: str = ""
    references: tuple[str, ...] = ()
    text: Callable[[Iterable[int]], str] | None = None

    def inputs(self, x: np.ndarray, augment: np.random.Generator | None = None) -> np.ndarray:
        """Returns model inputs of rows, shifted and mirrored if a generator is given."""
        if not self.images:
            return x
        if augment is not None:
            x = augmented(x, augment)
        return (x / np.float32(255) - CIFAR_MEAN) / CIFAR_DEVIATION


def augmented(images: np.ndarray, generator: np.random.Generator, pad: int = 4) -> np.ndarray:
    """Returns images shifted by up to `pad` pixels with zero padding, half of them mirrored."""
    count, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    top, left = generator.integers(0, 2 * pad + 1, (2, count))
    rows = top[:, None] + np.arange(height)
    columns = left[:, None] + np.arange(width)
    columns = np.where(generator.random(count)[:, None] < 0.5, columns[:, ::-1], columns)
    return padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


def digits(data_dir: Path | None) -> Data:
    """The 8x8 digits of scikit-learn, with a fixed test set."""
    del data_dir
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    x, y = np.float32(found.images / 16)[order, ..., None], np.int32(found.target)[order]
    return Data((x[300:], y[300:]), (x[:300], y[:300]), 10, source="scikit-learn's digits")


def cifar10(data_dir: Path | None) -> Data:
    """CIFAR-10: uint8 images [n, 32, 32, 3]."""
    folder = folder_of(data_dir, "cifar10")
    for path in (folder, folder / "cifar-10-batches-py"):
        if (path / "test_batch").is_file():
            parts = [_batch(path / f"data_batch_{i}") for i in range(1, 6)]
            train = tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            return Data(train, _batch(path / "test_batch"), 10, True, str(path))
    for path in (folder, folder / "cifar10_jpeg.npz"):
        if path.suffix == ".npz" and path.is_file():
            arrays = _decoded(path)
            pairs = [
                (arrays[f"{part}_images"], arrays[f"{part}_labels"]) for part in ("train", "test")
            ]
            by = "" if _by_tensorflow() else ", decoded by Pillow"
            return Data(pairs[0], pairs[1], 10, True, path.name + by)
    raise missing("cifar10", folder, "cifar-10-batches-py/ or cifar10_jpeg.npz")


def characters(data_dir: Path | None) -> Data:
    """Windows of characters; the last tenth of the text is the test set."""
    folder = folder_of(data_dir, "charlm")
    path = _first_file(folder, ("tinyshakespeare.txt", "input.txt"))
    if path is None:
        raise missing("charlm", folder, "tinyshakespeare.txt or input.txt, or a text file itself")
    text = np.frombuffer(path.read_bytes(), np.uint8)
    alphabet, codes = np.unique(text, return_inverse=True)
    split = len(codes) - len(codes) // 10
    parts = [windows(np.int32(c), CHARACTERS) for c in (codes[:split], codes[split:])]
    return Data(parts[0], parts[1], len(alphabet), source=path.name)


def words(data_dir: Path | None) -> Data:
    """Windows of words of Penn Treebank text; windows do not share a state.

    Without the training split, the validation split is used for training.
    """
    folder = folder_of(data_dir, "wordlm")
    train = _first_file(folder, ("ptb.train.txt", "ptb.valid.txt"))
    test = _first_file(folder, ("ptb.test.txt",))
    if train is None or test is None or train == test:
        raise missing("wordlm", folder, "ptb.train.txt or ptb.valid.txt, and ptb.test.txt")
    texts = [_words(path) for path in (train, test)]
    vocabulary = {word: i for i, word in enumerate(sorted({*texts[0], UNKNOWN}))}
    unknown = vocabulary[UNKNOWN]
    parts = [windows(np.int32([vocabulary.get(w, unknown) for w in t]), WORDS) for t in texts]
    return Data(parts[0], parts[1], len(vocabulary), source=f"{train.name}, {test.name}")


def windows(codes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns consecutive windows of a text, and the next token at each position."""
    count = (len(codes) - 1) // length
    if not count:
        raise ValueError(f"the text must have more than {length} tokens. Received: {len(codes)}")
    return tuple(codes[i : i + count * length].reshape(count, length) for i in (0, 1))


def _words(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [word for line in lines for word in (*line.split(), END_OF_SENTENCE)]


def folder_of(data_dir: Path | None, task: str) -> Path:
    """Returns the folder of the data.

    Raises:
        ValueError: if it does not exist.
    """
    if data_dir is None:
        raise ValueError(
            f"the task {task} needs data, which this project does not hold: give --data_dir; "
            "benchmarks/README.md says which files it may have. Received: no --data_dir"
        )
    if not data_dir.exists():
        raise ValueError(f"`--data_dir` does not exist. Received: --data_dir={data_dir}")
    return data_dir


def missing(task: str, folder: Path, needed: str) -> ValueError:
    """Returns the error for a folder without a task's files."""
    found = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else [folder.name]
    return ValueError(
        f"the task {task} needs {needed} in `--data_dir`. Received: --data_dir={folder}, which "
        f"holds {', '.join(found[:10]) or 'nothing'}{' ...' if len(found) > 10 else ''}"
    )


def _first_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    if folder.is_file():
        return folder
    paths = [folder / name for name in names]
    return next((path for path in paths if path.is_file()), None)


class _Arrays(pickle.Unpickler):
    """Unpickles arrays and rejects everything else, so no code runs."""

    def find_class(self, module: str, name: str) -> Any:
        """Finds classes that arrays consist of."""
        known = {"_reconstruct", "ndarray", "dtype"}
        if module.split(".")[0] == "numpy" and name in known:
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"not an array: {module}.{name}")


def _batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads a file of CIFAR-10: rows of 3 x 32 x 32 values, channels first."""
    with path.open("rb") as file:
        content = _Arrays(file, encoding="bytes").load()
    images = np.asarray(content[b"data"], np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), np.int32(content[b"labels"])


def _decoded(path: Path) -> dict[str, np.ndarray]:
    """Decodes an archive of JPEG files once, and caches the images in the user's cache folder."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = key[:16] if _by_tensorflow() else f"{key[:16]}-pillow"
    cache = folder / "tf_redsync" / "data" / f"{name}.npz"
    if not cache.is_file():
        arrays: dict[str, np.ndarray] = {}
        with np.load(path, allow_pickle=False) as archive:
            for part in ("train", "test"):
                files = archive[f"{part}_jpeg"].tobytes()
                arrays[f"{part}_images"] = _images(files, archive[f"{part}_offsets"])
                arrays[f"{part}_labels"] = np.int32(archive[f"{part}_labels"])
        cache.parent.mkdir(parents=True, exist_ok=True)
        temporary = cache.with_suffix(f".{os.getpid()}.part")
        with temporary.open("wb") as file:
            np.savez(file, **arrays)
        temporary.rename(cache)  # another process may do this at the same time
    with np.load(cache, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _by_tensorflow() -> bool:
    """Whether TensorFlow decodes images; Pillow differs by up to 5 levels of 255."""
    return importlib.util.find_spec("tensorflow") is not None


def _images(files: bytes, offsets: np.ndarray) -> np.ndarray:
    texts = [files[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    if not _by_tensorflow():
        from PIL import Image

        images = [Image.open(io.BytesIO(text)).convert("RGB") for text in texts]
        return np.stack([np.asarray(image) for image in images])
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(tf.constant(texts))
    decoded = dataset.map(lambda f: tf.io.decode_jpeg(f, channels=3), num_parallel_calls=2)
    return np.concatenate([batch.numpy() for batch in decoded.batch(1000)])
