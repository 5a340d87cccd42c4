"""What indexes of plans share."""
