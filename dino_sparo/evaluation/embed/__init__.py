"""Images -> embeddings on disk, and what people do with them next: clusters, predictions."""
