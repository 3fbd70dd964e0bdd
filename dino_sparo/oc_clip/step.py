"""One step of OC-CLIP: all images are scored with the graphs of all captions. The step itself is `image_text/step.py`.

    K^, V^ = patches of own images;  entities, relations = phrases of own captions         `OCCLIP.forward`
    entities, relations of all ranks                                                       gathered with gradients
    S_ij = S(image i, graph j),  own images with all graphs                                `score_all_pairs`
    loss = L_itc(S) + weight * L_rel / 2                                                   `contrastive.py`, `loss.py`

K^ and V^ stay where they are: they are the largest, and every pair is scored by the rank of its image.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.image_text.step import contrastive_loss
from dino_sparo.oc_clip.graphs.batches import GraphBatch, join_graphs
from dino_sparo.oc_clip.loss import RelationLoss, relation_loss, total_loss
from dino_sparo.oc_clip.model import OCCLIP, look_up
from dino_sparo.oc_clip.pairs import GraphPairBatch
from dino_sparo.oc_clip.scoring import EncodedGraphs, score_all_pairs
from dino_sparo.runtime.agree import all_gather_object
from dino_sparo.runtime.collectives import gather_with_gradient
from dino_sparo.runtime.launch import rank, world_size


def graph_loss(
    network: OCCLIP, features: Sequence[Tensor], batches: Sequence[GraphPairBatch], rel_loss_weight: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The contrastive loss and the local loss of relations, nats, and numbers for the log.

    Logged are both, `itc_loss` and `rel_loss` (a mean over the pairs with altered relations), `batch_accuracy`, the
    share of this rank's images whose own graph scores highest among this rank's, `logit_scale`, and `ent_rel_ratio`,
    alpha / beta.

    Args:
        network: the model.
        features: its output, of all micro-batches of this rank.
        batches: the micro-batches.
        rel_loss_weight: lambda; 0 leaves the local loss out.
    """
    keys, values, entities, relations = features
    graphs = join_graphs([batch.graphs for batch in batches])
    own = look_up(graphs, entities, relations)
    every = own if world_size() == 1 else graphs_of_all_ranks(graphs, entities, relations)
    scores = score_all_pairs(network.binding, network.scoring, every, keys, values)
    scale = network.inverse_temperature
    contrast = loss = contrastive_loss(scores, scale)
    scalars = {"itc_loss": contrast.detach(), "batch_accuracy": _accuracy(scores.detach())}
    if rel_loss_weight:
        local = local_loss(network, graphs, own, keys, values)
        loss = total_loss(contrast, local.loss, rel_loss_weight)
        scalars["rel_loss"] = local.mean
    if scale is not None:
        scalars["logit_scale"] = scale.detach()
    scalars["ent_rel_ratio"] = (network.scoring.ent_coef / network.scoring.rel_coef).detach()
    return loss, scalars


def local_loss(
    network: OCCLIP, graphs: GraphBatch, encoded: EncodedGraphs, keys: Float[Tensor, "B N dim"], values: Tensor
) -> RelationLoss:
    """L_rel of matched pairs: the slots are bound once, and only the relations' scores differ.

    Args:
        network: the model.
        graphs: of this rank's captions, with two false graphs each.
        encoded: the true graphs.
        keys: of this rank's images.
        values: of this rank's images.
    """
    slots = network.binding.bind_matched(encoded.entities, encoded.entity_mask, keys, values)[None]
    true, swapped, shuffled = (
        network.scoring.scores(encoded._replace(subjects=subjects, objects=objects), slots)[0]
        for subjects, objects in graphs.ends.to(keys.device, non_blocking=True)
    )
    is_altered = graphs.is_altered.to(keys.device, non_blocking=True)
    return relation_loss(true, swapped, shuffled, is_altered, network.inverse_temperature)


def graphs_of_all_ranks(
    graphs: GraphBatch, entities: Float[Tensor, "phrases dim"], relations: Float[Tensor, "phrases rel_dim"]
) -> EncodedGraphs:
    """The graphs of all ranks, in rank order, with gradients to the embeddings of their phrases.

    Graphs travel through the host, so that no device waits for their sizes; embeddings are filled up to the largest
    number of phrases.

    Args:
        graphs: of this rank.
        entities: of its phrases.
        relations: of its phrases, as relations.
    """
    parts = all_gather_object(graphs)
    sizes = [len(part.phrases) for part in parts]

    def of_all(embeddings: Tensor) -> Tensor:
        padded = F.pad(embeddings, (0, 0, 0, max(sizes) - len(embeddings)))
        gathered = gather_with_gradient(padded)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])

    return look_up(join_graphs(parts), of_all(entities), of_all(relations))


def _accuracy(scores: Float[Tensor, "B U"]) -> Float[Tensor, ""]:
    own = scores[:, len(scores) * rank() :][:, : len(scores)]
    return (own.argmax(dim=1) == torch.arange(len(own), device=own.device)).float().mean()
