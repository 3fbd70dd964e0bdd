"""Images -> embeddings on disk; embeddings -> clusters, nearest images, near copies, predictions."""
