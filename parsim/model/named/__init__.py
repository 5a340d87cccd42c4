"""Large models by name: a table of sizes with their sources, and the Models and configs that they stand for."""
