"""What `parsim export` writes, one module per format. Start reading at `parsim.workflow.exporting.formats`."""
