"""Scorers: a score that is not a dot product, in every evaluation, equals a loop; questions; `similarity` for users."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("open_clip")

from clip_fakes import COLOURS, dot_product_scorer, paint, parser_of, small_checkpoint

from dino_sparo.clip import load_clip
from dino_sparo.data.scenes.patterns import COLOURS as SCENE_COLOURS
from dino_sparo.data.scenes.patterns import SHAPES
from dino_sparo.data.sources import ImageSource, open_source
from dino_sparo.data.views import ClipView
from dino_sparo.image_text.evaluation import retrieval, zero_shot
from dino_sparo.image_text.evaluation.caption_sets import open_caption_set
from dino_sparo.image_text.evaluation.compositional.command import evaluate
from dino_sparo.image_text.evaluation.compositional.discover import ImageRules, find_benchmarks
from dino_sparo.image_text.evaluation.compositional.questions import judge
from dino_sparo.image_text.evaluation.validation import open_zero_shot_probe, validate
from dino_sparo.image_text.evaluation.zero_shot import evaluate_zero_shot
from dino_sparo.image_text.pairs.sources import open_pairs
from dino_sparo.image_text.prompts import prompts
from dino_sparo.image_text.scorer import EncodedImages, EncodedTexts, Scorer
from dino_sparo.runtime.launch import shutdown

WORDS = [*COLOURS, *SHAPES, *SCENE_COLOURS, "left", "right", "above", "below"]
Caption = list[tuple[float, ...]]  # a vector per word


def vector(word: str) -> tuple[float, ...]:
    """A colour for every word, one's own for a colour."""
    if word in COLOURS:
        return tuple(map(float, COLOURS[word]))
    return tuple((sum(map(ord, word)) * prime % 97) / 97 for prime in (3, 5, 7))


def score(colour: Sequence[float], words: Caption) -> float:
    """Each word binds to the image by itself, and the first counts most: no dot product of two features."""
    near = [-max(abs(a - b) for a, b in zip(colour, word, strict=True)) for word in words]
    return sum(each / 2**place for place, each in enumerate(near)) / max(1, len(near))


class LazyImages:
    """Images that are looked at when their rows are taken, never all at once."""

    def __init__(self, source: ImageSource, indices: list[int], taken: list[int]) -> None:
        self.source, self.indices, self.taken = source, indices, taken

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, rows: slice) -> list[tuple[float, ...]]:
        self.taken.append(len(self.indices[rows]))
        return [mean_colour(self.source, index) for index in self.indices[rows]]


def mean_colour(source: ImageSource, index: int) -> tuple[float, ...]:
    pixels = np.asarray(source.read(index).convert("RGB")) / 255
    return tuple(pixels.mean(axis=(0, 1)).tolist())


class Classes(NamedTuple):
    """Captions of every class."""

    captions: list[list[Caption]]


class BindingScorer:
    """A toy: a loop over pairs. Its payloads are lists, and an object that encodes late; never a matrix."""

    device = torch.device("cpu")
    measure = "binding"
    default_templates = None
    ensemble = "scores averaged over templates"
    record: ClassVar[dict[str, Any]] = {
        "model": {"sha256": "0" * 64},
        "slots": None,
        "feature": {},
        "view": {},
        "versions": {},
    }

    def __init__(self) -> None:
        self.taken: list[int] = []  # rows of images, whenever some are taken

    def encode_images(self, source: ImageSource) -> EncodedImages:
        number = torch.arange(len(source))
        labels = torch.from_numpy(source.labels) if source.labels is not None else torch.full_like(number, -1)
        return EncodedImages(LazyImages(source, number.tolist(), self.taken), labels, number, 0)

    def image_batches(self, source: ImageSource) -> Iterator[EncodedImages]:
        every = self.encode_images(source)
        for start in range(0, len(source), 3):
            rows = slice(start, start + 3)
            yield EncodedImages(every.payload[rows], every.labels[rows], every.indices[rows], 0)

    def expect_texts(self, captions: Sequence[str]) -> None:
        """Nothing is needed."""

    def encode_texts(self, captions: Sequence[str], desc: str = "captions") -> EncodedTexts:
        return EncodedTexts([self.words(caption) for caption in captions], 0)

    def encode_classes(self, names: Sequence[str], templates: tuple[str, ...]) -> EncodedTexts:
        return EncodedTexts(Classes([[self.words(text) for text in prompts(templates, name)] for name in names]), 0)

    def score_pairs(self, images: Any, image_of: Tensor, texts: Any, text_of: Tensor) -> Tensor:
        colours = images[:]
        pairs = zip(image_of.tolist(), text_of.tolist(), strict=True)
        return torch.tensor([score(colours[i], texts[c]) for i, c in pairs])

    def score_block(self, images: Any, texts: Any) -> Tensor:
        if isinstance(texts, Classes):
            means = [[sum(score(i, c) for c in own) / len(own) for own in texts.captions] for i in images]
            return torch.tensor(means)
        return torch.tensor([[score(image, text) for text in texts] for image in images])

    @staticmethod
    def words(caption: str) -> Caption:
        return [vector(word) for word in caption.lower().split() if word in WORDS]


@pytest.fixture
def scorer() -> BindingScorer:
    return BindingScorer()


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    for colour in COLOURS:
        paint(tmp_path / "images" / f"{colour}.png", colour)
    return tmp_path


def command(name: str, body: Any, scorer: Scorer, *options: object) -> dict[str, Any]:
    """Run an evaluation with this scorer."""
    args = parser_of(name).parse_args([*map(str, options), "--device", "cpu", "--num_workers", "0"])
    try:
        result: dict[str, Any] = body(args, lambda *_: scorer)
        return result
    finally:
        shutdown()


# --- a score that is not a dot product


def test_zero_shot_asks_the_scorer_and_equals_a_loop(scorer: BindingScorer, tmp_path: Path) -> None:
    source = open_source("scenes:41:32")
    names, templates = list(SHAPES), ("a red {}", "the blue {} left", "{}")
    found = evaluate_zero_shot(scorer, source, names, templates)
    assert source.labels is not None
    top1 = top5 = 0
    for index, label in enumerate(source.labels.tolist()):
        image = mean_colour(source, index)
        scores = [sum(score(image, scorer.words(text)) for text in prompts(templates, name)) / 3 for name in names]
        ranking = sorted(range(len(names)), key=lambda c: (-scores[c], c))
        top1, top5 = top1 + (ranking[0] == label), top5 + (label in ranking[:5])
    assert (found["top1"], found["top5"]) == pytest.approx((100 * top1 / 41, 100 * top5 / 41))
    options = ("--data_path", "scenes:11:32", "--output_dir", tmp_path / "a")
    result = command("zero-shot", zero_shot.evaluate_checkpoint, scorer, *options)
    assert (result["similarity"], result["prompts"]["ensemble"]) == ("binding, fp32", scorer.ensemble)
    assert open_zero_shot_probe(None, "scenes:11:32")(scorer) == result["top1"]


@pytest.mark.parametrize("chunk", [4, 7, 256])
def test_retrieval_scores_each_pair_once_in_blocks_and_equals_a_loop(
    scorer: BindingScorer, monkeypatch: pytest.MonkeyPatch, chunk: int, tmp_path: Path
) -> None:
    monkeypatch.setattr(retrieval, "IMAGE_CHUNK", chunk)
    data = open_caption_set("scenes:23:32")
    found = retrieval.evaluate_retrieval(scorer, data, [1, 3, 10])
    assert scorer.taken == [min(chunk, 23)] * -(-23 // chunk)  # of one size, since the last block reaches back
    texts, text_of = retrieval.merge_equal(data.captions)
    matches = {(int(image), int(text)) for image, text in zip(data.image_of, text_of.tolist(), strict=True)}
    images = [mean_colour(data.images, index) for index in range(23)]
    table = [[float(torch.tensor(score(image, scorer.words(text)))) for text in texts] for image in images]
    for k in (1, 3, 10):
        for by_image, recalls in ((True, found["text_recall"]), (False, found["image_recall"])):
            hits = []
            for query in range(23 if by_image else len(texts)):
                pairs = [(query, c) if by_image else (c, query) for c in range(len(texts) if by_image else 23)]
                nearest = sorted(pairs, key=lambda pair: (-table[pair[0]][pair[1]], pair in matches))[:k]
                hits.append(sum(pair in matches for pair in nearest))
            assert recalls[f"@{k}"]["any"] == pytest.approx(100 * sum(n > 0 for n in hits) / len(hits))
            assert recalls[f"@{k}"]["share"] == pytest.approx(100 * sum(n / k for n in hits) / len(hits))
    options = ("--data_path", "scenes:11:32", "--output_dir", tmp_path / "a")
    result = command("retrieval", retrieval.evaluate_checkpoint, scorer, *options)
    assert result["similarity"] == "binding, fp32"


def test_winoground_asks_the_scorer_and_equals_a_loop(scorer: BindingScorer, colours: Path) -> None:
    names = list(COLOURS)
    rows = [(a, b, f"{a} {c}", f"{c} {b}") for a in names for b in names for c in names if a != b]
    keys = ("image_0", "image_1", "caption_0", "caption_1")
    lines = [json.dumps(dict(zip(keys, row, strict=True))) for row in rows]
    (colours / "examples.jsonl").write_text("\n".join(lines))
    result, *_ = evaluate(scorer, find_benchmarks(["winoground"], ImageRules(colours)), 100, 0, False, 0)
    text = image = group = 0
    for a, b, *captions in rows:
        pictures = [tuple(map(float, COLOURS[colour])) for colour in (a, b)]
        s = [[score(picture, scorer.words(caption)) for caption in captions] for picture in pictures]
        texts, images = (s[0][0] > s[0][1] and s[1][1] > s[1][0]), (s[0][0] > s[1][0] and s[1][1] > s[0][1])
        text, image, group = text + texts, image + images, group + (texts and images)
    assert 0 < group < len(rows)
    expected = {
        name: 100 * each / len(rows)
        for name, each in zip(("text", "image", "group"), (text, image, group), strict=True)
    }
    found = result["benchmarks"]["Winoground"]["splits"]
    assert {name: found[name]["accuracy"] for name in expected} == pytest.approx(expected)
    assert result["rule"].startswith("accuracy: the true caption's binding is strictly greater")


def test_validation_asks_the_scorer(scorer: BindingScorer) -> None:
    pairs = open_pairs("scenes:9:32")
    found = validate(scorer, pairs, torch.tensor(3.0), 4)
    captions = [scorer.words(pairs.captions_of(index)[0]) for index in range(9)]
    table = torch.tensor([[score(mean_colour(pairs, i), text) for text in captions] for i in range(9)])
    groups = [3 * table[start : start + 4, start : start + 4] for start in (0, 4)]
    losses = [-(z.log_softmax(dim=0).diagonal() + z.log_softmax(dim=1).diagonal()).mean() / 2 for z in groups]
    assert found["val_loss"] == pytest.approx(float(sum(losses)) / 2, rel=1e-5)
    own = table.diagonal()
    others = table.masked_fill(torch.eye(9, dtype=torch.bool), -torch.inf)
    assert found["val_text_r1"] == pytest.approx(100 * float((own > others.amax(dim=1)).float().mean()))
    assert found["val_image_r1"] == pytest.approx(100 * float((own > others.amax(dim=0)).float().mean()))


# --- questions


def test_questions_of_any_shape_are_judged_as_a_loop_judges_them() -> None:
    """One to four images, two to five captions, few different scores: many ties."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.full((300, 4, 5), -torch.inf)
    matches = torch.full((300, 4), -1)
    expected = []
    for number in range(300):
        num_captions = 2 + number % 4
        num_images = min(1 + number % 3, num_captions) + (number % 4 == 3 and number % 3 == 2)
        own = torch.randperm(num_captions, generator=generator)[:num_images]
        table = torch.randint(3, (num_images, num_captions), generator=generator).float()
        table[torch.arange(num_images), own] += torch.randint(4, (num_images,), generator=generator)
        scores[number, :num_images, :num_captions], matches[number, :num_images] = table, own
        s, m = table.tolist(), own.tolist()
        by_image = [max(s[i][c] for c in range(num_captions) if c != m[i]) for i in range(num_images)]
        by_text = [max((s[j][m[i]] for j in range(num_images) if j != i), default=-1.0) for i in range(num_images)]
        mine = [s[i][m[i]] for i in range(num_images)]
        row = [all(a > b for a, b in zip(mine, best, strict=True)) for best in (by_image, by_text)]
        row += [any(a == b for a, b in zip(mine, best, strict=True)) for best in (by_image, by_text)]
        expected.append(row)
    found = torch.tensor([answer[:4] for answer in judge(scores, matches)])
    assert found.tolist() == expected
    assert 0 < found.float().mean(dim=0).min() <= found.float().mean(dim=0).max() < 1


# --- for users


def test_similarity_of_pictures_and_captions_is_what_evaluations_compare(tmp_path: Path) -> None:
    loaded = load_clip(small_checkpoint(tmp_path / "clip.pth"))
    source = open_source("scenes:5:40")
    images, captions = [source.read(index) for index in range(5)], ["a star", "a ring on sand", "so " * 99]
    found = loaded.similarity([*images[:4], images[4].convert("P")], captions)
    assert (found.shape, found.dtype, found.requires_grad) == ((5, 3), torch.float32, False)

    view = ClipView(32, loaded.mean, loaded.std)
    scorer = dot_product_scorer(loaded, batch_size=5)
    encoded, texts = scorer.encode_images(source), scorer.encode_texts(captions)
    torch.testing.assert_close(found[:4], scorer.score_block(encoded.payload, texts.payload)[:4])
    views = torch.stack([view(image)[0] for image in images])
    torch.testing.assert_close(loaded.similarity(views, captions)[:4], found[:4])
    one_by_one = torch.stack([loaded.similarity([image], [text])[0, 0] for image in images[:2] for text in captions])
    torch.testing.assert_close(one_by_one, found[:2].flatten())
