"""Record the measures of davis2017-evaluation and the masks of DINO's label propagation, for tests/test_video_segmentation.py.

    git clone https://github.com/facebookresearch/dino DINO && git -C DINO checkout 7c446df
    git clone https://github.com/davisvideochallenge/davis2017-evaluation DAVIS && git -C DAVIS checkout ac7c43f
    pip install opencv-python-headless scikit-image
    python tests/reference/record_davis.py --dino DINO --davis DAVIS

Runs in seconds on a CPU. Videos, masks and features are drawn by ../support/davis_files.py. The model of DINO's script
is a stand-in that returns these features. Writes davis.json: the measures of each object, percent, and the masks of
each video as zlib in base64.
"""

import argparse
import base64
import json
import sys
import tempfile
import types
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "support"))
import davis_files as drawn  # noqa: E402

COMMITS = {
    "facebookresearch/dino": "7c446df5b9f45747937fb0d72314eb9f7b66930a",
    "davisvideochallenge/davis2017-evaluation": "ac7c43fca936f9722837b7fbd337d284ba37004b",
}


def record_measures(checkout: Path, root: Path) -> dict:
    """J and F of each object, as `evaluation_method.py --task semi-supervised` computes them."""
    sys.path.insert(0, str(checkout))
    from davis2017.evaluation import DAVISEvaluation

    for name, video in drawn.VIDEOS.items():
        for frame in range(video.num_frames):
            drawn.write_mask(drawn.predicted(name, frame), root / "results" / name / f"{frame:05}.png")
    found = DAVISEvaluation(str(root), task="semi-supervised", gt_set="val").evaluate(str(root / "results"))
    objects = list(found["J"]["M_per_object"])
    names = {"M": "Mean", "R": "Recall", "D": "Decay"}
    return {
        name: {
            f"{side}-{words}": 100 * float(found[side][letter][number]) for side in "JF" for letter, words in names.items()
        }
        for number, name in enumerate(objects)
    }


class Model:
    """Returns the drawn features of one frame after the other."""

    patch_embed = types.SimpleNamespace(patch_size=drawn.PATCH_SIZE)

    def __init__(self, name: str) -> None:
        self.name, self.frame = name, 0

    def get_intermediate_layers(self, images: torch.Tensor, n: int) -> list[torch.Tensor]:
        grid = [side // drawn.PATCH_SIZE for side in images.shape[-2:]]
        patches = drawn.features(self.name, self.frame, *grid).reshape(1, -1, drawn.WIDTH)
        self.frame += 1
        return [torch.cat([torch.zeros(1, 1, drawn.WIDTH), torch.from_numpy(patches)], dim=1)]


def record_masks(checkout: Path, root: Path) -> dict:
    """The masks that DINO's script writes."""
    sys.path.insert(0, str(checkout))
    torch.Tensor.cuda = lambda self, *_, **__: self
    import eval_video_segmentation as script

    masks = {}
    for name, video in drawn.VIDEOS.items():
        last, radius, topk = drawn.SETTINGS[name]
        script.args = types.SimpleNamespace(
            n_last_frames=last,
            size_mask_neighborhood=radius,
            topk=topk,
            patch_size=drawn.PATCH_SIZE,
            output_dir=str(root / "masks"),
        )
        folder = root / "JPEGImages" / "480p" / name
        frames = script.read_frame_list(str(folder))
        first, annotation = script.read_seg(
            frames[0].replace("JPEGImages", "Annotations").replace("jpg", "png"), drawn.PATCH_SIZE
        )
        palette = np.array(drawn.PALETTE, dtype=np.uint8)
        script.eval_video_tracking_davis(script.args, Model(name), frames, str(folder), first, annotation, palette)
        written = [np.asarray(Image.open(path)) for path in sorted((root / "masks" / name).glob("*.png"))]
        assert len(written) == video.num_frames
        masks[name] = base64.b64encode(zlib.compress(np.stack(written).tobytes(), 9)).decode()
    return masks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dino", type=Path, required=True, help="checkout of facebookresearch/dino")
    parser.add_argument("--davis", type=Path, required=True, help="checkout of davis2017-evaluation")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = drawn.write_davis(Path(folder))
        content = {
            "commits": COMMITS,
            "command": "python tests/reference/record_davis.py --dino DINO --davis DAVIS",
            "versions": {"torch": torch.__version__, "numpy": np.__version__},
            "objects": record_measures(args.davis, root),
            "masks": record_masks(args.dino, root),
        }
    (FOLDER / "davis.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
