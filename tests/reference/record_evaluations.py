"""Train one small CLIP, and record what every evaluation of it writes.

    python tests/reference/record_evaluations.py           # with the code of the commit to record

Runs on a CPU in a minute. `--keep_model` takes the checkpoint that is there, and records the evaluations alone.

Accuracies and counts are compared exactly, so no decision may be so near that rounding makes it. The recorder shows it:
it runs all evaluations again with noise on every feature, a thousand times larger than rounding, and records nothing if
an accuracy or a count then differs. Floats that depend on features, such as a learned mask, may differ by the noise.
"""

import argparse
import datetime
import gzip
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

FOLDER = Path(__file__).resolve().parent
sys.path[1:1] = [str(FOLDER.parent / "support"), str(FOLDER.parent.parent)]

import small_models as s  # noqa: E402
import test_evaluation_records as t  # noqa: E402

from dino_sparo.weights.checkpoint import load_checkpoint  # noqa: E402
from dino_sparo.models.architectures import ARCHITECTURES, ViTSize  # noqa: E402

TRAINING = {**s.CLIP_RUN, "data_path": "scenes:1024:32", "batch_size": 64, "epochs": 40, "warmup_steps": 20}
NOISE = 1e-4  # of a feature's length; rounding is 1e-7
DRAWS = 8
VOCABULARY = 49408


def train(folder: Path) -> bytes:
    """The checkpoint of a trained model without what only training needs, tokens without a gradient set to zero."""
    s.command("train-clip", *s.words_of(TRAINING), "--output_dir", folder)
    checkpoint = load_checkpoint(folder / "checkpoint.pth")
    (table,) = (value for value in checkpoint["model"].values() if value.shape[:1] == (VOCABULARY,))
    (state,) = (each for each in checkpoint["optimizer"]["state"].values() if each["exp_avg"].shape == table.shape)
    table[(state["exp_avg"] == 0).all(dim=1)] = 0
    file = io.BytesIO()
    torch.save({name: checkpoint[name] for name in ("model", "clip", "epoch")}, file)
    return file.getvalue()


def evaluate_all(folder: Path) -> dict[str, dict]:
    """What every command writes."""
    return {name: t.evaluate(name, folder) for name in t.EVALUATIONS}


def noisy_normalize(seed: int):
    """`F.normalize` whose results have noise; features of both towers pass it."""
    generator, normalize = torch.Generator().manual_seed(seed), F.normalize

    def with_noise(values: torch.Tensor, *arguments: object, **options: object) -> torch.Tensor:
        unit = normalize(values, *arguments, **options)
        noise = torch.randn(unit.shape, generator=generator) / unit.shape[-1] ** 0.5
        return unit + NOISE * noise * unit.norm(dim=-1, keepdim=True)

    return with_noise


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep_model", action="store_true", help="take the checkpoint that is there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ARCHITECTURES[s.SMALL_ARCH] = ViTSize(**s.SMALL_SIZE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        if not args.keep_model:
            packed = gzip.compress(train(folder), mtime=0)
            (FOLDER / "checkpoints" / "evaluated.pth.gz").write_bytes(packed)
        s.unpack("evaluated", folder)
        t.write_data(folder)
        results = evaluate_all(folder)
        t.RELATIVE, t.ABSOLUTE = 100 * NOISE, 100 * NOISE  # one of 100 images is more
        plain = F.normalize
        failures = []
        for seed in range(DRAWS):
            F.normalize = noisy_normalize(seed)
            for evaluation, result in evaluate_all(folder).items():
                try:
                    t.assert_same(result, results[evaluation], evaluation)
                except AssertionError as error:
                    failures.append(f"draw {seed}: {' '.join(str(error).split())[:150]}")
        F.normalize = plain
        os.chdir(FOLDER)
    if failures:
        sys.exit("\n".join([*failures, "these lie too near to a tie; change the training or the data"]))
    commit = subprocess.check_output(["git", "-C", str(FOLDER), "rev-parse", "HEAD"], text=True).strip()
    source = {
        "repository": "this one",
        "commit": commit,
        "command": "python tests/reference/record_evaluations.py",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    for evaluation, result in results.items():
        command = " ".join(map(str, t.EVALUATIONS[evaluation]))
        text = json.dumps({"source": {**source, "evaluation": command}, "result": result}, indent=1)
        (FOLDER / "evaluations" / f"{evaluation}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
