"""One question at many points, over processes or a Dask cluster, kept in a folder; goals, sensitivity, differences."""
