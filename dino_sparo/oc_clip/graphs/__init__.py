"""Scene graphs: files, canonical form, false graphs, batches."""
