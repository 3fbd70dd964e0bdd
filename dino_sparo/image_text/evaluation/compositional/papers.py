"""Numbers that the papers of SPARO and OC-CLIP print, in percent, for comparison. None was measured with this code.

Column -> benchmark and row -> number. SPARO: table 4, all slots. OC-CLIP: tables 1, 2, 3 and 5; table 5 does not say
which of its models it is about.
"""

CREPE = ("replace_obj", "replace_att", "replace_rel", "swap_obj", "swap_att", "add_obj", "add_att")
OC_CREPE = ("swap_obj", "swap_att", "add_obj", "add_att", "replace_obj", "replace_att", "replace_rel")
SPATIAL = ("coco-spatial", "gqa-spatial")
GROUPS = (("vl-checklist", "Object"), ("vl-checklist", "Relation"), ("vl-checklist", "Attribute"))
ARO = ("aro-attribution", "aro-relation", "coco-order", "flickr-order")

Numbers = dict[tuple[str, str], float]


def _numbers(
    crepe: tuple[str, ...] = (),
    values: tuple[float, ...] = (),
    spatial: tuple[float, ...] = (),
    winoground: tuple[float, ...] = (),
) -> Numbers:
    numbers = {("sugarcrepe", split): value for split, value in zip(crepe, values, strict=False)}
    if len(values) > len(crepe):
        numbers["sugarcrepe", "macro"] = values[-1]
    numbers |= {(name, "macro"): value for name, value in zip(SPATIAL, spatial, strict=False)}
    return numbers | {
        ("winoground", score): value for score, value in zip(("text", "image", "group"), winoground, strict=False)
    }


PAPERS: dict[str, Numbers] = {
    "CLIP16+SPARO CC15M": _numbers(CREPE, (89.6, 79.8, 66.6, 59.3, 70.0, 77.9, 67.9, 73.0)),
    "CLIP32+SPARO L400M": _numbers(CREPE, (92.7, 82.2, 67.8, 58.5, 71.9, 86.6, 79.4, 77.0)),
    "OpenCLIP-FT": _numbers(
        OC_CREPE, (63.1, 72.4, 93.4, 83.1, 95.4, 87.0, 75.5), (45.6, 49.1), winoground=(25.6, 11.5, 7.8)
    ),
    "NegCLIP": _numbers(
        OC_CREPE, (75.2, 75.4, 88.8, 82.8, 92.7, 85.9, 76.5), (46.4, 46.7), winoground=(29.5, 10.5, 8.0)
    )
    | dict(zip([*GROUPS, *((name, "macro") for name in ARO)], (84.1, 63.5, 70.9, 71.0, 81.0, 86.0, 91.0), strict=True)),
    "OC-CLIP B-16": _numbers(
        OC_CREPE, (76.3, 87.1, 91.3, 83.8, 93.9, 88.3, 77.0), (90.1, 93.9), winoground=(36.8, 14.5, 10.6)
    ),
    "OC-CLIP B-14": _numbers(
        OC_CREPE, (80.8, 88.5, 93.0, 83.8, 95.7, 88.8, 80.2), (93.5, 95.6), winoground=(37.8, 15.6, 10.2)
    ),
    "OC-CLIP table 5": dict(
        zip([*GROUPS, *((name, "macro") for name in ARO)], (84.5, 73.9, 73.7, 82.0, 86.5, 94.2, 84.8), strict=True)
    ),
}
