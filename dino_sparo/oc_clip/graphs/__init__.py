"""Scene graphs: files, canonical form, batches."""
