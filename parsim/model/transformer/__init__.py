"""Models of transformers from their sizes, without torch: for models by name, frameworks' files and published runs."""
