"""Hardware profiles as package data: one JSON per machine; see README.md for the schema."""
