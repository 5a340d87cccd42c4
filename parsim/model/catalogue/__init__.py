"""Models by name: the zoo, Hugging Face configs, transformers from their sizes, presets."""
