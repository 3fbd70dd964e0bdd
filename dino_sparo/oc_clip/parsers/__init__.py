"""Caption -> scene graph, not yet normalised; `command.py` parses all captions of a data set.

templates.py      closed word lists, no weights: exact on our scenes and on the phrasing of benchmarks
spacy_rules.py    noun chunks and dependency paths of spaCy
llm.py            any server with OpenAI's protocol, or a local language model
annotated.py      graphs that people drew: Visual Genome, GQA
"""
