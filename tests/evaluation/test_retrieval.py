"""Image retrieval and copy detection: the official measures, drawn data in the official layout, whole commands."""

import json
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import words_of
from torch.nn import functional as F

from dino_sparo.__main__ import run
from dino_sparo.data.scenes.images import Scenes
from dino_sparo.data.sources.decode import DEFAULT_LIMITS
from dino_sparo.evaluation.retrieval.command import SCALES, copy_features, encode_scales, whitening
from dino_sparo.evaluation.retrieval.datasets import open_copydays, open_revisited
from dino_sparo.evaluation.retrieval.measures import KAPPAS, Query, average_precision, mean_precision, rank_database
from dino_sparo.models.encoder import create_encoder
from dino_sparo.runtime.faults import UserError
from dino_sparo.weights.results import scores_of

RECORDED = json.loads((Path(__file__).parents[1] / "reference" / "retrieval.json").read_text())
# `cls` has 256 features of copies; whitening the 4,224 of `sparo` takes 11 s.
TINY = {"arch": "vit_micro", "patch_size": 8, "readout": "cls", "untrained": "true", "imsize": 48}
TINY |= {"device": "cpu", "num_workers": 0}


def test_precision_with_junk_is_revisitops() -> None:
    queries = [Query(np.array(answer["ok"]), np.array(answer["junk"])) for answer in RECORDED["answers"]]
    found = mean_precision(torch.tensor(RECORDED["rankings"]), queries)
    assert found["map"] == pytest.approx(100 * RECORDED["map"])
    shares = [found[f"precision_at_{kappa}"] for kappa in KAPPAS]
    assert shares == pytest.approx([100 * value for value in RECORDED["precision"]])
    assert found["num_queries"] == 4
    for query, ranking, wanted in zip(queries, RECORDED["rankings"], RECORDED["aps"], strict=True):
        if wanted is not None:
            assert mean_precision(torch.tensor([ranking]), [query])["map"] == pytest.approx(100 * wanted)


def test_precision_of_shortened_rankings_is_that_of_copydays() -> None:
    recorded = RECORDED["shortened"]
    found = [average_precision(np.array(r), n) for r, n in zip(recorded["ranks"], recorded["totals"], strict=True)]
    assert found == pytest.approx(recorded["aps"])


def test_queries_without_any_answer_end_in_one_line() -> None:
    with pytest.raises(UserError, match="no query has an answer; give several images per building or class"):
        mean_precision(torch.zeros(1, 1, dtype=torch.long), [Query(np.array([], int), np.array([0]))])


def test_equal_images_are_ranked_by_their_row() -> None:
    database = torch.tensor([[1.0, 0], [0, 1], [1, 0], [0, 1]])
    assert rank_database(torch.tensor([[0.0, 2]]), database).tolist() == [[1, 3, 0, 2]]


def test_whitening_is_the_references() -> None:
    recorded = {name: torch.tensor(values) for name, values in RECORDED["whitening"].items()}
    found, wanted = whitening(recorded["learned"])(recorded["found"]), recorded["whitened"]
    torch.testing.assert_close(found.abs(), wanted.abs(), rtol=1e-4, atol=1e-5)  # the sign of an eigenvector is free
    torch.testing.assert_close(found @ found.T, wanted @ wanted.T, rtol=1e-4, atol=1e-4)


def test_features_of_copies_are_class_token_and_generalised_mean() -> None:
    encoder = create_encoder("vit_micro", 8, "cls", img_size=32).eval()
    images = torch.randn(2, 3, 32, 40)
    tokens = encoder.backbone(images)
    mean = (tokens[:, 1:].clamp(min=1e-6) ** 4).mean(dim=1) ** 0.25
    torch.testing.assert_close(copy_features(encoder, images), torch.cat((tokens[:, 0], mean), dim=1))


def test_scales_are_averaged_before_the_encoding_gets_length_one() -> None:
    encoder = create_encoder("vit_micro", 8, "sparo", img_size=32, num_slots=3, slot_dim=5, key_dim=4).eval()
    images = torch.randn(1, 3, 40, 32)
    resize = partial(F.interpolate, images, mode="bilinear", align_corners=False)
    sizes = [images, *(resize(scale_factor=scale) for scale in SCALES[1:])]
    mean = sum(encoder(resized) for resized in sizes) / 3
    torch.testing.assert_close(encode_scales(encoder, images), mean / mean.norm())


@pytest.fixture
def revisited(tmp_path: Path) -> Path:
    """Six buildings as database, two of them as queries, in the layout of revisited Oxford."""
    scenes, folder = Scenes(6, image_size=64, split="val"), tmp_path / "data" / "roxford5k" / "jpg"
    folder.mkdir(parents=True)
    for number in range(6):
        scenes.read(number).crop((0, 0, 64, 40 + 4 * number)).save(folder / f"b{number}.jpg")
    answers = [
        {"bbx": [0, 0, 9, 9], "easy": np.array([0, 1]), "hard": [2], "junk": []},
        {"bbx": [0, 0, 9, 9], "easy": [], "hard": [4], "junk": np.array([5])},
    ]
    truth = {"imlist": [f"b{number}" for number in range(6)], "qimlist": ["b0", "b4"], "gnd": answers}
    with (folder.parent / "gnd_roxford5k.pkl").open("wb") as file:
        pickle.dump(truth, file, protocol=2)
    return tmp_path / "data"


def test_revisited_oxford_is_searched_with_its_protocols(revisited: Path, tmp_path: Path) -> None:
    options = {**TINY, "data_path": str(revisited), "output_dir": str(tmp_path / "out"), "multiscale": "true"}
    found = run("image-retrieval", words_of(options))
    assert [found["results"][name]["num_queries"] for name in ("easy", "medium", "hard")] == [1, 2, 2]
    assert found["results"]["medium"]["precision_at_1"] == 100  # a query is in the database, too
    (file,) = (tmp_path / "out").iterdir()
    assert json.loads(file.read_text())["results"] == found["results"]


def test_images_of_a_class_are_searched_in_any_labelled_data(tmp_path: Path) -> None:
    options = {**TINY, "data_path": "scenes:40:48", "dataset": "labelled", "output_dir": tmp_path}
    found = run("image-retrieval", words_of(options))
    assert 0 < found["results"]["same class"]["map"] < 100
    (file,) = tmp_path.iterdir()
    assert [score.name for score in scores_of(json.loads(file.read_text()))] == ["mAP same class"]


@pytest.mark.parametrize("bad", ["missing", "code", "damaged", "image"])
def test_what_is_wrong_with_the_ground_truth_is_one_line(revisited: Path, bad: str) -> None:
    truth = revisited / "roxford5k" / "gnd_roxford5k.pkl"
    messages = {
        "missing": "get it with python/download.py of https://github.com/filipradenovic/revisitop",
        "code": r"is not the ground truth of roxford5k \(it asks for posix.system\)",
        "damaged": "is not the ground truth of roxford5k",
        "image": r"b3\.jpg does not exist; the images of roxford5k database are not complete",
    }
    if bad == "missing":
        truth.unlink()
    elif bad == "code":
        truth.write_bytes(b"cposix\nsystem\n(S'touch /tmp/never'\ntR.")
    elif bad == "damaged":
        truth.write_bytes(truth.read_bytes()[:50])
    else:
        (revisited / "roxford5k" / "jpg" / "b3.jpg").unlink()
    with pytest.raises(ValueError, match=messages[bad]):
        open_revisited(str(revisited), "roxford5k", DEFAULT_LIMITS)


@pytest.fixture
def copydays(tmp_path: Path) -> Path:
    """Four originals and five copies of them, with letters and half the size."""
    scenes, folder = Scenes(12, image_size=64, split="val"), tmp_path / "copydays"
    for part in ("original", "strong", "others"):
        (folder / part).mkdir(parents=True)
    for number in range(4):
        scenes.read(number).save(folder / "original" / f"20{number}000.jpg")
        scenes.read(number).resize((32, 32)).save(folder / "strong" / f"20{number}001.jpg")
        scenes.read(4 + number).save(folder / "others" / f"{number}.png")
    Image.new("RGB", (64, 64)).save(folder / "strong" / "203002.jpg")
    return folder


def test_copies_are_searched_among_originals_and_distractors(copydays: Path, tmp_path: Path) -> None:
    (copydays / "original" / "._200000.jpg").write_bytes(b"of macOS")
    found = open_copydays(str(copydays), DEFAULT_LIMITS)
    assert [query.positives.tolist() for query in found.protocols["strong"]] == [[0], [1], [2], [3], [3]]
    others = str(copydays / "others")
    options = {**TINY, "data_path": copydays, "distractors_path": others, "output_dir": tmp_path / "out"}
    plain = run("copy-detection", words_of(options))
    assert plain["images"]["num_database"] == 8
    assert plain["results"]["strong"]["num_queries"] == 5
    assert plain["results"]["strong"]["map"] > 60  # smaller copies are found, the black image is not
    options |= {"whitening_path": others, "overwrite": "true"}
    run("copy-detection", words_of(options))


def test_a_copy_without_an_original_and_missing_folders_are_named(copydays: Path) -> None:
    (copydays / "original" / "202000.jpg").unlink()
    with pytest.raises(ValueError, match=r"strong/202001\.jpg has no original that begins with 2020"):
        open_copydays(str(copydays), DEFAULT_LIMITS)
    with pytest.raises(ValueError, match=r"original does not exist; get Copydays at https://lear"):
        open_copydays(str(copydays / "strong"), DEFAULT_LIMITS)
