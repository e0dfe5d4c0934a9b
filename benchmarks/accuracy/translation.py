"""English-German translation of image captions: Multi30k in byte-pair pieces, and BLEU.

The pieces are learned on both languages of the training set together (Sennrich et al. 2016). Words
keep the space before them, so joined pieces give the text again. An input row holds the source,
padded to `LENGTH`, followed by the decoder's input: `BEGIN` and the target. Labels are the target
and `END`, padded with `IGNORED`.
"""

from __future__ import annotations

import collections
import gzip
import heapq
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.data import Data, folder_of, missing

LENGTH = 32  # pieces of a source, and of a target with its END; longer training pairs are dropped
MERGES = 5000
PAD, BEGIN, END = 0, 1, 2
SPECIAL = ("", "", "")  # texts of the special pieces
IGNORED = -1
PARTS, LANGUAGES = ("train", "test_2016_flickr"), ("en", "de")
WORDS = re.compile(r" ?\w+| ?[^\w\s]")

Pair = tuple[str, str]


class Pieces:
    """Byte-pair pieces.

    Args:
        texts: Training texts.
        merges: Number of merges.

    Attributes:
        names: The text of each piece.
    """

    def __init__(self, texts: Iterable[str], merges: int):
        counts = collections.Counter(word for text in texts for word in _words(text))
        letters = sorted({letter for word in counts for letter in word})
        self.ranks = {
            pair: rank for rank, pair in enumerate(dict.fromkeys(_merges(counts, merges)))
        }
        joined = ["".join(pair) for pair in self.ranks]
        self.names = [*SPECIAL, *dict.fromkeys([*letters, *joined])]
        self._codes = {name: code for code, name in enumerate(self.names) if name}
        self._known: dict[str, list[int]] = {}

    def codes(self, text: str) -> list[int]:
        """Returns the pieces of a text; unknown letters are dropped."""
        return [code for word in _words(text) for code in self._codes_of(word)]

    def text(self, codes: Iterable[int]) -> str:
        """Returns the text of pieces up to `END`."""
        until = itertools.takewhile(lambda code: code != END, codes)
        return "".join(self.names[code] for code in until).strip()

    def _codes_of(self, word: str) -> list[int]:
        if word not in self._known:
            parts = list(word)
            while len(parts) > 1:
                best = min(
                    itertools.pairwise(parts), key=lambda p: self.ranks.get(p, len(self.ranks))
                )
                if best not in self.ranks:
                    break
                parts = _merged(parts, best)
            self._known[word] = [self._codes[part] for part in parts if part in self._codes]
        return self._known[word]


def multi30k(data_dir: Path | None) -> Data:
    """English captions and their German translations; pairs that are too long are dropped."""
    folder = folder_of(data_dir, "multi30k")
    for place in (folder, folder / "multi30k"):
        files = [place / f"{part}.{language}.gz" for part in PARTS for language in LANGUAGES]
        if all(path.is_file() for path in files):
            break
    else:
        raise missing("multi30k", folder, "the files train.en.gz, train.de.gz, ... of Multi30k")
    english, german, *test = (_lines(path) for path in files)
    pieces = Pieces([*english, *german], MERGES)
    pairs = [
        (source, target)
        for source, target in zip(english, german, strict=True)
        if len(pieces.codes(source)) <= LENGTH and len(pieces.codes(target)) < LENGTH
    ]
    return Data(
        _rows(pieces, pairs), _rows(pieces, list(zip(*test, strict=True))), len(pieces.names),
        source=", ".join(path.name for path in files),
        references=tuple(test[1]), text=pieces.text,
    )  # fmt: skip


def _lines(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.strip() for line in file if line.strip()]


def _rows(pieces: Pieces, pairs: Sequence[Pair]) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and labels, truncated to `LENGTH`."""
    x = np.full((len(pairs), 2 * LENGTH), PAD, np.int32)
    y = np.full((len(pairs), LENGTH), IGNORED, np.int32)
    x[:, LENGTH] = BEGIN
    for row, (source, target) in enumerate(pairs):
        codes, labels = pieces.codes(source)[:LENGTH], [*pieces.codes(target), END][:LENGTH]
        x[row, : len(codes)] = codes
        x[row, LENGTH + 1 : LENGTH + len(labels)] = labels[:-1]
        y[row, : len(labels)] = labels
    return x, y


def _words(text: str) -> list[str]:
    return WORDS.findall(" " + " ".join(text.split()))


def _merged(parts: Sequence[str], pair: Pair) -> list[str]:
    found, place = [], 0
    while place < len(parts):
        both = tuple(parts[place : place + 2]) == pair
        found.append("".join(pair) if both else parts[place])
        place += 1 + both
    return found


def _merges(counts: dict[str, int], merges: int) -> list[Pair]:
    """Returns the pairs in the order of the merges, most frequent first."""
    words = [(list(word), count) for word, count in sorted(counts.items())]
    totals: collections.Counter[Pair] = collections.Counter()
    places: dict[Pair, set[int]] = collections.defaultdict(set)

    def count(number: int, sign: int) -> None:
        parts, times = words[number]
        for pair in itertools.pairwise(parts):
            totals[pair] += sign * times
            places[pair].add(number)

    for number in range(len(words)):
        count(number, 1)
    heap = [(-total, pair) for pair, total in totals.items()]
    heapq.heapify(heap)
    found: list[Pair] = []
    while heap and len(found) < merges:
        total, best = heapq.heappop(heap)
        if -total != totals[best]:  # outdated: its count has changed since
            continue
        if total > -2:
            break
        found.append(best)
        changed: set[Pair] = set()
        for number in places.pop(best):
            changed.update(itertools.pairwise(words[number][0]))
            count(number, -1)
            words[number] = (_merged(words[number][0], best), words[number][1])
            count(number, 1)
            changed.update(itertools.pairwise(words[number][0]))
        for pair in changed:
            heapq.heappush(heap, (-totals[pair], pair))
    return found


class Bleu:
    """BLEU of greedy translations of the test set, by sacrebleu with its defaults.

    Args:
        found: The captions.
        model: The network; see `networks.translator`.

    Raises:
        ValueError: if sacrebleu is not installed.
    """

    def __init__(self, found: Data, model: Any):
        import tensorflow as tf

        self.found, self.model, self._score = found, model, _sacrebleu()
        self._decoded = tf.function(self._greedy, autograph=False)

    def _greedy(self, sources):
        """Greedy decoding: predicts each label from those before it."""
        import tensorflow as tf

        places = tf.range(LENGTH)[None]
        begun = tf.where(places == 0, BEGIN, PAD) + tf.zeros_like(sources)

        def unfinished(place, target):
            ended = tf.reduce_any(target == END, axis=1)
            return (place < LENGTH - 1) & ~tf.reduce_all(ended)

        def following(place, target):
            logits = self.model(tf.concat([sources, target], 1), training=False)[:, place]
            label = tf.argmax(logits, -1, tf.int32)[:, None]
            return place + 1, tf.where(places == place + 1, label, target)

        return tf.while_loop(unfinished, following, (0, begun))[1][:, 1:]

    def translations(self, batch: int = 250) -> list[str]:
        """Returns the translations of the test set."""
        sources = self.found.test[0][:, :LENGTH]
        parts = [sources[i : i + batch] for i in range(0, len(sources), batch)]
        return [self.found.text(row) for part in parts for row in self._decoded(part).numpy()]

    def __call__(self) -> float:
        """Returns the score."""
        return self._score(self.translations(), self.found.references)


def _sacrebleu() -> Callable[[Sequence[str], Sequence[str]], float]:
    """Returns BLEU of texts with one reference each.

    Raises:
        ValueError: if sacrebleu is not installed.
    """
    try:
        import sacrebleu
    except ImportError as error:
        raise ValueError("the task multi30k needs sacrebleu: pip install sacrebleu") from error
    return lambda texts, references: sacrebleu.corpus_bleu(texts, [references]).score
