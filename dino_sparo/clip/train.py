"""Train CLIP with a SPARO read-out on pairs of images and captions.

    dino-sparo train-clip --data_path scenes --output_dir runs/clip      # built-in scenes, this machine
    torchrun --nproc_per_node=8 -m dino_sparo train-clip --preset cc3m --data_path 'cc3m/{00000..00331}.tar' \\
        --output_dir runs/cc3m
    python run_with_submitit.py --module dino_sparo.clip.train ...                 # the same on Slurm

Options are those of `options.py`. A step is `image_text/step.py`, what all image-text objectives share is
`image_text/objective.py`, the run is `training/run.py`. The same command resumes from the last checkpoint.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from dino_sparo.clip import options
from dino_sparo.clip.loss import clip_loss, require_products
from dino_sparo.clip.model import CLIP, PATCH_SIZE, create_clip, is_frozen
from dino_sparo.image_text.objective import PairObjective, tower_options
from dino_sparo.image_text.pairs.batches import PairBatch, collate_pairs
from dino_sparo.image_text.scorer import DotProductScorer
from dino_sparo.image_text.step import batch_accuracy
from dino_sparo.runtime.faults import UserError
from dino_sparo.runtime.launch import Distributed


class CLIPObjective(PairObjective[PairBatch]):
    """CLIP: match each image of a batch with its caption among all captions, and each caption with its image.

    Attributes:
        contrast: features and inverse temperature -> loss.
    """

    command = "train-clip"
    make_parser = options.get_args_parser
    model_name, model_key = "CLIP", "clip"
    check_combinations = options.check_options
    patch_size = PATCH_SIZE
    fixed_options: ClassVar[Sequence[str]] = (*PairObjective.fixed_options, "freeze", "negative_key")

    def __init__(self, args: argparse.Namespace, process: Distributed) -> None:
        require_products(args.logits, process.device)
        texts_per_image = 1 if args.negative_key is None else 2
        self.contrast: Callable[..., Tensor] = partial(clip_loss, products=args.logits, texts_per_image=texts_per_image)
        super().__init__(args, process, partial(collate_pairs, context_length=args.context_length))

    @staticmethod
    def build_model(args: argparse.Namespace) -> CLIP:
        """Both towers from the options, with random weights; the parts of `--freeze` are frozen."""
        slots = {"num_slots": args.sparo_slots, "slot_dim": args.sparo_slot_dim, "key_dim": args.sparo_key_dim}
        names = "readout", "embed_dim", "replace_block", "bottleneck_dim", "num_codes", "norm_first"
        sizes = {**tower_options(args), **{name: getattr(args, name) for name in names}}
        model = create_clip(**sizes, **slots, group_size=args.sparo_group_size)
        model.freeze(args.freeze or ())
        return model

    def initialize(self) -> None:
        """Start the image encoder, or both towers, from other weights; ValueError if frozen weights would be random."""
        require_trained(self.args.freeze or (), self.initialize_encoders(), self.network.state_dict())

    def encode(self, model: nn.Module, batch: PairBatch) -> tuple[Tensor, ...]:
        """Normalised features of images (B, M) and captions (captions, M), without the temperature of `ClipOutput`."""
        return super().encode(model, batch)[:2]

    def loss(self, features: Sequence[Tensor], batches: Sequence[PairBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The contrastive loss.

        Logged are `batch_accuracy`, the share of this rank's images whose own caption is the most similar among this
        rank's, and `logit_scale`, of this step.
        """
        logit_scale = self.logit_scale
        loss = self.contrast(*features, logit_scale)
        images, texts = (feature.detach() for feature in features)
        cosines = images @ texts[:: len(texts) // len(images)].T  # false captions are left out
        return loss, {"batch_accuracy": batch_accuracy(cosines), "logit_scale": logit_scale.detach()}

    @property
    def loss_parameters(self) -> list[nn.Parameter]:
        """The temperature."""
        return [self.network.logit_scale]

    @property
    def scorer(self) -> DotProductScorer:
        """The model as evaluations use it."""
        return DotProductScorer(self.network, *self.scorer_settings, tokenize=self.network.text.tokenize)


def require_trained(frozen: Iterable[str], taken: Iterable[str], names: Iterable[str]) -> None:
    """Refuse to freeze random weights: weights of frozen parts, among `names`, that are not `taken` from a file."""
    parts, taken = list(frozen), set(taken)
    random = [name for name in names if is_frozen(name, parts) and name not in taken]
    if random:
        raise UserError(
            f"--freeze {' '.join(parts)} would keep {len(random)} random weights ({', '.join(random[:3])}); start them "
            f"from a file (--init_clip, --init_from), or freeze image_backbone or text_backbone, which leaves read-out "
            f"and projection free"
        )
