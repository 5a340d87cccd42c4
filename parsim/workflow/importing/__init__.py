"""`parsim import`: what a file of another tool becomes, and where it is kept."""
