"""A question asked, answered, and kept in a folder."""
