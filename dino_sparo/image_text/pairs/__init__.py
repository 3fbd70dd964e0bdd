"""Any pairs of images and captions -> batches of crops and token ids.

sources.py     a path -> what is there: scenes, classes, tables, shards
tables.py      CSV, COCO's JSON, folders
tars.py        webdataset shards, by index
streams.py     webdataset shards, one after the other
batches.py     pairs -> crops, token ids, batches
"""
