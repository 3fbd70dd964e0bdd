"""OC-CLIP's loss: all images are scored with the graphs of all captions, and each graph is compared with false ones.

    K^, V^ = patches of own images;  entities, relations = phrases of own captions         `OCCLIP.forward`
    entities, relations of all ranks                                                       `graphs_of_all_ranks`
    S_ij = S(image i, graph j),  own images with all graphs                                `score_all_pairs`
    L_itc = (CE_t2i + CE_i2t) / 2                                                          `contrastive_loss`
    L_rel of own images with their graphs                                                  `local_loss`
    loss = L_itc + weight * L_rel / 2, nats, means over pairs                              `OCCLIPObjective.loss`

K^ and V^ stay where they are: they are the largest, and every pair is scored by the rank of its image.

The loss is equation 4 of OC-CLIP times 1 / (2 B). The paper's losses have no temperature, and the scores lie in
[-1, 1]: at B = 128 no model gets below 2.90 nats per direction. So both losses multiply the scores by a learned
`logit_scale`, as CLIP does; with `--logit_scale none` it is 1, as in the paper.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from dino_sparo.oc_clip.batches import EncodedGraphs, GraphBatch, join_graphs, look_up
from dino_sparo.oc_clip.model import OCCLIP
from dino_sparo.runtime.collectives import all_gather_object, gather_with_gradient


def relation_loss(
    scores: Float[Tensor, "B 3"], altered: Bool[Tensor, " B"], logit_scale: Float[Tensor, ""] | None = None
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Each graph against two copies with false relations, in the image of the graph.

        L_rel = -1 / B sum_{i altered} log e^{s S(x_i, G_i)} / sum_G e^{s S(x_i, G)}

    with G the true graph, the swapped and the shuffled one, in the order of `scores`; see `batches.draw_negatives`.

    Source: OC-CLIP, equation 6, with the mean in place of the sum. A pair without altered relations has three equal
    scores and the constant loss ln 3; it is left out of the sum, and counts in B.

    Returns:
        L_rel, and for the log the same sum divided by the number of pairs with an altered relation, 0 without any.
    """
    logits = scores if logit_scale is None else logit_scale * scores
    losses = (logits.logsumexp(dim=-1) - logits[:, 0]).masked_fill(~altered, 0)
    total = losses.sum()
    return total / len(losses), (total / altered.sum().clamp(min=1)).detach()


def local_loss(
    network: OCCLIP,
    graphs: GraphBatch,
    encoded: EncodedGraphs,
    keys: Float[Tensor, "B N dim"],
    values: Float[Tensor, "B N dim"],
    logit_scale: Float[Tensor, ""],
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """L_rel of this rank's matched pairs: the slots are bound once, and only the relations' scores differ."""
    slots = network.binding.bind_matched(encoded.entities, encoded.entity_mask, keys, values)[None]
    scores = [
        network.scoring(*encoded._replace(subjects=subjects, objects=objects).tensors, slots)[0]
        for subjects, objects in graphs.ends.to(keys.device, non_blocking=True)
    ]
    is_altered = graphs.is_altered.to(keys.device, non_blocking=True)
    return relation_loss(torch.stack(scores, dim=-1), is_altered, logit_scale)


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
