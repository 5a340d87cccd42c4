"""A placement for each component, solved exactly or certified by a MILP."""
