"""Zero-shot classification: class features, hits and ties, names of classes, templates, and the command."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

open_clip = pytest.importorskip("open_clip")

import oc_clip_fakes  # noqa: E402
from clip_fakes import call, colour_encoder, dot_product_scorer, evaluate, paint, small_checkpoint  # noqa: E402
from image_files import encoded, write_tar  # noqa: E402
from PIL import Image  # noqa: E402

from dino_sparo.clip import load_clip, tokenize  # noqa: E402
from dino_sparo.data.scenes.images import Scenes  # noqa: E402
from dino_sparo.data.scenes.patterns import COLOURS, SHAPES, TEXTURES  # noqa: E402
from dino_sparo.data.sources import open_source  # noqa: E402
from dino_sparo.data.sources.image_source import Subset  # noqa: E402
from dino_sparo.data.views import ClipView  # noqa: E402
from dino_sparo.image_text.evaluation.compositional.sets.scene_pairs import write_scene_pairs  # noqa: E402
from dino_sparo.image_text.evaluation.zero_shot import evaluate_zero_shot  # noqa: E402
from dino_sparo.image_text.prompts import (  # noqa: E402
    TEMPLATES,
    ClassList,
    apply_classes,
    open_classes,
    open_templates,
    prompts,
    scene_templates,
)
from dino_sparo.image_text.towers import without_padding  # noqa: E402

SLOTS, WIDTH = 5, 7


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return small_checkpoint(tmp_path / "run" / "checkpoint.pth")


def run(*options: object) -> dict:
    return evaluate("zero-shot", *options)


# --- class features


@pytest.mark.parametrize("num_templates", [1, 3])
def test_class_features_are_open_clips(weights, num_templates):
    templates = TEMPLATES["simple"][:num_templates]
    names = ["heart", "ring", "star", "cross"]
    encoder = dot_product_scorer(load_clip(weights), batch_size=1)  # of three templates two classes at a time
    expected = open_clip.build_zero_shot_classifier(
        encoder.model, lambda texts: tokenize(texts).ids, names, templates, num_classes_per_batch=3
    )
    found = encoder.encode_classes(names, templates)
    torch.testing.assert_close(found.payload, expected.t(), rtol=1e-5, atol=1e-6)
    assert found.num_truncated == 0


def test_padding_is_cut_off_after_the_longest_caption():
    ids = tokenize(["a!", "a b c !"]).ids
    short = without_padding(ids)
    assert short.shape == (2, 6)  # start, a, b, c, !, end; the id of ! is that of padding
    assert not ids[:, 6:].any()
    assert short[0].tolist() == ids[0, :6].tolist()


# --- hits


def test_accuracies_by_hand(tmp_path, caplog):
    """Two of three reds and the one green are right; the fourth red is no image and does not count."""
    for name, colour in (
        ("red/0", "red"),
        ("red/1", "red"),
        ("red/2", "blue"),
        ("red/3", "broken"),
        ("green/0", "green"),
    ):
        paint(tmp_path / f"{name}.png", colour)
    paint(tmp_path / "blue" / "0.png", "broken")
    source = open_source(str(tmp_path))
    found = evaluate_zero_shot(colour_encoder(), source, ["blue", "green", "red"], ("a {} thing",))
    assert (found["top1"], found["top5"], found["ties"]["images"]) == (75.0, 100.0, 0)
    assert found["mean_per_class_recall"] == pytest.approx(100 * (2 / 3 + 1) / 2)  # blue has no image
    recalls = [(row["name"], row["num_images"], row["recall"]) for row in found["per_class"]]
    assert recalls == [("blue", 0, None), ("green", 1, 100), ("red", 3, pytest.approx(200 / 3))]
    assert found["images"] == {"num_images": 4, "num_corrupt": 2}
    assert "left out 2 images that cannot be read" in caplog.text


def test_a_model_that_cannot_tell_is_at_chance_and_its_ties_are_counted(tmp_path):
    for name in ("a", "b", "c", "d"):
        paint(tmp_path / name / "0.png", "red")
    found = evaluate_zero_shot(colour_encoder(), open_source(str(tmp_path)), list("abcd"), ("{}",))
    assert (found["top1"], found["ties"]["images"]) == (25.0, 4)


def test_no_readable_image_is_an_error():
    unreadable = mock.Mock(payload=torch.zeros(0, 3), labels=torch.zeros(0, dtype=torch.int64), num_corrupt=3)
    scorer = mock.Mock(image_batches=lambda source: [unreadable], device=torch.device("cpu"))
    scorer.score_block.return_value = torch.zeros(0, 2)
    with pytest.raises(ValueError, match="none of 3 images can be read"):
        evaluate_zero_shot(scorer, Scenes(3, image_size=32), ["blue", "red"], ("{}",))


# --- classes


def named_images(classes: list[str]) -> Subset:
    """One image of each class."""
    numbers = np.arange(len(classes))
    return Subset(Scenes(len(classes)), numbers, numbers, classes)


def folders(root: Path, names: list[str]) -> str:
    for name in names:
        paint(root / name / "0.png", "red")
    return str(root)


def test_ids_of_timm_and_names_of_open_clip_are_in_the_same_order():
    from timm.data import ImageNetInfo

    described = [text.lower().split(", ") for text in ImageNetInfo().label_descriptions()]
    agreeing = sum(name.lower() in words for name, words in zip(open_clip.IMAGENET_CLASSNAMES, described, strict=True))
    shifted = sum(
        name.lower() in words for name, words in zip(open_clip.IMAGENET_CLASSNAMES[1:], described, strict=False)
    )
    assert len(ImageNetInfo().label_names()) == 1000
    assert agreeing > 700  # the others are spelled otherwise
    assert shifted < 10


def test_wordnet_folders_are_a_choice_among_imagenets_names(tmp_path):
    """As in ImageNet-A and -R: 200 folders are 200 classes, whatever their numbers among the 1000."""
    path = folders(tmp_path, ["n01440764", "n02123045", "n04254680"])
    classes = open_classes(open_source(path), data_path=path)
    assert classes.names == ["tench", "tabby cat", "soccer ball"]
    assert classes.class_of.tolist() == [0, 1, 2]
    everything = open_classes(open_source(path), "imagenet")
    assert len(everything.names) == 1000
    assert [everything.names[number] for number in everything.class_of] == classes.names


def test_numbered_folders_are_imagenets_numbers_and_not_their_alphabetical_order(tmp_path):
    """As in ImageNet V2, where folder 10 sorts before folder 2."""
    path = folders(tmp_path, ["0", "2", "10", "805"])
    source = open_source(path)
    with pytest.raises(ValueError, match="says nothing to a model; give their names with --classnames: imagenet"):
        open_classes(source, data_path=path)
    classes = open_classes(source, "imagenet")
    assert source.classes == ["0", "10", "2", "805"]
    assert classes.class_of.tolist() == [0, 10, 2, 805]
    relabelled = apply_classes(source, classes)
    assert [classes.names[label] for label in relabelled.labels] == [
        "tench",
        "brambling",
        "great white shark",
        "soccer ball",
    ]


@pytest.mark.parametrize(
    "text", ["x_y\ta cat\nz\tdog\nx y\t A  CAT\n", '{"x_y": "a cat", "x y": "a cat", "z": "dog"}', None]
)
def test_two_classes_of_one_name_are_refused(tmp_path, text):
    """The bug: images of the second class were never right, without a word."""
    source = open_source(folders(tmp_path / "images", ["x_y", "x y", "z"]))
    (tmp_path / "names.json" if text and "{" in text else tmp_path / "names.txt").write_text(text or "")
    names = "folders" if text is None else str(next(tmp_path.glob("names.*")))
    with pytest.raises(ValueError, match=r"two classes are called '(a cat|x y)'; give each class a name of its own"):
        open_classes(source, names)


def test_objectnet_is_cut_down_to_the_classes_it_shares(tmp_path):
    path = folders(tmp_path / "images", ["air_freshener", "alarm_clock", "basket"])
    mappings = tmp_path / "mappings"
    mappings.mkdir()
    names = {"air_freshener": "Air freshener", "alarm_clock": "Alarm clock", "basket": "Basket"}
    (mappings / "folder_to_objectnet_label.json").write_text(json.dumps(names))
    shared = {"Alarm clock": "analog clock; digital clock", "Basket": "shopping basket"}
    (mappings / "objectnet_to_imagenet_1k.json").write_text(json.dumps(shared))
    source = open_source(path)
    classes = open_classes(source, f"objectnet:{mappings}")
    assert classes.names == ["alarm clock", "basket"]
    chosen = apply_classes(source, classes)
    assert [chosen.location(i).split("/")[-2] for i in range(len(chosen))] == ["alarm_clock", "basket"]
    assert chosen.labels.tolist() == [0, 1]
    with pytest.raises(ValueError, match="come with ObjectNet in its folder `mappings`"):
        open_classes(source, "objectnet")


def test_names_come_from_files(tmp_path):
    source = open_source(folders(tmp_path / "images", ["b_c", "a"]))
    write(tmp_path / "list.txt", "B C\n\n other \n A\n")
    write(tmp_path / "lines.txt", "b_c\tbee\na\tay\n")
    write(tmp_path / "map.json", json.dumps({"b_c": "bee", "a": "ay", "z": "zed"}))
    write(tmp_path / "sets.json", json.dumps({"ours": ["b c", "a"], "theirs": ["x"]}))
    assert open_classes(source, "folders").names == ["a", "b c"]
    assert open_classes(source, str(tmp_path / "map.json")).names == ["ay", "bee"]
    assert open_classes(source, str(tmp_path / "lines.txt")).names == ["ay", "bee"]
    for name, expected in (("list.txt", ["A", "B C"]), ("sets.json:ours", ["a", "b c"])):
        classes = open_classes(source, f"{tmp_path}/{name}")
        assert [classes.names[place] for place in classes.class_of] == expected


def test_classes_that_are_numbers_are_places_in_a_list(tmp_path):
    """As in tar shards: a class without images still has its line."""
    source = open_source(folders(tmp_path / "images", ["0", "10", "2"]))
    write(tmp_path / "names.txt", "\n".join(f"name {i}" for i in range(11)))
    classes = open_classes(source, str(tmp_path / "names.txt"))
    assert [classes.names[number] for number in classes.class_of] == ["name 0", "name 10", "name 2"]


def test_numbers_of_classes_may_begin_with_one_but_where_the_list_begins_is_not_guessed(tmp_path):
    """The bug: folders 1 to 12 took the names in the order of texts, so that 2 was called "five"."""
    source = open_source(folders(tmp_path / "images", list(map(str, range(1, 13)))))
    for number, begins in ((12, 1), (13, None)):
        write(tmp_path / "names.txt", "\n".join(f"name {i + 1}" for i in range(number)))
        if begins is None:
            with pytest.raises(ValueError, match="has 13 names, and none for 12 of the 12 classes"):
                open_classes(source, str(tmp_path / "names.txt"))
        else:
            classes = open_classes(source, str(tmp_path / "names.txt"))
            named = [classes.names[place] for place in classes.class_of]
            assert named == [f"name {folder}" for folder in source.classes]


@pytest.mark.parametrize(
    ("classnames", "content", "message"),
    [
        ("nowhere.txt", None, "neither a file nor one of auto, imagenet"),
        ("names.txt", "one\ntwo\nthree\n", "has 3 names, and none for 2 of the 2 classes, the first is 'a'"),
        ("names.txt", "\n", "is empty; give a list"),
        ("names.json", "{", "is not valid JSON"),
        ("names.json", '{"a": "x"}', "names no class 'b'"),
        ("names.json", '{"s": ["x", "y"]}', "holds several lists; say which with .*names.json:KEY of s"),
        ("names.json:t", '{"s": ["x", "y"]}', "has no key 't'; its keys are s"),
        ("imagenet", None, "2 of the 2 classes are neither WordNet ids of ImageNet nor numbers up to 999"),
    ],
)
def test_names_that_do_not_fit_are_refused(tmp_path, monkeypatch, classnames, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        write(tmp_path / classnames.split(":")[0], content)
    with pytest.raises(ValueError, match=message):
        open_classes(open_source(folders(tmp_path / "images", ["a", "b"])), classnames)


def test_sets_whose_classes_have_no_words_ask_for_them():
    with pytest.raises(ValueError, match="gtsrb brings no names in words for its 2 classes"):
        open_classes(named_images(["0", "1"]), data_path="gtsrb:data")
    assert open_classes(named_images(["0", "1"]), data_path="mnist:data").names[:2] == ["zero", "one"]


def test_images_of_none_of_the_classes_are_refused(tmp_path):
    source = open_source(folders(tmp_path, ["a", "b"]))
    classes = open_classes(source)
    with pytest.raises(ValueError, match="no image belongs to any of the 2 classes"):
        apply_classes(source, ClassList(classes.names, np.array([-1, -1]), ""))


def write(path: Path, text: str) -> None:
    path.write_text(text)


# --- templates


def test_imagenets_templates_are_open_clips():
    assert len(TEMPLATES["openai"]) == 80
    expected = [template("tench") for template in open_clip.OPENAI_IMAGENET_TEMPLATES]
    assert prompts(TEMPLATES["openai"], "tench") == expected
    assert open_templates("auto", "data/imagenet") == TEMPLATES["openai"]
    assert open_templates("auto", "dtd:data") == TEMPLATES["dtd"]


def test_every_template_has_a_place_for_the_name():
    for name, templates in TEMPLATES.items():
        assert templates, name
        assert all(template.count("{}") == 1 for template in templates), name


def test_templates_of_scenes_speak_the_scenes_language_and_favour_nothing():
    templates = scene_templates()
    words = [template.replace("an ", "a ").split() for template in templates]
    for position, choices in ((1, COLOURS), (2, TEXTURES)):
        counts = [sum(word[position] == choice for word in words) for choice in choices]
        assert set(counts) == {len(templates) // len(choices)}
    assert prompts(templates, SHAPES[3])[0] == "a red dotted star on sand"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a photo\n", "'a photo' in .* has no place for the class name"),
        (None, "neither a file nor a known list; choose"),
    ],
)
def test_templates_that_do_not_fit_are_refused(tmp_path, content, message):
    path = tmp_path / "templates.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        open_templates(str(path))


def test_templates_of_clip_benchmark_are_read(tmp_path):
    (tmp_path / "templates.txt").write_text("a photo of {c}.\nthe {c}\n")
    assert open_templates(str(tmp_path / "templates.txt")) == ("a photo of {}.", "the {}")


# --- the view


def test_the_view_is_the_middle_at_full_height_and_a_border_is_cut_off(tmp_path):
    image = Image.new("RGB", (14, 10), (255, 0, 0))
    image.paste((0, 255, 0), (1, 1, 13, 9))
    view = ClipView(8, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), border=1)(image)[0]
    assert view.shape == (3, 8, 8)
    assert view[1].min() == 1.0
    assert view[0].max() == 0.0
    with pytest.raises(ValueError, match="border=-1"):
        ClipView(8, (0.0,) * 3, (1.0,) * 3, border=-1)
    with pytest.raises(ValueError, match="a border of 5 px on every side leaves nothing of an image of 14 x 10 px"):
        ClipView(8, (0.0,) * 3, (1.0,) * 3, border=5)(image)


# --- the command


def test_the_result_is_written_and_shown(weights, capsys):
    """Its content is compared with a recorded one in test_evaluation_records.py."""
    result = run("--pretrained_weights", weights, "--data_path", "scenes:23:32", "--templates", "plain")
    path = weights.parent / f"zero_shot_{weights.stem}_scenes-23-32.json"
    assert json.loads(path.read_text()) == result
    assert {"open_clip", "torch", "dino_sparo"} <= result["versions"].keys()
    printed = capsys.readouterr().out
    assert path.name in printed
    assert f"{result['top1']:.2f}" in printed


def test_half_precision_and_another_view_run(weights):
    options = ("--pretrained_weights", weights, "--data_path", "scenes:11:32", "--templates", "plain")
    result = run(*options, "--precision", "bf16", "--img_size", 24)
    assert result["view"]["crop"] == 24
    assert 0 <= result["top1"] <= result["top5"] <= 100


def test_any_split_can_be_evaluated_by_its_name_and_all_of_a_table(weights, tmp_path):
    for split, number in (("val", 1), ("test", 2), ("v2", 3)):
        for name in ("a", "b"):
            for index in range(number):
                paint(tmp_path / "data" / split / name / f"{index}.png", "blue")
    rows = [f"{split}/{name}/0.png,{name},{split}" for split in ("val", "test") for name in ("a", "b")]
    (tmp_path / "data" / "images.csv").write_text("\n".join(["path,label,split", *rows]))
    options = ("--pretrained_weights", weights, "--templates", "plain", "--data_path")
    assert run(*options, tmp_path / "data")["images"]["num_images"] == 2
    for split, number in (("test", 4), ("v2", 6)):
        assert run(*options, tmp_path / "data", "--split", split)["images"]["num_images"] == number
    assert run(*options, tmp_path / "data" / "images.csv", "--split", "all")["images"]["num_images"] == 4


def test_shards_of_clip_benchmark_are_evaluated_with_its_names_and_templates(weights, tmp_path):
    """The layout in which it publishes VTAB's sets; class 1 has no image."""
    root = tmp_path / "wds"
    members = []
    for number, (colour, label) in enumerate((("red", b"0"), ("blue", b"2"), ("green", b"0"))):
        image = encoded(Image.new("RGB", (7, 5), colour), "WEBP")
        members += [(f"s{number:07d}.webp", image), (f"s{number:07d}.cls", label)]
    write_tar(root / "test" / "0.tar", members)
    (root / "test" / "nshards.txt").write_text("1")
    (root / "classnames.txt").write_text("red\nwhite\ndark blue\n")
    (root / "zeroshot_classification_templates.txt").write_text("a photo of {c}.\n{c}!")
    words = ("--classnames", root / "classnames.txt", "--templates", root / "zeroshot_classification_templates.txt")
    result = run("--pretrained_weights", weights, "--data_path", root, *words)
    found = [(row["name"], row["num_images"]) for row in result["per_class"]]
    assert found == [("red", 2), ("white", 0), ("dark blue", 1)]
    assert result["prompts"]["templates"] == ["a photo of {}.", "{}!"]


def test_captions_that_are_too_long_are_counted(weights, tmp_path):
    (tmp_path / "templates.txt").write_text("{}\n" + "very " * 90 + "{}\n")
    options = ("--data_path", "scenes:10:32", "--templates", tmp_path / "templates.txt")
    assert run("--pretrained_weights", weights, *options)["prompts"]["num_truncated"] == len(SHAPES)


def test_nothing_is_evaluated_without_weights_images_or_labels(weights, tmp_path):
    with pytest.raises(ValueError, match="--pretrained_weights is empty"):
        run("--data_path", "scenes:10:32")
    with pytest.raises(ValueError, match="--data_path is empty"):
        run("--pretrained_weights", weights)
    paint(tmp_path / "flat" / "0.png", "red")
    with pytest.raises(ValueError, match="has no labels"):
        run("--pretrained_weights", weights, "--data_path", tmp_path / "flat")


@pytest.mark.slow
def test_slots_are_evaluated_alone(weights, tmp_path):
    """By a file and by their numbers; the numbers of a result are compared in test_evaluation_records.py."""
    path = tmp_path / "slots.json"
    path.write_text('{"slots": [3, 1]}')
    options = ("--pretrained_weights", weights, "--data_path", "scenes:23:32", "--slots", path)
    result = run(*options, "--output_dir", tmp_path / "slots")
    assert result["feature"]["dim"] == 2 * WIDTH
    assert result["slots"]["slots"] == [3, 1]
    by_number = run(*options[:-1], "3,1", "--output_dir", tmp_path / "slots")
    assert by_number.pop("slots") == {key: result["slots"][key] for key in ("kind", "slots", "num_slots", "rule")}
    del by_number["options"]
    assert by_number == {key: value for key, value in result.items() if key not in ("slots", "options")}
    path.write_text('{"slots": [5]}')
    for choice in (path, "5"):
        with pytest.raises(ValueError, match="name slot 5, which does not exist"):
            run(*options[:-1], choice)


# --- two processes


def evaluate_everything(folder: Path, weights: Path, pairs: Path) -> None:
    """Every evaluation, into `folder`; retrieval in blocks of which each process has some."""
    scenes = ("--data_path", "scenes:23:32")
    even = ("--data_path", "scenes:24:32")  # of an odd number, two processes train on one image twice
    trained = (*even, "--weight_decay", 0.01, "--epochs", 2, "--probe_batch_size", 6)
    asked = ("--data_root", pairs)
    commands = {"zero-shot": scenes, "retrieval": scenes, "compositional": asked, "clip-probe": trained}
    common = ("--pretrained_weights", weights, "--device", "cpu", "--num_workers", 0, "--batch_size_per_gpu", 6)
    for name, options in commands.items():
        with mock.patch("dino_sparo.image_text.evaluation.retrieval.IMAGE_CHUNK", 7):
            call(name, [*options, *common, "--output_dir", folder / name])


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [small_checkpoint, oc_clip_fakes.small_checkpoint], ids=["clip", "oc_clip"])
def test_two_processes_find_what_one_finds(checkpoint, two_ranks, tmp_path):
    """To the last digit: every image and caption is encoded once, in products of the same size.

    Of the probe, whose gradients are summed in another order, the result has accuracies alone.
    """
    weights, pairs = checkpoint(tmp_path / "checkpoint.pth"), write_scene_pairs(tmp_path / "pairs", 13, 32)
    evaluate_everything(tmp_path / "one", weights, pairs)
    two_ranks(evaluate_everything, tmp_path / "two", weights, pairs)
    files = {path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.json")}
    assert len(files) == 4
    for file in files:
        assert (tmp_path / "two" / file).read_bytes() == (tmp_path / "one" / file).read_bytes(), file
