"""Caption -> scene graph, as found, not yet normalised. The first two are `Callable[[str], SceneGraph]`.

    templates.py      closed word lists, no weights: exact on our scenes and on the phrasing of benchmarks
    spacy_rules.py    noun chunks and dependency paths of spaCy
    llm.py            any server with OpenAI's protocol, or a local language model
    annotated.py      graphs that people drew: Visual Genome, GQA

`command.py` runs them over all captions of a data set, `options.py` holds its options.
"""
