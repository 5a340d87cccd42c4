"""What commands and notebooks share about relaxed synchronisation."""
