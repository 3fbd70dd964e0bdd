"""Embeddings of captions: a CLIP's score is their dot product with images; kills and resumes; what is refused."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import oc_clip_fakes
import pytest
import torch
from clip_fakes import call, small_checkpoint
from kills import killed_at
from PIL import Image
from refusals import refused
from two_ranks import TwoRanks

from dino_sparo.__main__ import run
from dino_sparo.clip.model import load_clip, normalize_slots
from dino_sparo.evaluation.embed import store
from dino_sparo.evaluation.embed.store import EmbeddingWriter, load_embeddings
from dino_sparo.image_text.towers import tokenize
from dino_sparo.models.encoder import create_encoder
from dino_sparo.oc_clip.load import load_oc_clip
from dino_sparo.runtime.launch import shutdown
from dino_sparo.weights.encoder import load_encoder
from dino_sparo.weights.entries import encoder_description

CAPTIONS = ("a red square", "a blue square", "a red square", "a green disc", "two discs", "a dog on a lawn", "nothing")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A table of images and captions."""
    rng = np.random.default_rng(0)
    with open(tmp_path / "pairs.csv", "w", newline="") as file:
        csv.writer(file).writerow(("path", "caption"))
        for number, caption in enumerate(CAPTIONS):
            Image.fromarray(rng.integers(256, size=(20, 23, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
            csv.writer(file).writerow((f"{number}.png", caption))
    return tmp_path / "pairs.csv"


def words_of(weights: Path, pairs: Path, out: Path, *more: str) -> list[str]:
    fixed = ("--batch_size_per_gpu", "2", "--num_workers", "0", "--device", "cpu", "--split", "all")
    return ["--pretrained_weights", str(weights), "--data_path", str(pairs), "--output_dir", str(out), *fixed, *more]


def embed(*words: Any) -> dict[str, Any]:
    try:
        return run("embed", words_of(*words))
    finally:
        shutdown()


def test_captions_and_images_of_a_clip_meet_in_its_score(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = small_checkpoint(tmp_path / "clip.pth")
    embed(weights, pairs, tmp_path / "captions", "--what", "captions")
    assert "7 captions -> captions " in capsys.readouterr().out
    embed(weights, pairs, tmp_path / "images", "--what", "slots")
    captions, images = load_embeddings(tmp_path / "captions"), load_embeddings(tmp_path / "images")
    assert captions.index["caption"] == list(CAPTIONS)
    assert [Path(path).name for path in captions.index["path"]] == [f"{number}.png" for number in range(7)]
    loaded = load_clip(weights)
    # The view of embeddings is that of k-NN, somewhat larger than CLIP's before the crop.
    pictures = load_encoder(weights).transform([Image.open(tmp_path / f"{number}.png") for number in range(7)])
    slots = normalize_slots(torch.from_numpy(images.arrays["slots"].copy()))
    scores = slots @ torch.from_numpy(captions.arrays["captions"].copy()).T
    torch.testing.assert_close(scores, loaded.similarity(pictures, CAPTIONS), rtol=1e-3, atol=1e-4)


def test_captions_are_neither_clustered_nor_compared_with_images(pairs: Path, tmp_path: Path) -> None:
    weights = small_checkpoint(tmp_path / "clip.pth")
    folders = [str(tmp_path / name) for name in ("captions", "encoding")]
    for folder in folders:
        embed(weights, pairs, Path(folder), "--what", Path(folder).name)
    for words in (["cluster", folders[0]], ["predict", folders[1], "--images", folders[0]], ["predict", *folders[:1]]):
        with refused(f"{folders[0]} holds captions; give a folder with embeddings of images"):
            run(words[0], words[1:])


def test_captions_of_an_oc_clip_are_its_text_encoders_output(pairs: Path, tmp_path: Path) -> None:
    weights = oc_clip_fakes.small_checkpoint(tmp_path / "oc_clip.pth")
    embed(weights, pairs, tmp_path / "captions", "--what", "captions")
    model = load_oc_clip(weights).model
    with torch.inference_mode():
        expected = model.encode_text(tokenize(CAPTIONS, model.config.text.context_length).ids)
    found = torch.from_numpy(load_embeddings(tmp_path / "captions").arrays["captions"].copy())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_killed_run_resumes_to_the_same_bytes(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = small_checkpoint(tmp_path / "clip.pth")
    monkeypatch.setattr(store, "CHUNK_BATCHES", 1)
    embed(weights, pairs, tmp_path / "undisturbed", "--what", "captions")
    with monkeypatch.context() as patch:
        patch.setattr(EmbeddingWriter, "finish_chunk", killed_at(3, EmbeddingWriter.finish_chunk))
        with pytest.raises(SystemExit):
            embed(weights, pairs, tmp_path / "out", "--what", "captions")
    embed(weights, pairs, tmp_path / "out", "--what", "captions")
    for path in (tmp_path / "undisturbed").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def embed_on_a_rank(weights: Path, pairs: Path, out: Path) -> None:
    store.CHUNK_BATCHES = 1
    call("embed", words_of(weights, pairs, out, "--what", "captions"))


def test_other_captions_of_the_same_number_are_other_embeddings(pairs: Path, tmp_path: Path) -> None:
    weights = small_checkpoint(tmp_path / "clip.pth")
    embed(weights, pairs, tmp_path / "captions", "--what", "captions")
    pairs.write_text(pairs.read_text().replace("a green disc", "a green ring"))
    with refused("holds other embeddings (captions"):
        embed(weights, pairs, tmp_path / "captions", "--what", "captions")


@pytest.mark.slow
def test_two_processes_write_one_result(
    pairs: Path, tmp_path: Path, two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = small_checkpoint(tmp_path / "clip.pth")
    monkeypatch.setattr(store, "CHUNK_BATCHES", 1)
    embed(weights, pairs, tmp_path / "one", "--what", "captions")
    two_ranks(embed_on_a_rank, weights, pairs, tmp_path / "two")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_an_encoder_of_images_alone_embeds_no_captions(pairs: Path, tmp_path: Path) -> None:
    encoder = create_encoder("vit_micro", 8, "cls", img_size=16)
    description = encoder_description(encoder.config, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    torch.save({"teacher": encoder.state_dict(), "encoder": description}, tmp_path / "dino.pth")
    with refused("dino.pth holds no text encoder; give a checkpoint of train-clip or train-oc-clip"):
        embed(tmp_path / "dino.pth", pairs, tmp_path / "out", "--what", "captions")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--what", "captions", "encoding"), "captions and images have different rows; embed them into two folders"),
        (("--captions", "captions.json"), "--captions captions.json without --what captions"),
    ],
)
def test_captions_stand_alone(words: tuple[str, ...], message: str, pairs: Path, tmp_path: Path) -> None:
    with refused(message):
        embed(small_checkpoint(tmp_path / "clip.pth"), pairs, tmp_path / "out", *words)
