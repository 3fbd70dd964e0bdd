"""Numbers that the papers of SPARO and OC-CLIP print, in percent, for comparison. None was measured with this code.

Column -> benchmark and row -> number. SPARO: table 4, all slots. OC-CLIP: tables 1, 2, 3 and 5; table 5 does not say
which of its models it is about.
"""

REPLACED = (("sugarcrepe", "replace_obj"), ("sugarcrepe", "replace_att"), ("sugarcrepe", "replace_rel"))
SWAPPED = (("sugarcrepe", "swap_obj"), ("sugarcrepe", "swap_att"))
ADDED = (("sugarcrepe", "add_obj"), ("sugarcrepe", "add_att"))
SPATIAL = (("coco-spatial", "macro"), ("gqa-spatial", "macro"))
WINOGROUND = (("winoground", "text"), ("winoground", "image"), ("winoground", "group"))
VL_CHECKLIST = (("vl-checklist", "Object"), ("vl-checklist", "Relation"), ("vl-checklist", "Attribute"))
ARO = (("aro-attribution", "macro"), ("aro-relation", "macro"), ("coco-order", "macro"), ("flickr-order", "macro"))

# Rows in the order in which a paper's tables have them.
SPARO = (*REPLACED, *SWAPPED, *ADDED, ("sugarcrepe", "macro"))
OC_CLIP = (*SWAPPED, *ADDED, *REPLACED, *SPATIAL, *WINOGROUND)
OC_CLIP_5 = (*VL_CHECKLIST, *ARO)

Numbers = dict[tuple[str, str], float]


def _numbers(rows: tuple[tuple[str, str], ...], *values: float) -> Numbers:
    return dict(zip(rows, values, strict=True))


PAPERS: dict[str, Numbers] = {
    "CLIP16+SPARO CC15M": _numbers(SPARO, 89.6, 79.8, 66.6, 59.3, 70.0, 77.9, 67.9, 73.0),
    "CLIP32+SPARO L400M": _numbers(SPARO, 92.7, 82.2, 67.8, 58.5, 71.9, 86.6, 79.4, 77.0),
    "OpenCLIP-FT": _numbers(OC_CLIP, 63.1, 72.4, 93.4, 83.1, 95.4, 87.0, 75.5, 45.6, 49.1, 25.6, 11.5, 7.8),
    "NegCLIP": _numbers(OC_CLIP, 75.2, 75.4, 88.8, 82.8, 92.7, 85.9, 76.5, 46.4, 46.7, 29.5, 10.5, 8.0)
    | _numbers(OC_CLIP_5, 84.1, 63.5, 70.9, 71.0, 81.0, 86.0, 91.0),
    "OC-CLIP B-16": _numbers(OC_CLIP, 76.3, 87.1, 91.3, 83.8, 93.9, 88.3, 77.0, 90.1, 93.9, 36.8, 14.5, 10.6),
    "OC-CLIP B-14": _numbers(OC_CLIP, 80.8, 88.5, 93.0, 83.8, 95.7, 88.8, 80.2, 93.5, 95.6, 37.8, 15.6, 10.2),
    "OC-CLIP table 5": _numbers(OC_CLIP_5, 84.5, 73.9, 73.7, 82.0, 86.5, 94.2, 84.8),
}
