"""Any pairs of images and captions -> batches of crops and token ids.

sources.py     a path -> what is there: scenes, classes, tables, shards
captions.py    where the captions of an image come from
tables.py      CSV, COCO's JSON
tars.py        webdataset shards, by index
streams.py     webdataset shards, one after the other
batches.py     pairs -> crops, token ids, batches
"""
