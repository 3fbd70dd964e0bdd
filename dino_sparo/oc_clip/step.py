"""One step of OC-CLIP: all images are scored with the graphs of all captions. The step itself is `image_text/step.py`.

    K^, V^ = patches of own images;  entities, relations = phrases of own captions         `OCCLIP.forward`
    entities, relations of all ranks                                                       gathered with gradients
    S_ij = S(image i, graph j),  own images with all graphs                                `score_all_pairs`
    loss = (CE_t2i + CE_i2t) / 2 + weight * L_rel / 2                                      nats, means over pairs

K^ and V^ stay where they are: they are the largest, and every pair is scored by the rank of its image.

The loss is equation 4 of OC-CLIP times 1 / (2 B). The paper's losses have no temperature, and the scores lie in
[-1, 1]: at B = 128 no model gets below 2.90 nats per direction. So both losses multiply the scores by a learned
`logit_scale`, as CLIP does; `None` is the paper's letter.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.image_text.step import batch_accuracy, contrastive_loss
from dino_sparo.oc_clip.batches import EncodedGraphs, GraphBatch, GraphPairBatch, join_graphs, look_up
from dino_sparo.oc_clip.model import OCCLIP
from dino_sparo.oc_clip.scoring import score_all_pairs
from dino_sparo.runtime.collectives import all_gather_object, gather_with_gradient
from dino_sparo.runtime.launch import rank, world_size


def relation_loss(
    true: Float[Tensor, " B"],
    swapped: Float[Tensor, " B"],
    shuffled: Float[Tensor, " B"],
    altered: Bool[Tensor, " B"],
    logit_scale: Float[Tensor, ""] | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Each graph against two of its own, whose relations are false, in its own image.

        L_rel = -1 / B sum_{i altered} log e^{s S(x_i, G_i)} / sum_G e^{s S(x_i, G)}

    with G the true graph, the swapped and the shuffled one; see `batches.draw_negatives`.

    Source: OC-CLIP, equation 6, with the mean in place of the sum. A pair without altered relations has three equal
    scores and the constant loss ln 3; it is left out of the sum, and counts in B.

    Returns:
        L_rel, and for the log the same sum divided by the number of pairs with an altered relation, 0 without any.
    """
    scores = torch.stack([true, swapped, shuffled], dim=-1)
    logits = scores if logit_scale is None else logit_scale * scores
    losses = (logits.logsumexp(dim=-1) - logits[:, 0]).masked_fill(~altered, 0)
    total = losses.sum()
    return total / len(losses), (total / altered.sum().clamp(min=1)).detach()


def graph_loss(
    network: OCCLIP, features: Sequence[Tensor], batches: Sequence[GraphPairBatch], rel_loss_weight: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The contrastive loss and the local loss of relations, nats, and numbers for the log.

    Logged are both, `itc_loss` and `rel_loss` (a mean over the pairs with altered relations), `batch_accuracy`, the
    share of this rank's images whose own graph scores highest among this rank's, `logit_scale`, and `ent_rel_ratio`,
    alpha / beta.
    """
    keys, values, entities, relations = features
    graphs = join_graphs([batch.graphs for batch in batches])
    own = look_up(graphs, entities, relations)
    every = own if world_size() == 1 else graphs_of_all_ranks(graphs, entities, relations)
    scores = score_all_pairs(network.binding, network.scoring, every, keys, values)
    scale = network.inverse_temperature
    contrast = loss = contrastive_loss(scores, scale)
    own_scores = scores[:, len(scores) * rank() :][:, : len(scores)]
    scalars = {"itc_loss": contrast.detach(), "batch_accuracy": batch_accuracy(own_scores)}
    if rel_loss_weight:
        local, scalars["rel_loss"] = local_loss(network, graphs, own, keys, values)
        loss = contrast + rel_loss_weight * local / 2
    if scale is not None:
        scalars["logit_scale"] = scale.detach()
    scalars["ent_rel_ratio"] = (network.scoring.ent_coef / network.scoring.rel_coef).detach()
    return loss, scalars


def local_loss(
    network: OCCLIP, graphs: GraphBatch, encoded: EncodedGraphs, keys: Float[Tensor, "B N dim"], values: Tensor
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """L_rel of this rank's matched pairs: the slots are bound once, and only the relations' scores differ."""
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
    """
    parts = all_gather_object(graphs)
    sizes = [len(part.phrases) for part in parts]

    def of_all(embeddings: Tensor) -> Tensor:
        padded = F.pad(embeddings, (0, 0, 0, max(sizes) - len(embeddings)))
        gathered = gather_with_gradient(padded)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])

    return look_up(join_graphs(parts), of_all(entities), of_all(relations))
