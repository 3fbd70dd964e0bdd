"""The recipes in configs/: each is read by its command, and its networks are built without memory."""

import argparse
import re
from pathlib import Path

import pytest
import torch
import yaml

from dino_sparo.__main__ import COMMANDS
from dino_sparo.clip.options import RECIPES as CLIP_RECIPES
from dino_sparo.clip.train import build_model as build_clip
from dino_sparo.clip.train import check_options as check_clip
from dino_sparo.dino.options import check_options as check_dino
from dino_sparo.dino.options import fill_in_defaults
from dino_sparo.dino.train import build_network
from dino_sparo.oc_clip.presets import RECIPES as OC_CLIP_RECIPES
from dino_sparo.oc_clip.train import build_model as build_oc_clip
from dino_sparo.oc_clip.train import check_options as check_oc_clip

FILES = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
MILLIONS = {  # parameters of the encoder, of both of a CLIP
    "dino_vits16_imagenet": 21.7,
    "dino_sparo_vits16_imagenet": 21.5,
    "dino_sparo_vitb16_imagenet": 81.9,
    "dino_sparo_10k_images": 21.5,
    "dino_sparo_100k_images": 21.5,
}
PRESETS = {
    "clip_sparo_cc3m": "cc3m",
    "clip_sparo_cc12m": "cc12m",
    "clip_sparo_cc15m": "cc15m",
    "clip_sparo_laion400m": "laion400m",
    "oc_clip_coco": "oc-coco",
}


def command_of(file: Path) -> str:
    """The training that the command in the file's comment runs."""
    (command,) = set(re.findall(r"dino[-_]sparo (train[a-z-]*|submit) .*--config", file.read_text()))
    return "train" if command == "submit" else command


def options_of(file: Path) -> argparse.Namespace:
    parser = COMMANDS[command_of(file)].parser
    assert parser is not None
    return parser().parse_keywords(yaml.safe_load(file.read_text()))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_read_by_its_command_and_its_networks_can_be_built(file: Path) -> None:
    args, command = options_of(file), command_of(file)
    if command == "train":
        check_dino(args)
        fill_in_defaults(args)
        with torch.device("meta"):
            network = build_network(args, args.drop_path_rate)
        millions = sum(parameter.numel() for parameter in network.encoder.parameters()) / 1e6
        assert millions == pytest.approx(MILLIONS[file.stem], abs=0.1)
        return
    check, build = {"train-clip": (check_clip, build_clip), "train-oc-clip": (check_oc_clip, build_oc_clip)}[command]
    check(args)
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in build(args).parameters()) > 1e8


@pytest.mark.parametrize(("name", "preset"), PRESETS.items())
def test_a_recipe_of_a_paper_is_the_preset_of_its_name(name: str, preset: str) -> None:
    (file,) = [file for file in FILES if file.stem == name]
    recipes = OC_CLIP_RECIPES if name.startswith("oc_clip") else CLIP_RECIPES
    values = yaml.safe_load(file.read_text())
    expected = {**recipes.defaults, **recipes.presets[preset].values}
    # Values that only other read-outs use may be left out.
    assert {key: values[key] for key in expected if key != "embed_dim"} == {
        key: value for key, value in expected.items() if key != "embed_dim"
    }


def test_dino_with_sparo_on_imagenet_is_the_default_and_differs_from_dino_in_the_readout_alone() -> None:
    sparo, vanilla = (
        options_of(file) for file in FILES if file.stem in ("dino_sparo_vits16_imagenet", "dino_vits16_imagenet")
    )
    defaults = options_of_nothing()
    fill_in_defaults(defaults)
    assert repr_of(sparo) == repr_of(defaults)
    assert {name for name, value in vars(sparo).items() if value != vars(vanilla)[name]} == {"readout"}


def repr_of(args: argparse.Namespace) -> dict[str, object]:
    """The options, whose ranges a default gives as a tuple and a parser as a list."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(args).items()}


def options_of_nothing() -> argparse.Namespace:
    parser = COMMANDS["train"].parser
    assert parser is not None
    return parser().parse_args([])


def test_no_recipe_names_data_or_an_output_folder() -> None:
    assert FILES
    for file in FILES:
        assert not {"data_path", "output_dir"} & yaml.safe_load(file.read_text()).keys()
