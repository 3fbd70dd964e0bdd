"""One step of CLIP: the loss compares all images' features with all captions'. The step itself is `image_text/step.py`.

`train.py` builds what goes in here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dino_sparo.clip.loss import create_loss
from dino_sparo.image_text.contrastive import MAX_LOGIT_SCALE
from dino_sparo.image_text.pairs.batches import PairBatch
from dino_sparo.image_text.step import ContrastiveTraining


@dataclass
class CLIPTraining(ContrastiveTraining[PairBatch]):
    """Everything a step needs and changes.

    Attributes:
        contrast: features and inverse temperature -> loss; from `create_loss`.
    """

    contrast: nn.Module = field(default_factory=create_loss)

    def encode(self, model: nn.Module, batch: PairBatch) -> tuple[Float[Tensor, "B M"], Float[Tensor, "captions M"]]:
        """Normalised features of images and captions."""
        with self.updater.autocast():
            output = model(self.normalized(batch.images), batch.token_ids)
        return output.image_features, output.text_features

    def loss(self, features: Sequence[Tensor], batches: Sequence[PairBatch]) -> tuple[Tensor, dict[str, Tensor]]:
        """The contrastive loss.

        Logged are `batch_accuracy`, the share of this rank's images whose own caption is the most similar among this
        rank's, and `logit_scale`, of this step.
        """
        logit_scale = self.network.logit_scale.exp()
        loss = self.contrast(*features, logit_scale)
        images, texts = (feature.detach() for feature in features)
        captions_per_image = len(texts) // len(images)
        nearest = (images @ texts[::captions_per_image].T).argmax(dim=1)  # false captions are left out
        accuracy = (nearest == torch.arange(len(nearest), device=nearest.device)).float().mean()
        return loss, {"batch_accuracy": accuracy, "logit_scale": logit_scale.detach()}

    @property
    def loss_parameters(self) -> list[nn.Parameter]:
        """The temperature."""
        return [self.network.logit_scale]

    def bound_weights(self) -> None:
        """Keep the temperature in its range."""
        self.network.logit_scale.clamp_(0, math.log(MAX_LOGIT_SCALE))
