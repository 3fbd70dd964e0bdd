"""The words that `templates.py` knows: relations, and what is none. Nouns and most adjectives are not listed.

Gathered from the relations of Visual Genome and from the phrasing of ARO, What'sUp and VL-CheckList as far as we know
it. A verb that is also a common noun ("building", "painting") is left out.
"""

from dino_sparo.data.scenes import COLOURS, RELATIONS
from dino_sparo.oc_clip.graphs.graph import ARTICLES


def _words(text: str) -> frozenset[str]:
    """The words of a text; `_` stands for a blank within one."""
    return frozenset(word.replace("_", " ") for word in text.split())


SIDES = _words("left right")
_POSITIONS = sorted(_words("top front back side middle center centre edge bottom corner end"))

# The longest that fits is taken. Some verbs are here, since no word tells them from a preposition's use.
PREPOSITIONS = frozenset(
    (
        *RELATIONS,
        *(f"{word} the {side}{of}" for word in ("to", "on", "at") for side in SIDES for of in (" of", " side of")),
        *(f"{word} {the}{name} of" for word in ("in", "on", "at") for the in ("", "the ") for name in _POSITIONS),
    )
) | _words(
    """
    above across against along alongside amid among around aside at atop before behind below beneath beside besides
    between beyond by down during for from in inside into near off on onto opposite outside over past through
    throughout to toward towards under underneath up upon via with within without adjacent_to ahead_of along_with
    attached_to away_from close_to connected_to far_away_from far_from full_of in_between inside_of made_of next_to
    on_board out_of outside_of together_with carries catches chases contains eats has have having hits holds includes
    kicks pulls throws uses rides wears
    """
)
# A relation after a noun, an attribute before one ("a running dog").
VERBS = _words(
    """
    approaching asking attaching biting blowing boarding boiling brushing buttoning carrying casting chasing chewing
    cleaning coming climbing closing cooking covering cradling cutting dancing decorating descending dipping
    displaying dividing dragging drinking driving drying eating enclosing enjoying entering examining exiting facing
    falling feeding filling fixing floating flying following gliding going grazing grilling gripping growing guiding
    hanging having helping herding hitting holding hugging jogging jumping kicking kissing kneeling launching laying
    leading leaning leaving licking lifting loading looking lounging lying making mounting moving operating
    overlooking packing passing paying peeling petting picking playing pointing posing pouring preparing pulling
    pushing reaching reading repairing resting riding rowing running sailing serving sharing sharpening shearing
    showing signing sipping sitting skateboarding skiing sleeping slicing sliding smelling smiling smoking sniffing
    snowboarding spinning spreading squatting squeezing standing staring stepping sticking stirring stretching
    supporting surfing surrounding swimming swinging taking talking tasting throwing touching towing traveling
    trimming turning tying typing using visiting wading waiting walking washing watching watering waving wearing
    whispering wielding working wrapping
    """
)
# A relation before a preposition alone ("parked on", "sits in"); elsewhere part of a phrase ("a parked car").
PARTICIPLES = _words(
    """
    arranged attached balanced based built carried colored coloured connected covered crossed decorated displayed
    dressed driven eaten filled fixed flies folded followed gathered graze grazes hangs held hung installed kept laid
    lays leaned leans lie lies lined lit loaded located looks made mounted packed painted parked perched piled placed
    planted plugged positioned printed propped pulled put reflected rests ridden runs scattered seated set sit sits
    situated spread stacked stands stored strapped stuck surrounded suspended textured tied topped tucked walks worn
    wrapped written
    """
)
COPULAS = _words("am are be been being is was were")
# After these "and" joins a second object ("with a hat and a coat"); after other relations it begins anew.
SHARING = _words("between eating has have having holding holds in_between wearing wears with without")

AND = _words("& and but or plus")
SPLITTING = _words(", as while")
WHICH = _words("that which who")
IT = _words("him it them")  # "her" is also a determiner
EACH_OTHER = _words("each_other herself himself itself one_another themselves")
DETERMINERS = frozenset(ARTICLES) | _words("another four her his its many some that their these this those three two")
ADJECTIVES = frozenset(COLOURS) | _words("big black brown gold gray grey large little old silver small tall young")
# Places in the picture, not things in it: they stay in the phrase.
PLACES = SIDES | _words("back background bottom center centre distance foreground front middle top")
