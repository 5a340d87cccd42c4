"""What a Timeline says: where each rank's step went, what made it as long as it was, what it could not go below."""
