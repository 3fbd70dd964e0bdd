"""An image-text model -> numbers."""
