"""The wheel holds the package alone, and works in a fresh environment outside of the clone.

torch and the other dependencies are lent to that environment by a path file: to install them anew takes gigabytes. The
workflow `ci.yml` installs everything.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def run(*words: object, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes into the folder that it builds."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "dino_sparo", source / "dino_sparo", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for path in ROOT.glob("*.py"):
        shutil.copy(path, source)
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, source, folder=source)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_alone_with_all_its_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path for path in (ROOT / "dino_sparo").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert names == {path.relative_to(ROOT).as_posix() for path in files}


def test_demo_embed_and_attention_work_where_only_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "fresh", folder=tmp_path)
    bin_folder = tmp_path / "fresh" / "bin"
    (packages,) = (tmp_path / "fresh" / "lib").glob("python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(bin_folder / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, folder=tmp_path)
    where = run(bin_folder / "python", "-c", "import dino_sparo; print(dino_sparo.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(packages)
    command = bin_folder / "dino-sparo"
    run(command, "demo", "--short", "--output_dir", "demo", folder=tmp_path)
    (weights, *_) = sorted((tmp_path / "demo").rglob("checkpoint.pth"))
    rng = np.random.default_rng(0)
    for number in range(3):
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.fromarray(rng.integers(256, size=(50, 60, 3), dtype=np.uint8)).save(tmp_path / f"images/{number}.jpg")
    options = ("--pretrained_weights", weights, "--num_workers", "0")
    run(command, "embed", *options, "--data_path", "images", "--output_dir", "embeddings", folder=tmp_path)
    assert len(np.load(tmp_path / "embeddings" / "encoding.npy")) == 3
    run(command, "attention", *options, "--image_path", "images/0.jpg", "--output_dir", "maps", folder=tmp_path)
    assert list((tmp_path / "maps").glob("*.png"))
