"""Which weights of a CLIP may stay as they start; where they start from is `image_text/initialize.py`."""

from collections.abc import Iterable

from dino_sparo.clip.model import is_frozen


def require_trained(frozen: Iterable[str], taken: Iterable[str], names: Iterable[str]) -> None:
    """Refuse to freeze weights that are random.

    Args:
        frozen: parts of `model.FREEZABLE`.
        taken: names of the weights that come from a file.
        names: of all weights.

    Raises:
        ValueError: names what is frozen and random.
    """
    parts, taken = list(frozen), set(taken)
    random = [name for name in names if is_frozen(name, parts) and name not in taken]
    if random:
        raise ValueError(
            f"--freeze {' '.join(parts)} would keep {len(random)} random weights ({', '.join(random[:3])}); start them "
            f"from a file (--init_clip, --init_from), or freeze image_backbone or text_backbone, which leaves read-out "
            f"and projection free"
        )
