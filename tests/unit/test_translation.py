"""The translation task: subword units, rows, masks, greedy search, dropout of several workers."""

import gzip
import sys

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.accuracy import command_line, networks, translation
from benchmarks.accuracy.data import Data
from benchmarks.accuracy.tasks import TASKS
from benchmarks.accuracy.training import Training, loss_of
from benchmarks.accuracy.translation import BEGIN, END, IGNORED, LENGTH, PAD, Pieces
from benchmarks.method_expressions import exchanged

TEXTS = ["low lower lowest", "new newer newest", "wide, wider, widest."]


def test_most_frequent_pairs_are_merged():
    pieces = Pieces(["aab aab aab b"], 3)
    # ties in alphabetical order
    assert list(pieces.ranks) == [(" ", "a"), (" a", "a"), (" aa", "b")]
    assert [pieces.names[c] for c in pieces.codes("aab")] == [" aab"]
    # z does not occur in the training text
    assert [pieces.names[c] for c in pieces.codes("bz")] == [" ", "b"]


def test_subwords_round_trip():
    pieces = Pieces(TEXTS, 20)
    for text in (*TEXTS, "wider  new low"):
        codes = pieces.codes(text)
        assert pieces.text([*codes, END, *codes]) == " ".join(text.split())
        assert len(codes) < len(text)


def write_dataset(folder, pairs):
    (folder / "multi30k").mkdir()
    for part in translation.PARTS:
        for place, language in enumerate(translation.LANGUAGES):
            with gzip.open(folder / "multi30k" / f"{part}.{language}.gz", "wt") as file:
                file.write("".join(pair[place] + "\n" for pair in pairs))
    return translation.multi30k(folder)


def test_rows(tmp_path):
    """Source, decoder input and target; too long pairs are skipped."""
    long = " ".join(map(str, range(100, 140)))
    found = write_dataset(tmp_path, [("a low wall", "eine Wand"), ("new", "neu"), ("old", long)])
    (x, y), test = found.train, found.test
    assert x.shape == (2, 2 * LENGTH) and y.shape == (2, LENGTH) and len(test[0]) == 3
    assert found.text(x[0, :LENGTH]) == "a low wall" and found.text(y[0]) == "eine Wand"
    labels = y[0][y[0] != IGNORED]
    assert labels[-1] == END and x[0, LENGTH] == BEGIN
    np.testing.assert_array_equal(x[0, LENGTH + 1 : LENGTH + len(labels)], labels[:-1])
    assert (x[0, LENGTH + len(labels) :] == PAD).all() and (y[0, len(labels) :] == IGNORED).all()
    assert found.references == ("eine Wand", "neu", long) and (test[1][2] >= 0).all()


def network(classes=12):
    return networks.translator((2 * LENGTH,), classes, width=16, heads=2, blocks=1)


def test_masks():
    """Logits depend on the source but not on its padding or on later tokens."""
    model = network()
    x = np.full((1, 2 * LENGTH), PAD, np.int32)
    x[0, :4], x[0, LENGTH : LENGTH + 4] = (5, 6, 7, 8), (BEGIN, 5, 6, 7)
    later, source = x.copy(), x.copy()
    later[0, LENGTH + 3], source[0, 3] = 9, 9
    logits, changed, other = (model(rows).numpy()[0] for rows in (x, later, source))
    np.testing.assert_allclose(logits[:3], changed[:3], atol=1e-6)
    assert np.abs(logits[3] - changed[3]).max() > 1e-3
    assert np.abs(logits[0] - other[0]).max() > 1e-3
    embedding = model.get_layer("pieces").embeddings
    embedding.assign(tf.tensor_scatter_nd_add(embedding, [[PAD]], tf.ones([1, 16])))
    np.testing.assert_allclose(model(x).numpy()[0, :4], logits[:4], atol=1e-5)


def test_loss_ignores_padding():
    logits, labels = (
        np.random.default_rng(0).normal(size=(2, 3, 4)),
        np.int32([[1, 2, -1], [3, -1, -1]]),
    )
    logarithms = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.mean([logarithms[0, 0, 1], logarithms[0, 1, 2], logarithms[1, 0, 3]])
    assert float(loss_of(labels, np.float32(logits))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.deep
def test_greedy_search(monkeypatch):
    """Equals a loop over prefixes, one row at a time."""
    monkeypatch.setattr(translation, "_sacrebleu", lambda: None)
    sources = np.full((3, LENGTH), PAD, np.int32)
    sources[:, :2] = [[5, 6], [7, 8], [9, 3]]
    x = np.concatenate([sources, np.zeros_like(sources)], 1)
    rows = (x, np.zeros((3, LENGTH), np.int32))
    model = network()
    pieces = "__".join
    found = Data(rows, rows, 12, text=lambda codes: pieces(map(str, codes)), references=("",) * 3)
    got = translation.Bleu(found, model).translations(batch=2)
    for source, text in zip(sources, got, strict=True):
        target = [BEGIN]
        while len(target) < LENGTH:
            row = np.concatenate([source, target, [PAD] * (LENGTH - len(target))])
            target.append(int(np.argmax(model(np.int32(row[None]))[0, len(target) - 1])))
        codes = [int(code) for code in text.split("__")]
        end = codes.index(END) + 1 if END in codes else len(codes)
        assert codes[:end] == target[1 : end + 1]


@pytest.mark.deep
def test_training_with_dropout(tmp_path, monkeypatch):
    """Dropout differs by worker and step; a state resumes with equal bits."""
    monkeypatch.setattr(translation, "_sacrebleu", lambda: lambda texts, references: 7.0)
    monkeypatch.setitem(TASKS["multi30k"].networks, "translator", lambda _, c: network(c))
    pairs = [(f"a {w}", f"ein {w}") for w in ("wall", "dog", "man", "hat", "bus", "boy")] * 4
    found = write_dataset(tmp_path, pairs)
    flags = ["--task", "multi30k", "--workers", "2", "--batch", "4", "--steps", "4"]
    args = command_line.parse([*flags, "--evaluations", "2"])
    given = command_line.settings_of(args, 24), found, exchanged("CodedTopK(density=0.1)"), 0
    training = Training(*given)
    x, y = found.train[0][:4], found.train[1][:4]
    _, gradients, statistics = training._gradients(np.stack([x, x]), np.stack([y, y]))
    assert max(np.abs(a - b).max() for a, b in zip(*gradients, strict=True)) > 1e-5
    assert any(np.any(a != b) for a, b in zip(statistics, training.statistics, strict=True))
    state = tmp_path / "state.npz"
    halves = []
    expected = training.run(state, lambda t: halves.append(state.read_bytes()), "row")
    state.write_bytes(halves[0])
    resumed = Training(*given)
    assert resumed.restore(state, "row") and resumed.number == 2
    assert resumed.run()["curve"] == expected["curve"]
    assert expected["metric"] == 7.0


def test_bleu():
    pytest.importorskip("sacrebleu", reason="pip install sacrebleu")
    score = translation._sacrebleu()
    texts = ["ein Mann geht über die Straße .", "zwei Hunde"]
    assert score(texts, texts) == pytest.approx(100.0)
    assert 0 < score(["ein Mann geht über eine Straße .", "zwei Hunde"], texts) < 100


def test_without_sacrebleu(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ValueError, match="pip install sacrebleu"):
        translation._sacrebleu()
