"""Every command of the README of facebookresearch/dino runs here, made tiny; docs/from_dino.md lists them."""

import importlib
import json
import pickle
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from davis_files import write_davis

from dino_sparo.data.scenes.images import Scenes
from dino_sparo.evaluation.video.frames import list_pictures, write_video
from dino_sparo.models.architectures import size_of
from dino_sparo.models.backbone import Backbone
from dino_sparo.weights import encoder, hub, released

ROOT = Path(__file__).resolve().parents[1]
README = json.loads((ROOT / "tests" / "reference" / "dino_readme.json").read_text())
PAGE = (ROOT / "docs" / "from_dino.md").read_text()
CPU = "--device cpu --num_workers 0"
FOLDERS = (
    *("roxford5k/jpg", "rparis6k/jpg", "original", "strong", "whitening_data", "distractors"),
    *("output/frames", "output/attention"),
)
CROPS = "--global_crops_size 64 --local_crops_size 32 --local_crops_number 1"
TINY = {
    "main_dino.py": f"{CPU} {CROPS} --batch_size_per_gpu 2 --out_dim 64 --head_hidden_dim 32 --max_steps 1",
    "run_with_submitit.py": "--dry_run",
    "eval_knn.py": f"{CPU} --img_size 32 --nb_knn 2",
    "eval_linear.py": f"{CPU} --img_size 32 --fast --epochs 1",
    "visualize_attention.py": f"{CPU} --image_size 32",
    "eval_image_retrieval.py": f"{CPU} --imsize 64",
    "eval_copy_detection.py": f"{CPU} --imsize 64",
    "video_generation.py": "--device cpu --resize 64",
    "eval_video_segmentation.py": "--device cpu --img_size 64",
}


def row(entry: dict[str, Any]) -> str:
    """The line of the page's table."""
    link = f"https://github.com/{README['repository']}/blob/{README['commit'][:7]}/README.md?plain=1#L{entry['line']}"
    command = entry["command"].replace("python -m torch.distributed.launch", "torchrun").replace(" --use_env", "")
    return f"| [{entry['line']}]({link}) | `{command}` | {entry.get('difference', '')} |"


def test_the_page_has_every_command_and_its_difference() -> None:
    missing = [row(entry) for entry in README["commands"] if row(entry) not in PAGE]
    assert missing == [], "\n" + "\n".join(missing)


def random_release(folder: Path) -> Callable[..., Path]:
    """`released_file`, with random weights of the right architecture in place of a download."""

    def file(name: str, part: str = "pretrain") -> Path:
        release, path = released.RELEASES[name], folder / f"{name}_{part}.pth"
        if part == "linearweights":
            width = {"vit_small": 4 * 384, "vit_base": 2 * 768, "timm/resnet50": 2048}[release.arch]
            head = {"module.linear.weight": torch.randn(10, width), "module.linear.bias": torch.zeros(10)}
            torch.save({"state_dict": head, "epoch": 100}, path)
        elif (size := size_of(release.arch)) is not None:
            torch.save(Backbone(size, release.patch_size, 224).state_dict(), path)
        else:
            torch.save(hub.released_model(name, pretrained=False).state_dict(), path)
        return path

    return file


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """The paths of the README's commands -> drawn data in their layout."""
    scenes = Scenes(12, image_size=64, split="val")
    for number in range(12):
        image = scenes.read(number)
        for split in ("train", "val"):
            folder = tmp_path / "imagenet" / split / f"n{number % 10:02}"
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{number}.png")
        for folder in FOLDERS:
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            image.save(tmp_path / folder / f"20{number:02}00.jpg")
    names = [f"20{number:02}00" for number in range(12)]
    answers = [{"easy": [0], "hard": [1], "junk": [2]}, {"easy": [3], "hard": [4], "junk": []}]
    for dataset in ("roxford5k", "rparis6k"):
        truth = {"imlist": names, "qimlist": names[:2], "gnd": answers}
        (tmp_path / dataset / f"gnd_{dataset}.pkl").write_bytes(pickle.dumps(truth))
    write_davis(tmp_path / "davis-2017" / "DAVIS", ("wide",))
    folders = {"copydays": tmp_path, "revisited_paris_oxford": tmp_path, "saving_dir": tmp_path / "out"}
    return {"$HOME": str(tmp_path), **{f"/path/to/{name}": str(folder) for name, folder in folders.items()}}


@pytest.mark.slow
@pytest.mark.parametrize("entry", README["commands"], ids=lambda entry: f"line {entry['line']}")
def test_a_command_of_the_references_readme_runs(
    entry: dict[str, Any],
    data: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    for module in (encoder, released, importlib.import_module("dino_sparo.weights.checkpoint")):
        if hasattr(module, "released_file"):
            monkeypatch.setattr(module, "released_file", random_release(tmp_path))
    linear = importlib.import_module("dino_sparo.evaluation.linear.command")
    monkeypatch.setattr(linear, "released_file", random_release(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = [word for word in shlex.split(entry["command"]) if not word.startswith(("--nproc_per_node", "--use_env"))]
    place = next(index for index, word in enumerate(words) if word.endswith(".py"))
    script, options = words[place], words[place + 1 :]
    if "imagenet/train" in entry["command"] and script == "eval_linear.py":
        options = [option.removesuffix("/train") for option in options]
    for path, folder in data.items():
        options = [option.replace(path, folder).removesuffix("/") for option in options]
    options = [option.replace("/path/to/", f"{tmp_path}/") for option in options]
    if f"{tmp_path}/checkpoint.pth" in options:
        torch.save({"teacher": Backbone(size_of("vit_small"), 16, 32).state_dict()}, tmp_path / "checkpoint.pth")
    if "dino_deitsmall8_pretrain.pth" in options:
        random_release(tmp_path)("dino_vits8").rename("dino_deitsmall8_pretrain.pth")
    if script == "video_generation.py":
        pytest.importorskip("av")
        if "--video_only" not in options:
            shutil.rmtree("output/attention")  # it is what the command writes
    if "input/video.mp4" in options:
        Path("input").mkdir()
        write_video(list_pictures(Path("output/frames"))[:2], Path("input/video.mp4"), fps=5.0)
        shutil.rmtree("output/frames")
    main = importlib.import_module(script.removesuffix(".py")).main
    if "--help" in options:
        with pytest.raises(SystemExit) as end:
            main(options)
        assert end.value.code == 0
        assert "--data_path" in capsys.readouterr().out
        return
    main([*options, *TINY[script].split()])
