"""Images -> batches of crops: scenes and sources (images by index), data set, samplers, loader, augmentation."""
