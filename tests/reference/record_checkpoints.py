"""Record two runs of this repository as an earlier commit trained them, for today's code to read and to resume.

    git worktree add PATH 7f0d669
    python tests/reference/record_checkpoints.py --code PATH

Runs on a CPU in seconds. The earlier code trains DINO and CLIP for one epoch and a half of four, and the checkpoint is
kept. It then goes on from that checkpoint to the end; the losses of these epochs and one accuracy of the checkpoint are kept.

Most rows of the table of token embeddings belong to words that no caption has. They are set to zero in the kept
checkpoint before the earlier code goes on from it: so the file can be compressed, and no loss changes.
"""

import argparse
import datetime
import gzip
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
sys.path.insert(1, str(FOLDER.parent / "support"))
import small_models as s  # noqa: E402

EVALUATIONS = {
    "dino": ("knn", ["--data_path", "scenes:120:32", "--nb_knn", "5"]),
    "clip": ("zero-shot", ["--data_path", "scenes:60:32"]),
}
RUNS = {"dino": ("train", s.DINO_RUN), "clip": ("train-clip", s.CLIP_RUN)}
EVALUATION_WORDS = ["--device", "cpu", "--num_workers", "0", "--batch_size_per_gpu", "16"]


STOP = 12  # steps; an epoch has 8, so the checkpoint lies within the second one
VOCABULARY = 49408


def forget_unused_words(checkpoint: dict) -> None:
    """Set the embeddings of tokens without a gradient to zero."""
    (table,) = (value for value in checkpoint["model"].values() if value.shape[:1] == (VOCABULARY,))
    (state,) = (each for each in checkpoint["optimizer"]["state"].values() if each["exp_avg"].shape == table.shape)
    table[(state["exp_avg"] == 0).all(dim=1)] = 0


def epochs_of(folder: Path) -> list[dict]:
    """The epochs of log.txt."""
    return [json.loads(line) for line in (folder / "log.txt").read_text().splitlines()]


def record(name: str, folder: Path) -> dict:
    """Train, keep, evaluate, go on."""
    from dino_sparo.weights.checkpoint import load_checkpoint
    from dino_sparo.weights.folder import CheckpointFolder

    command, options = RUNS[name]
    words = [*s.words_of(options), "--output_dir", "."]
    s.command(command, *words, "--max_steps", STOP)
    newest = folder / "checkpoint.pth"
    checkpoint = load_checkpoint(newest)
    if name == "clip":
        forget_unused_words(checkpoint)
    CheckpointFolder(folder, keep=1).save(checkpoint)
    packed = FOLDER / "checkpoints" / f"{name}.pth.gz"
    packed.write_bytes(gzip.compress(newest.read_bytes(), mtime=0))

    evaluation, evaluation_words = EVALUATIONS[name]
    s.command(evaluation, "--pretrained_weights", newest, *evaluation_words, *EVALUATION_WORDS)
    result = json.loads((folder / f"{evaluation.replace('-', '_')}.json").read_text())
    top1 = result["results"][0]["top1"] if name == "dino" else result["top1"]

    first = epochs_of(folder)
    s.command(command, *words)
    later = epochs_of(folder)[len(first) :]
    return {
        "run": shlex.join([command, *words]),
        "stopped": f"--max_steps {STOP}",
        "evaluation": shlex.join([evaluation, *evaluation_words, *EVALUATION_WORDS]),
        "top1": top1,
        "losses": {str(epoch["epoch"]): epoch["train_loss"] for epoch in later},
    }


def main() -> None:
    """Record both runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", type=Path, required=True, help="work tree of the earlier commit")
    args = parser.parse_args()
    torch.set_num_threads(1)
    code = args.code.resolve()
    sys.path.insert(0, str(code))
    from dino_sparo.models import backbone

    assert Path(backbone.__file__).is_relative_to(code), backbone.__file__
    backbone.ARCHITECTURES[s.SMALL_ARCH] = backbone.ViTSize(**s.SMALL_SIZE)
    commit = subprocess.check_output(["git", "-C", str(code), "rev-parse", "HEAD"], text=True).strip()
    source = {
        "repository": "this one",
        "commit": commit,
        "command": "python tests/reference/record_checkpoints.py --code PATH",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            values = record(name, Path(folder))
            os.chdir(FOLDER)
        text = json.dumps({"source": source, **values}, indent=1)
        (FOLDER / "checkpoints" / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
