"""Record 30 steps of iBOT by the modules of facebookresearch/dinov2, and the Gram loss of facebookresearch/dinov3.

    python tests/reference/record_ibot.py --dinov2 PATH --dinov3 PATH

PATH is a checkout; neither needs to be installed. Vision transformer, heads, masks, losses, Sinkhorn-Knopp and KoLeo are
theirs, in float64; the loop around them follows `dinov2/train/ssl_meta_arch.py`. Losses and masks of each step, and norm
and sum of each final weight, go to ibot.npz.
"""

import argparse
import datetime
import json
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

if __name__ == "__main__":
    import weights as w
else:
    from reference import weights as w

FOLDER = Path(__file__).parent
STEPS, LR, DECAY, MOMENTUM, TEMPERATURE = 30, 0.002, 0.05, 0.95, 0.05
VIT = {"img_size": 32, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
HEAD = {"hidden_dim": 17, "bottleneck_dim": 7}
BATCH, LOCAL, LOCAL_SIDE, OUT_DIM = 3, 2, 16, 13
RATIOS, PROBABILITY = (0.1, 0.5), 0.5
IMAGE_WEIGHT, PATCH_WEIGHT, KOLEO_WEIGHT = 1.0, 0.7, 0.1
# Name -> Sinkhorn-Knopp instead of centers, prototypes of the patches' own head (None: shared).
CASES: dict[str, tuple[bool, int | None]] = {"centering": (False, None), "sinkhorn": (True, 11)}
MASK_SEEDS, MASK_GRID, MASK_CROPS = range(5), (14, 14), 12
GRAM_SIZE = (3, 5, 7)


def crops_of_step(step: int) -> list[Tensor]:
    """Two global and two local crops (B, 3, H, W), float64."""
    sides = [VIT["img_size"]] * 2 + [LOCAL_SIDE] * LOCAL
    return [torch.from_numpy(w.images(f"ibot{step}/{i}", BATCH, side, side)).double() for i, side in enumerate(sides)]


def generated(shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights under our names, float64."""
    return {name: torch.from_numpy(value).double() for name, value in w.state(shapes, "ibot/").items()}


def our_names(network: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Weights of dinov2's modules under our names."""
    prefixes = {"backbone": "backbone.", "dino_head": "head.", "ibot_head": "head.patches.head."}
    named = {prefixes[part] + key: p for part, module in network.items() for key, p in module.named_parameters()}
    return {name.replace("backbone.mask_token", "head.patches.mask_token"): p for name, p in named.items()}


def summary(weights: Mapping[str, Tensor]) -> np.ndarray:
    """Norm and sum of each weight, in the order of their names. A bias of the keys has no gradient but rounding."""
    names = sorted(name for name in weights if not name.endswith("qkv.bias"))
    return np.array([[weights[name].norm().item(), weights[name].sum().item()] for name in names])


def build(patch_out_dim: int | None) -> dict[str, nn.Module]:
    from dinov2.layers import DINOHead, MemEffAttention
    from dinov2.layers import NestedTensorBlock as Block
    from dinov2.models.vision_transformer import DinoVisionTransformer

    block = partial(Block, attn_class=MemEffAttention)
    network: dict[str, nn.Module] = {
        "backbone": DinoVisionTransformer(**VIT, block_fn=block, block_chunks=0),
        "dino_head": DINOHead(VIT["embed_dim"], OUT_DIM, **HEAD),
    }
    if patch_out_dim is not None:
        network["ibot_head"] = DINOHead(VIT["embed_dim"], patch_out_dim, **HEAD)
    own = our_names(network)
    values = generated({name: tuple(p.shape) for name, p in own.items()})
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(values[name])
    return network


class Loop:
    """dinov2's step on one process, of its own modules."""

    def __init__(self, sinkhorn: bool, patch_out_dim: int | None) -> None:
        from dinov2.data.masking import MaskingGenerator
        from dinov2.loss import DINOLoss, KoLeoLoss, iBOTPatchLoss

        self.sinkhorn = sinkhorn
        self.student, self.teacher = build(patch_out_dim), build(patch_out_dim)
        self.dino_loss, self.patch_loss = DINOLoss(OUT_DIM), iBOTPatchLoss(patch_out_dim or OUT_DIM)
        self.koleo = KoLeoLoss()
        side = VIT["img_size"] // VIT["patch_size"]
        self.generator = MaskingGenerator((side, side), max_num_patches=side // 2 * side)
        named = our_names(self.student)
        flat = [p for name, p in named.items() if name.endswith(".bias") or p.ndim == 1]
        flat_ids = {id(p) for p in flat}
        groups = [
            {"params": [p for p in named.values() if id(p) not in flat_ids], "weight_decay": DECAY},
            {"params": flat, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR)

    def heads(self, network: Mapping[str, nn.Module]) -> tuple[nn.Module, nn.Module]:
        return network["dino_head"], network.get("ibot_head", network["dino_head"])

    @torch.no_grad()
    def targets(self, images: Tensor, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        found = self.teacher["backbone"].forward_features(images)
        first, second = found["x_norm_clstoken"].chunk(2)
        head, patch_head = self.heads(self.teacher)
        logits = head(torch.cat((second, first)))
        patches = patch_head(found["x_norm_patchtokens"].flatten(0, 1)[data["mask_indices_list"]])
        if self.sinkhorn:
            number = data["n_masked_patches"]
            return (
                self.dino_loss.sinkhorn_knopp_teacher(logits, TEMPERATURE),
                self.patch_loss.sinkhorn_knopp_teacher(patches, TEMPERATURE, n_masked_patches_tensor=number),
            )
        probabilities = self.dino_loss.softmax_center_teacher(logits, TEMPERATURE)
        self.dino_loss.update_center(logits)
        masked = self.patch_loss.softmax_center_teacher(patches[None], TEMPERATURE)[0]
        self.patch_loss.update_center(patches[None])
        return probabilities, masked

    def step(self, number: int) -> tuple[list[float], np.ndarray]:
        """Losses of images, of patches, KoLeo; the masks."""
        from dinov2.data.collate import collate_data_and_cast

        crops = crops_of_step(number)
        samples = [
            ({"global_crops": [c[i] for c in crops[:2]], "local_crops": [c[i] for c in crops[2:]]},)
            for i in range(BATCH)
        ]
        random.seed(number)
        patches = (VIT["img_size"] // VIT["patch_size"]) ** 2
        data = collate_data_and_cast(samples, RATIOS, PROBABILITY, torch.float64, patches, self.generator)
        targets, patch_targets = self.targets(data["collated_global_crops"], data)
        masks, head, patch_head = data["collated_masks"], *self.heads(self.student)
        whole = self.student["backbone"].forward_features(data["collated_global_crops"], masks)
        local = self.student["backbone"].forward_features(data["collated_local_crops"])["x_norm_clstoken"]
        tokens = whole["x_norm_patchtokens"].flatten(0, 1)[data["mask_indices_list"]]
        pairs = 2 + 2 * LOCAL
        image_loss = self.dino_loss(head(local).chunk(LOCAL), targets.chunk(2)) / pairs
        image_loss = image_loss + self.dino_loss([head(whole["x_norm_clstoken"])], [targets]) * 2 / pairs
        koleo = sum(self.koleo(part) for part in whole["x_norm_clstoken"].chunk(2))
        patch_loss = self.patch_loss.forward_masked(
            patch_head(tokens), patch_targets, masks, len(tokens), data["masks_weight"]
        )
        self.optimizer.zero_grad()
        (IMAGE_WEIGHT * image_loss + PATCH_WEIGHT * patch_loss + KOLEO_WEIGHT * koleo).backward()
        self.optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(our_names(self.teacher).values(), our_names(self.student).values(), strict=True):
                mine.mul_(MOMENTUM).add_(theirs, alpha=1 - MOMENTUM)
        return [image_loss.item(), patch_loss.item(), koleo.item()], masks.numpy()


def record_steps() -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name, (sinkhorn, patch_out_dim) in CASES.items():
        loop = Loop(sinkhorn, patch_out_dim)
        losses, masks = zip(*(loop.step(number) for number in range(STEPS)), strict=True)
        arrays |= {f"{name}/losses": np.array(losses), f"{name}/masks": np.packbits(np.stack(masks))}
        for which in ("student", "teacher"):
            arrays[f"{name}/{which}"] = summary(our_names(getattr(loop, which)))
        if not sinkhorn:
            for part in (loop.dino_loss, loop.patch_loss):
                part.apply_center_update()
                arrays[f"{name}/{type(part).__name__}"] = part.center.flatten().numpy()
    return arrays


def record_masks() -> dict[str, Any]:
    from dinov2.data.collate import collate_data_and_cast
    from dinov2.data.masking import MaskingGenerator

    rows, columns = MASK_GRID
    generator = MaskingGenerator(MASK_GRID, max_num_patches=rows // 2 * columns)
    image = torch.zeros(1)
    samples = [({"global_crops": [image] * 2, "local_crops": [image]},)] * (MASK_CROPS // 2)
    arrays = {}
    for seed in MASK_SEEDS:
        random.seed(seed)
        data = collate_data_and_cast(samples, RATIOS, PROBABILITY, torch.float64, rows * columns, generator)
        arrays[f"masks{seed}"] = np.packbits(data["collated_masks"].numpy())
        arrays["most_patches"] = np.array(data["upperbound"])
    return arrays


def record_gram() -> dict[str, Any]:
    from dinov3.loss.gram_loss import GramLoss

    student, teacher = (torch.from_numpy(w.normal(f"gram/{i}", GRAM_SIZE)).double() for i in range(2))
    value = GramLoss(apply_norm=True, remove_neg=False)(student.requires_grad_(), teacher)
    value.backward()
    return {"gram": value.detach().numpy(), "gram/grad": student.grad.numpy()}


def commit_of(path: Path) -> str:
    return subprocess.check_output(["git", "-C", str(path), "rev-parse", "HEAD"], text=True).strip()


def main() -> None:
    """Record everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("dinov2", "dinov3"):
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"checkout of facebookresearch/{name}")
        parser.add_argument(f"--{name}_commit", help="its commit, where PATH is no checkout")
    args = parser.parse_args()
    sys.path[:0] = [str(args.dinov2), str(args.dinov3)]
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # both cast to fp32 in places
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", f"file://{file.name}", rank=0, world_size=1)
        arrays = {**record_masks(), **record_gram(), **record_steps()}
        dist.destroy_process_group()
    header = {
        "repositories": [f"https://github.com/facebookresearch/{name}" for name in ("dinov2", "dinov3")],
        "commits": [args.dinov2_commit or commit_of(args.dinov2), args.dinov3_commit or commit_of(args.dinov3)],
        "command": "python tests/reference/record_ibot.py --dinov2 PATH --dinov3 PATH",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    np.savez_compressed(FOLDER / "ibot.npz", header=np.array(json.dumps(header)), **arrays)


if __name__ == "__main__":
    main()
