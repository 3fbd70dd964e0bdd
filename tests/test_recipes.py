"""The recipes in configs/: each is read by its command, and its networks are built without memory."""

import argparse
import math
from pathlib import Path

import pytest
import torch
import yaml

from dino_sparo.clip.options import PRESETS as CLIP_PRESETS
from dino_sparo.clip.train import CLIPObjective
from dino_sparo.commands import COMMANDS
from dino_sparo.dino.options import fill_in_defaults
from dino_sparo.dino.train import DINOObjective
from dino_sparo.ibot import options as ibot_options
from dino_sparo.ibot.train import IBOTObjective
from dino_sparo.oc_clip.options import PRESETS as OC_CLIP_PRESETS
from dino_sparo.oc_clip.train import OCCLIPObjective
from dino_sparo.runtime.faults import UserError
from dino_sparo.simdino.train import SimDINOObjective

FOLDERS = Path(__file__).parents[1] / "configs", CLIP_PRESETS, OC_CLIP_PRESETS
FILES = sorted(path for folder in FOLDERS for path in folder.glob("*.yaml"))
MILLIONS = {  # parameters of the encoder, of both of a CLIP
    "dino_vits16_imagenet": 21.7,
    "dino_sparo_vits16_imagenet": 21.5,
    "dino_sparo_vits16_imagenet_phase1": 21.5,
    "dino_sparo_vits16_imagenet_phase2": 21.5,
    "dino_sparo_vits16_imagenet_80gb": 21.5,
    "dino_sparo_100k_images_80gb": 21.5,
    "dino_sparo_vitb16_imagenet": 81.9,
    "dino_sparo_10k_images": 21.5,
    "dino_sparo_100k_images": 21.5,
}
SIMDINO = "simdino_vitb16_imagenet"
IBOT = "ibot_dinov3_vits16_own_images"
PRESETS = {  # smallest number of parameters of the whole model
    **{"cc3m": 1e8, "cc12m": 1e8, "cc15m": 1e8, "laion400m": 1e8},
    **{"oc-coco": 1e8, "oc-cc12m": 8e7, "oc-scenes": 1e6},
}


def options_of(command: str, *words: str) -> argparse.Namespace:
    parser = COMMANDS[command].parser
    assert parser is not None
    return parser().parse_args(words)


def recipe(name: str) -> argparse.Namespace:
    (file,) = [file for file in FILES if file.stem == name]
    return options_of(yaml.safe_load(file.read_text())["command"], "--config", str(file))


@pytest.mark.parametrize("name", MILLIONS)
def test_the_networks_of_a_recipe_of_dino_can_be_built(name: str) -> None:
    args = recipe(name)
    fill_in_defaults(args)
    with torch.device("meta"):
        network = DINOObjective.build_network(args, args.drop_path_rate)
    millions = sum(parameter.numel() for parameter in network.encoder.parameters()) / 1e6
    assert millions == pytest.approx(MILLIONS[name], abs=0.1)


@pytest.mark.parametrize(("name", "least"), PRESETS.items())
def test_a_preset_is_the_file_of_its_name_and_its_networks_can_be_built(name: str, least: float) -> None:
    args, is_oc_clip = recipe(name), name.startswith("oc")
    by_preset = options_of("train-oc-clip" if is_oc_clip else "train-clip", "--preset", name)
    assert vars(args) == {**vars(by_preset), "preset": None}
    kind = OCCLIPObjective if is_oc_clip else CLIPObjective
    kind.check_options(args)
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in kind.build_model(args).parameters()) > least


def test_the_recipe_of_simdino_is_the_authors_command_and_its_networks_can_be_built() -> None:
    """Their command names --arch, --local_crops_number, --eps and --coeff; all else is the default, theirs and ours."""
    args, defaults = recipe(SIMDINO), options_of("train-simdino", "--warmup_epochs", "10", "--patch_size", "16")
    as_lists = [{k: list(v) if isinstance(v, tuple) else v for k, v in vars(a).items()} for a in (args, defaults)]
    changed = {name for name, value in as_lists[0].items() if value != as_lists[1][name]}
    assert changed == {"readout", "arch", "local_crops_number"}
    SimDINOObjective.check_options(args)
    with torch.device("meta"):
        network = SimDINOObjective.build_network(args, args.drop_path_rate)
    assert sum(parameter.numel() for parameter in network.encoder.parameters()) == pytest.approx(85.8e6, abs=1e5)


def test_the_recipe_of_ibot_states_the_defaults_for_released_weights() -> None:
    args, defaults = recipe(IBOT), options_of("train-ibot", "--pretrained", "true", "--epochs", "30")
    ibot_options.fill_in_defaults(defaults)
    for name in ("lr", "freeze_backbone_epochs", "layer_decay"):
        assert getattr(args, name) == getattr(defaults, name)
    IBOTObjective.check_options(args)


def test_every_recipe_is_among_these() -> None:
    assert {file.stem for file in FILES} == MILLIONS.keys() | PRESETS.keys() | {SIMDINO, IBOT}


def test_dino_with_sparo_on_imagenet_is_the_default_and_differs_from_dino_in_the_readout_alone() -> None:
    sparo, vanilla, defaults = recipe("dino_sparo_vits16_imagenet"), recipe("dino_vits16_imagenet"), options_of("train")
    fill_in_defaults(defaults)
    defaults.patch_size = 16  # left open until the architecture is known
    as_lists = ({k: list(v) if isinstance(v, tuple) else v for k, v in vars(a).items()} for a in (sparo, defaults))
    assert next(as_lists) == next(as_lists)
    assert {name for name, value in vars(sparo).items() if value != vars(vanilla)[name]} == {"readout"}


def test_the_second_phase_has_crops_of_twice_the_size_and_the_schedules_go_on() -> None:
    """tests/distillation/test_initialize.py starts from a run with smaller crops."""
    phases = [recipe(f"dino_sparo_vits16_imagenet_phase{phase}") for phase in (1, 2)]
    whole = recipe("dino_sparo_vits16_imagenet")
    assert sum(phase.epochs for phase in phases) == whole.epochs
    done = phases[0].epochs / whole.epochs
    for begin, end in (("weight_decay", "weight_decay_end"), ("momentum_teacher", None)):
        last = 1.0 if end is None else getattr(whole, end)
        value = last + (getattr(whole, begin) - last) * (1 + math.cos(math.pi * done)) / 2
        assert getattr(phases[1], begin) == pytest.approx(value, abs=1e-3)
    after_warmup = (phases[0].epochs - whole.warmup_epochs) / (whole.epochs - whole.warmup_epochs)
    assert phases[1].lr == pytest.approx(whole.lr * (1 + math.cos(math.pi * after_warmup)) / 2, rel=0.02)
    assert [phase.global_crops_size for phase in phases] == [112, 224]


def test_the_second_phase_alone_is_refused() -> None:
    with pytest.raises(UserError, match="--init_optimizer true needs --init_from FILE"):
        DINOObjective.check_options(recipe("dino_sparo_vits16_imagenet_phase2"))


@pytest.mark.parametrize(("name", "gpus"), [("dino_sparo_vits16_imagenet", 8), ("dino_sparo_100k_images", 1)])
def test_a_recipe_for_80_gb_has_the_whole_batch_on_one_gpu_and_changes_nothing_else(name: str, gpus: int) -> None:
    small, large = (vars(recipe(f"{name}{end}")) for end in ("", "_80gb"))
    whole = gpus * small["batch_size_per_gpu"] * small["grad_accum_steps"]
    assert large == {**small, "batch_size_per_gpu": whole, "grad_accum_steps": 1}


def test_no_recipe_names_data_or_an_output_folder() -> None:
    assert FILES
    for file in FILES:
        assert not {"data_path", "output_dir"} & yaml.safe_load(file.read_text()).keys()
