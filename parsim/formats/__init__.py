"""Files of other tools: one module per tool recognises, reads and writes them. `parsim.formats.source` lists the rows.

A reader takes a `SourceFile` and returns values, or raises ImportedFileError with what was expected, what was found and what to
do. Nothing is silently empty, and what was left out is counted. A writer takes values and a path, never a run folder.
"""
